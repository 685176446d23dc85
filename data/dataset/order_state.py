"""What the order of samples is made from, and a position in it: values alone."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from data.buckets import Choice
from data.errors import DataError
from data.types import Bucket

MARK_EVERY = 2048  # draws between two marks, positions to draw from again

SizesRecord = TypedDict("SizesRecord", {"from": int, "sizes": dict[str, int]})


@dataclass(frozen=True, slots=True)
class SampleDraw:
    """A row drawn for training. `number` counts the draws of the run."""

    source: int
    epoch: int
    row: int
    number: int


@dataclass(frozen=True, slots=True)
class BatchDraw:
    """One bucket batch: the draws that meet in it."""

    bucket: Bucket
    draws: tuple[SampleDraw, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Population:
    """The rows of a source as the planner sees them."""

    name: str
    shard_bounds: np.ndarray  # int64 [shards + 1]: rows of shard s are bounds[s]:bounds[s + 1]
    shape: np.ndarray  # int32 [rows]: number of the row's shape, -1 for rows that no stage trains
    window: int  # shards shuffled together


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A curriculum segment with everything resolved; valid for steps before `until_step` (0: without end)."""

    until_step: int
    choices: tuple[tuple[Choice, ...], ...]  # per shape, empty when no bucket takes it
    batch: Mapping[Bucket, int]
    tokens: Mapping[Bucket, int]  # of one sample, for mixtures by tokens
    weights: tuple[float, ...]  # per source, sum 1
    items_per_step: int
    max_wait: int
    by_tokens: bool = False
    crop: bool = False  # clips larger than their bucket are cut to its middle, not scaled
    settings: str = ""  # what `choices` came from, for the identity of the plan


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """Clips per batch of each bucket from a step on, instead of those that a stage began with. A decision of the run:
    once made it is data, so that any number of workers and any resume see the same batches."""

    from_step: int
    sizes: Mapping[Bucket, int]

    def to_json(self) -> SizesRecord:
        return {"from": self.from_step, "sizes": {str(bucket): size for bucket, size in sorted(self.sizes.items())}}

    @classmethod
    def from_json(cls, record: SizesRecord) -> BatchSizes:
        """Raises DataError for sizes below 1."""
        sizes = {Bucket.parse(name): int(size) for name, size in record["sizes"].items()}
        if min(sizes.values(), default=1) < 1:
            raise DataError(f"batch sizes {record['sizes']} from step {record['from']} on must be at least 1.")
        return cls(from_step=int(record["from"]), sizes=sizes)


@dataclass(slots=True)
class Cursor:
    """Where a source stands, and how much the mixture has taken of it in this stage."""

    epoch: int = 0
    window: int = 0
    position: int = 0
    drawn: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class SourceMark:
    """Where the sources stood before draw `number`."""

    number: int
    cursors: tuple[Cursor, ...]

    @classmethod
    def of(cls, state: OrderState) -> SourceMark:
        return cls(state.drawn, tuple(copy(cursor) for cursor in state.cursors))


@dataclass(slots=True)
class OrderState:
    """The planner's position: everything the future depends on. Stands before step `step`.

    `marks` are earlier positions of the same stage, oldest first; the future does not depend on them.
    """

    step: int
    stage: int
    drawn: int  # admitted draws so far
    passed: int  # draws without a bucket: by the probabilities of a table, or dropped when a stage ended
    cursors: list[Cursor]
    queues: dict[Bucket, list[SampleDraw]] = field(default_factory=dict)
    ready: list[BatchDraw] = field(default_factory=list)
    marks: list[SourceMark] = field(default_factory=list)

    def copy(self) -> OrderState:
        return OrderState(
            self.step,
            self.stage,
            self.drawn,
            self.passed,
            [copy(cursor) for cursor in self.cursors],
            {bucket: list(queue) for bucket, queue in self.queues.items()},
            list(self.ready),
            list(self.marks),
        )

    @property
    def mark_is_due(self) -> bool:
        """Whether enough was drawn since the newest mark for another one."""
        return self.drawn - self.marks[-1].number >= MARK_EVERY

    @property
    def waiting(self) -> int:
        return sum(map(len, self.queues.values())) + sum(len(micro.draws) for micro in self.ready)
