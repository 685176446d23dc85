"""Batch sizes from a profile keep to the wanted seconds and to memory."""

from __future__ import annotations

import pytest

from actors.plan.costs.needs import NeedLine
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.planning.batching import TargetBatch, best_sizes, fitted_limits, moved, seconds_of
from actors.planning.options import flop_profile
from data.config import BatchConfig
from data.types import Bucket
from ops.geometry import Geometry
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.wan.config import WanConfig

GEOMETRY = Geometry()
PROFILE = Profile.from_flops(WanConfig(), VAEConfig(), TextConfig(), GEOMETRY)


def size(shape: tuple[int, int, int], **limits: float) -> int:
    config = BatchConfig(**{"memory_tokens": 1e9, "text_tokens": 32, **limits})
    return TargetBatch(profile=PROFILE, geometry=GEOMETRY)(Bucket(*shape), config)


@pytest.mark.parametrize("shape", [(1, 64, 96), (17, 64, 96), (33, 256, 256)])
def test_the_batch_is_the_largest_within_the_seconds(shape: tuple[int, int, int]) -> None:
    target = 5 * PROFILE.seconds("dit", Samples.of(1, shape, 32), 1)
    chosen = size(shape, target_s=target)
    one_more, most = (PROFILE.seconds("dit", Samples.of(chosen + more, shape, 32), 1) for more in (1, 0))
    assert most <= target < one_more


def test_memory_and_cap_bind_first_and_one_clip_always_goes() -> None:
    shape = (17, 64, 96)
    tokens = 32 + GEOMETRY.tokens(*shape)
    assert size(shape, target_s=1e9, memory_tokens=3.5 * tokens) == 3
    assert size(shape, target_s=1e9, max_batch=2) == 2
    assert size(shape, target_s=1e-12) == 1


# data.batch: auto

BUCKETS = (Bucket(1, 256, 256), Bucket(17, 256, 256), Bucket(33, 480, 832), Bucket(81, 480, 832))
A, B_, P = 0.05, 2e-9, 1.9


def known(scale: float = 1.0) -> Profile:
    """A profile whose measured points are a + b B S^p, of degree 1."""
    profile = Profile.from_flops(WanConfig(), VAEConfig(), TextConfig(), GEOMETRY)
    for bucket in BUCKETS:
        for batch in (1, 2, 4):
            length = GEOMETRY.tokens(bucket.frames, bucket.height, bucket.width) + 100
            key = ("dit", batch, bucket.frames, bucket.height, bucket.width, 1)
            profile.measured[key] = scale * (A + B_ * batch * length**P)
    return profile


def test_the_limits_are_those_of_the_fit() -> None:
    limits = BatchConfig(auto=True, target_s=10.0, text_tokens=100)
    profile = known()
    profile.needs.predicted["dit", "solo"] = NeedLine(fixed_gib=4.0, gib_per_unit=0.001)
    found, fit = fitted_limits(profile, BUCKETS, limits, room_gib=54.0)
    assert fit.exponent == pytest.approx(P) and fit.r2 == pytest.approx(1.0)
    assert found.compute == pytest.approx((10.0 - A) / B_, rel=1e-4)
    assert found.memory_tokens == 50_000  # (54 - 4) / 0.001
    assert fitted_limits(known(), BUCKETS, limits)[0].memory_tokens == limits.memory_tokens, "no limit is known"


def test_without_a_target_one_clip_of_the_longest_bucket_sets_it() -> None:
    limits = BatchConfig(auto=True, text_tokens=100, memory_tokens=1e6)
    sizes = best_sizes(known(), BUCKETS, limits)
    assert sizes[BUCKETS[-1]] == 1 and sizes[BUCKETS[0]] > sizes[BUCKETS[1]] > sizes[BUCKETS[2]] > 1


@pytest.mark.parametrize("dearer", [0.1, 3.0, 100.0])
def test_costs_that_were_thought_lower_everywhere_leave_the_sizes_of_an_automatic_target(dearer: float) -> None:
    """A run begins with the FLOP model of its device and measures other seconds: with those of the model as a target
    every batch was re-sized to one clip."""
    limits = BatchConfig(auto=True, text_tokens=100, memory_tokens=1e6)
    begun, fit = fitted_limits(known(), BUCKETS, limits)
    sizes = best_sizes(known(), BUCKETS, begun)
    assert begun.target_s == 0 and best_sizes(known(dearer), BUCKETS, begun) == sizes
    longest = 100 + GEOMETRY.tokens(BUCKETS[-1].frames, BUCKETS[-1].height, BUCKETS[-1].width)
    assert seconds_of(begun, fit) == pytest.approx(A + B_ * longest**P, rel=1e-3)


def test_a_target_below_what_any_cascade_takes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target_s is 0\.01 s, and any cascade takes 0\.05"):
        fitted_limits(known(), BUCKETS, BatchConfig(auto=True, target_s=0.01, text_tokens=100))


def test_costs_that_double_halve_the_batches_and_are_told_by_bucket() -> None:
    limits = BatchConfig(auto=True, target_s=400.0, text_tokens=100, memory_tokens=1e9)
    now, slower = best_sizes(known(), BUCKETS, limits), best_sizes(known(2.0), BUCKETS, limits)
    changed = moved(now, slower, 0.15)
    assert set(changed) == {b for b in BUCKETS if now[b] > 1}
    shares = [best / size for size, best in changed.values() if size > 20]
    assert shares and all(0.4 < share < 0.6 for share in shares)
    assert moved(now, now, 0.15) == {}
    assert moved({BUCKETS[0]: 100}, {BUCKETS[0]: 114}, 0.15) == {}


def test_a_gpu_without_a_profile_is_never_taken_for_a_cpu() -> None:
    model = ModelConfig(dit=WanConfig())
    clip = Samples.of(1, (81, 480, 832), 100)
    seconds = {d: flop_profile(model, GEOMETRY, d).seconds("dit", clip, 1) for d in ("cpu", "NVIDIA A100", "H100")}
    assert seconds["cpu"] > 100 * seconds["NVIDIA A100"] > 200 * seconds["H100"]
    unknown = flop_profile(model, GEOMETRY, "cuda")
    assert unknown.seconds("dit", clip, 1) == pytest.approx(seconds["H100"])
    assert "an H100's FLOPs are assumed" in unknown.notes[0]
