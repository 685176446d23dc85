"""How long steps take beside what their plans add up: the remainder that the planner learns. Pure.

Measured from the end of a step to the end of the next one, less waiting for data, less the end of the step, and less
the plan's makespan. Cascades that took far longer than planned, or far less, are a matter of their own costs, which are
learned: then it is the makespan at what they took. Nearer to it, their costs are known as medians, and where seconds
are skewed, as on workers that share cores, a step of many takes more than its medians add up to: that is remainder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.messages import Span
from actors.planning.actor import updates
from actors.planning.observations import cannot_be, work_of
from actors.step import CollectedStep

_FAR = 1.5  # measured over planned seconds of a step's cascades, either way, from which their costs are wrong


@dataclass
class StepPace:
    """The steps of a run, in the order in which they are collected."""

    _generation: int | None = field(default=None, init=False)  # of the last one
    _ended_at: float = field(default=0.0, init=False)  # monotonic seconds
    _waited_s: float = field(default=0.0, init=False)

    def waited_for_data(self, seconds: float) -> None:
        """The workers had nothing to do meanwhile."""
        self._waited_s += seconds

    def remainder(self, done: CollectedStep) -> float | None:
        """Seconds of a collected step that its plan does not know of, at least 0. None where that cannot be said, as of
        the first step of a generation, whose processes have to connect."""
        step_s = done.collected_at - self._ended_at - self._waited_s
        first = done.running.generation != self._generation
        self._generation, self._ended_at, self._waited_s = done.running.generation, done.collected_at, 0.0
        spans = [span for report in done.reports for span in report.spans]
        return None if first else remainder_of_step(spans, done.running.assignment.step.makespan_s, step_s)


def remainder_of_step(spans: Sequence[Span], makespan_s: float, step_s: float) -> float | None:
    """Remainder of a step with these spans that took `step_s` apart from waiting for data, by its planned makespan.
    None where a worker ran a shape for the first time, or where the end of the step was not measured."""
    stretch, ends = stretch_of(spans), updates(spans)
    if stretch is None or not ends or any(span.first_here for span in spans):
        return None
    return max(0.0, step_s - ends[0][1] - makespan_s * (1.0 if 1 / _FAR < stretch < _FAR else stretch))


def stretch_of(spans: Sequence[Span]) -> float | None:
    """Measured over planned seconds of a step's cascades, all together; None without any."""
    cascades = [s for s in spans if s.module != "finish" and s.planned_end_s > s.planned_start_s and not cannot_be(s)]
    planned_s = sum(s.planned_end_s - s.planned_start_s for s in cascades)
    return sum(map(work_of, cascades)) / planned_s if planned_s > 0 else None
