"""Batch sizes that a run with a `data.batch.target_s` begins with, in `first_batches.json` of its folder.

They follow from costs, and a later start may have others: another GPU, another profile, a cluster with a node less.
That is why they are kept: a controller that is started again, and any resume, form the batches that the run had.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from data.buckets import BatchSize, BucketTable
from data.config import BatchConfig, DataConfig, SegmentConfig
from data.errors import DataError
from data.types import Bucket
from ops.geometry import Geometry
from ops.whole_file import write_whole

FIRST_SIZES = "first_batches.json"


@dataclass(frozen=True, slots=True)
class FirstSizes:
    """`data.buckets.BatchSize`: as `first_sizes` has found or kept them."""

    sizes: Mapping[str, int]

    def __call__(self, bucket: Bucket, limits: BatchConfig) -> int:
        return self.sizes[_name(bucket, limits)]


def first_sizes(run_dir: Path, config: DataConfig, geometry: Geometry, timed: BatchSize) -> FirstSizes:
    """The sizes of every bucket whose batches are timed: those of the folder, and of buckets that it does not name
    those of `timed`, which it holds from now on. Raises DataError where the file cannot be read."""
    path = run_dir / FIRST_SIZES
    sizes = known = _read(path)
    for _, table, limits in segments_of(config, geometry):
        if limits.target_s and not limits.auto:
            named = {_name(bucket, limits): bucket for bucket in table.buckets}
            sizes = {**{name: timed(bucket, limits) for name, bucket in named.items() if name not in sizes}, **sizes}
    if sizes != known:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(sizes, indent=1), synced=True)
    return FirstSizes(sizes)


def segments_of(config: DataConfig, geometry: Geometry) -> Iterator[tuple[SegmentConfig, BucketTable, BatchConfig]]:
    """The segments of the data with their own buckets and limits, or else those of the run."""
    for segment, table in zip(config.stages, config.tables, strict=True):
        yield segment, BucketTable.build(table, geometry), segment.batch or config.batch


def _read(path: Path) -> dict[str, int]:
    if not path.is_file():
        return {}
    try:
        found = {str(name): int(size) for name, size in json.loads(path.read_text(encoding="utf-8")).items()}
        if min(found.values(), default=1) < 1:
            raise ValueError("a batch has at least one clip")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); it says which batches this run began with. Restore it, or start a new "
            f"run."
        ) from None
    return found


def _name(bucket: Bucket, limits: BatchConfig) -> str:
    return (
        f"{bucket} in {limits.target_s!r} s, memory_tokens {limits.memory_tokens!r}, max_batch {limits.max_batch}, "
        f"text_tokens {limits.text_tokens}"
    )
