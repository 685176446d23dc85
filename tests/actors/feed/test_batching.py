"""Batch sizes from a profile keep to the wanted seconds and to memory."""

from __future__ import annotations

import pytest

from actors.feed.batching import TargetBatch
from actors.plan.costs.profile import Profile
from data.config import BatchConfig
from data.types import Bucket
from ops.geometry import Geometry
from ops.models.config import TextConfig, VAEConfig
from ops.models.wan.config import WanConfig

GEOMETRY = Geometry()
PROFILE = Profile.from_flops(WanConfig(), VAEConfig(), TextConfig(), GEOMETRY)


def size(shape: tuple[int, int, int], **limits: float) -> int:
    config = BatchConfig(**{"memory_tokens": 1e9, "text_tokens": 32, **limits})
    return TargetBatch(profile=PROFILE, geometry=GEOMETRY)(Bucket(*shape), config)


@pytest.mark.parametrize("shape", [(1, 64, 96), (17, 64, 96), (33, 256, 256)])
def test_the_batch_is_the_largest_within_the_seconds(shape: tuple[int, int, int]) -> None:
    target = 5 * PROFILE.seconds("dit", 1, *shape, 1, 32)
    chosen = size(shape, target_s=target)
    assert PROFILE.seconds("dit", chosen, *shape, 1, 32) <= target < PROFILE.seconds("dit", chosen + 1, *shape, 1, 32)


def test_memory_and_cap_bind_first_and_one_clip_always_goes() -> None:
    shape = (17, 64, 96)
    tokens = 32 + GEOMETRY.tokens(*shape)
    assert size(shape, target_s=1e9, memory_tokens=3.5 * tokens) == 3
    assert size(shape, target_s=1e9, max_batch=2) == 2
    assert size(shape, target_s=1e-12) == 1
