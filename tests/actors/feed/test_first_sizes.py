"""A run with a target forms the batches that it began with, whatever later starts would find."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from actors.feed.first_sizes import FIRST_SIZES, first_sizes
from actors.planning.batching import TargetBatch
from actors.planning.options import flop_profile
from actors.run.recalibrate import stages_of
from data.config import BatchConfig, BucketsConfig, DataConfig, SegmentConfig
from data.errors import DataError
from data.types import Bucket
from ops.geometry import Geometry
from ops.models.config import ModelConfig

CLIP = Bucket(17, 64, 96)
DATA = DataConfig(
    buckets=BucketsConfig(table=("1x64x96", "17x64x96")),
    batch=BatchConfig(target_s=2e-3, max_batch=500, memory_tokens=1e6),
    segments=(SegmentConfig(until_step=5), SegmentConfig(until_step=0, batch=BatchConfig(max_batch=2))),
)


def costs(device: str) -> TargetBatch:
    geometry = Geometry()
    return TargetBatch(profile=flop_profile(ModelConfig(), geometry, device), geometry=geometry)


def test_a_later_start_on_another_gpu_forms_the_batches_that_the_run_began_with(tmp_path: Path) -> None:
    limits = DATA.batch
    slow, fast = costs("NVIDIA L4"), costs("NVIDIA H100 80GB HBM3")
    assert slow(CLIP, limits) < fast(CLIP, limits), "else nothing is shown"
    first = first_sizes(tmp_path, DATA, Geometry(), slow)
    later = first_sizes(tmp_path, DATA, Geometry(), fast)
    assert later(CLIP, limits) == first(CLIP, limits) == slow(CLIP, limits)
    assert [stage.sizes[CLIP] for stage in stages_of(DATA, Geometry(), later)] == [slow(CLIP, limits), 2]
    assert pickle.loads(pickle.dumps(later)) == later, "the feeder gets it"


def test_a_bucket_that_is_new_to_the_run_is_sized_once_and_then_kept(tmp_path: Path) -> None:
    first_sizes(tmp_path, DATA, Geometry(), lambda bucket, limits: 3)
    new = replace(DATA, segments=(*DATA.segments[:1], SegmentConfig(until_step=0, batch=BatchConfig(target_s=9.0))))
    sizes = [first_sizes(tmp_path, new, Geometry(), lambda bucket, limits, n=n: n) for n in (7, 8)]
    assert [one(CLIP, DATA.batch) for one in sizes] == [3, 3]
    assert [one(CLIP, BatchConfig(target_s=9.0)) for one in sizes] == [7, 7]


def test_a_run_whose_batches_no_costs_decide_keeps_nothing(tmp_path: Path) -> None:
    for batch in (BatchConfig(), BatchConfig(auto=True, target_s=1.0, compute=5.0)):
        first_sizes(tmp_path / "run", replace(DATA, batch=batch, segments=()), Geometry(), lambda bucket, limits: 3)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ['{"17x', "[]", '{"a": 0}', '{"a": "many"}'])
def test_sizes_that_cannot_be_read_end_the_start(text: str, tmp_path: Path) -> None:
    (tmp_path / FIRST_SIZES).write_text(text)
    with pytest.raises(DataError, match="which batches this run began with"):
        first_sizes(tmp_path, DATA, Geometry(), lambda bucket, limits: 3)
