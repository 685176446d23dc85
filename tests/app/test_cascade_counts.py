"""What a cascade of any family asks of a GPU beside its kernels, counted on the stand-in of one."""

from __future__ import annotations

import pytest

from app.bench.gpu.counting import counted_step
from ops.models.base.config import DiTConfig
from tests.families.registry import VARIANTS


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_a_cascade_uploads_its_layout_and_its_levels_and_waits_only_for_its_end(config: DiTConfig) -> None:
    """The first step tells which parts of a layout a family uses; from the second on they go in one copy."""
    cascade = counted_step(config).cascade
    assert (cascade.uploads, cascade.downloads, cascade.waits) == (2, 0, 1)
