"""Batch sizes that follow what a run measures: AdaptiveLoad's closed loop over batches (sec. 3.2).

Every `data.batch.recalibrate_steps` steps the planner is asked, and nothing waits for its answer. When the best size of
a bucket is off by more than `recalibrate_change`, all sizes are decided anew from the first step on that nobody has
asked the feeder for. The decision is kept in the run's folder before it holds, and is data from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from actors.feed.decisions import BatchDecisions
from actors.feed.first_sizes import segments_of
from actors.feed.step_source import StepSource
from actors.outcome import Events
from actors.planning.batching import moved
from actors.planning.client import PlannerClient, SizesAnswer
from actors.records.events import BatchesResized
from data.buckets import BatchSize, BucketTable, planned_batch
from data.config import BatchConfig, DataConfig
from data.dataset.order_state import BatchSizes, SizesRecord
from data.types import Bucket
from ops.geometry import Geometry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageSizes:
    """The buckets of a segment of the data, their limits, and the sizes that it begins with.

    `limited` are the buckets of all segments that have these limits: `data.batch.auto` is fitted to all of them.
    """

    until_step: int
    limits: BatchConfig
    sizes: dict[Bucket, int]
    limited: tuple[Bucket, ...]


def stages_of(config: DataConfig, geometry: Geometry, timed: BatchSize) -> list[StageSizes]:
    """The segments of the data, with the batch sizes that the data set gives them."""
    found, shared = [], BucketTable.buckets_of(config.tables_of_batch, geometry)
    for segment, table, limits in segments_of(config, geometry):
        sizes = {bucket: planned_batch(table, bucket, limits, geometry, timed)[0] for bucket in table.buckets}
        found.append(StageSizes(segment.until_step, limits, sizes, tuple(sizes) if segment.batch else shared))
    return found


@dataclass(kw_only=True)
class Recalibration:
    """One run's loop over batches."""

    stages: Sequence[StageSizes]
    decisions: BatchDecisions
    planner: PlannerClient
    source: StepSource
    events: Events
    _asked: tuple[StageSizes, SizesAnswer] | None = field(default=None, init=False)
    _told: dict[Bucket, tuple[int, int]] = field(default_factory=dict, init=False)  # what was suggested last

    @classmethod
    def of(
        cls,
        run_dir: Path,
        stages: Sequence[StageSizes],
        planner: PlannerClient,
        source: StepSource,
        events: Events,
    ) -> Recalibration:
        """The recalibration of a run; its source follows what was decided before. Raises DataError for decisions that
        cannot be read."""
        decisions = BatchDecisions(run_dir)
        for record in decisions.records:
            source.resize(record)
        return cls(stages=stages, decisions=decisions, planner=planner, source=source, events=events)

    def collected(self, step: int, room_gib: float = inf) -> None:
        """A step is finished, by workers with this room for a cascade: ask the planner when it is time, decide when it
        has answered."""
        if self._asked is not None:
            asked_for, answer = self._asked
            if answer.there:
                self._asked = None
                if (best := answer.sizes()) is not None:
                    self._decide(asked_for, best)
            return
        stage = self._stage(step)
        if stage.limits.recalibrate != "off" and (step + 1) % stage.limits.recalibrate_steps == 0:
            self._asked = stage, self.planner.ask_sizes(stage.limited, stage.limits, room_gib)

    def _decide(self, stage: StageSizes, best: dict[Bucket, int]) -> None:
        limits, from_step = stage.limits, self.source.next_unasked
        if self._stage(from_step) is not stage:
            return  # the next segment has sizes of its own
        if from_step <= max((one["from"] for one in self.decisions.records), default=-1):
            return  # these steps are computed again, with the sizes that they had
        now = self._sizes_at(stage, from_step)
        changed = moved(now, best, limits.recalibrate_change)
        if not changed or (limits.recalibrate == "suggest" and changed == self._told):
            return
        self._told = changed
        applied = limits.recalibrate == "on"
        if applied:
            record: SizesRecord = BatchSizes(
                from_step=from_step, sizes={b: best.get(b, n) for b, n in now.items()}
            ).to_json()
            try:
                self.decisions.add(record)  # before anything depends on it
            except OSError as error:  # the sizes stay as they are until the next look
                log.warning("other batch sizes cannot be kept, so none are used: %s", error)
                return
            self.source.resize(record)
        self.events.tell(
            BatchesResized(
                from_step=from_step,
                sizes={str(bucket): pair for bucket, pair in changed.items()},
                change=limits.recalibrate_change,
                target_s=limits.target_s,
                applied=applied,
            )
        )

    def _stage(self, step: int) -> StageSizes:
        return next((s for s in self.stages if not s.until_step or step < s.until_step), self.stages[-1])

    def _sizes_at(self, stage: StageSizes, step: int) -> dict[Bucket, int]:
        """Sizes that hold at a step of this stage, decisions included."""
        decided = [BatchSizes.from_json(one) for one in self.decisions.records if one["from"] <= step]
        mine = [one for one in decided if self._stage(one.from_step) is stage]
        latest = max(mine, key=lambda one: one.from_step).sizes if mine else {}
        return {bucket: latest.get(bucket, size) for bucket, size in stage.sizes.items()}
