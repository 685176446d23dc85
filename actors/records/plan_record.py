"""The plan of a step as other programs read it: plans/step-N.json of a run, and `heddle plan --json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actors.plan.types import Cascade, StepPlan
from actors.records.lines import line_of, record_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRecord:
    """Samples [first, first + count) of an item."""

    item: str
    first: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeRecord:
    """A cascade with its workers (by rank) and its predicted times, in seconds from the start of the step."""

    id: str
    item: str
    module: str
    step: int  # of its samples, which may be later than the step during which it runs
    batch: int
    degree: int
    workers: tuple[int, ...]
    start_s: float
    end_s: float
    parts: tuple[PartRecord, ...]  # the samples it runs; empty in a run's plans of 0.1 and early 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """One step's plan. Its cascades are all that run during the step, early encodes of later steps included."""

    makespan_s: float
    lower_bound_s: float
    plan_s: float  # finding it took so long; `planning_s` in metrics.jsonl
    idle_ratio: float
    cascades: tuple[CascadeRecord, ...]
    update_s: float = 0.0  # gradient sum, update and new parameters after the makespan; 0: not known
    remainder_s: float = 0.0  # beside both: dispatch, calls, snapshots, asides; 0: not known

    @classmethod
    def of(cls, plan: StepPlan, cascades: Sequence[Cascade], planning_s: float) -> PlanRecord:
        return cls(
            makespan_s=plan.makespan_s,
            lower_bound_s=plan.lower_bound_s,
            plan_s=planning_s,
            idle_ratio=plan.idle_ratio,
            cascades=tuple(_cascade(cascade) for cascade in cascades),
            update_s=plan.update_s,
            remainder_s=plan.remainder_s,
        )

    def line(self) -> dict[str, object]:
        """The plan's object of JSON."""
        return line_of(self)


def _cascade(cascade: Cascade) -> CascadeRecord:
    return CascadeRecord(
        id=cascade.id,
        item=cascade.item,
        module=cascade.module,
        step=cascade.step,
        batch=cascade.batch,
        degree=cascade.degree,
        workers=cascade.workers,
        start_s=cascade.start_s,
        end_s=cascade.end_s,
        parts=tuple(PartRecord(item=part.item, first=part.first, count=part.count) for part in cascade.parts),
    )


def plan_of(line: Mapping[str, object]) -> PlanRecord:
    """A plan from JSON, of this or an earlier version. Raises RecordError for a value of the wrong type."""
    return record_of(PlanRecord, line)
