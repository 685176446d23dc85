"""How fast each worker is compared with the others, from measured cascades. Pure; the planner gives a slow one less.

Only cascades on one worker tell: inside a bag everybody takes the time of the slowest.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from actors.messages import Span, StepReport
from actors.planning.observations import work_of

_MEMORY = 0.98  # weight of the past at each step
_NOTICEABLE = 0.3  # smaller deviations are noise (shared CPUs: 20 %) and change no plan
_LEAST_SPANS = 100  # before a worker is judged


@dataclass
class Speeds:
    """Running ratio of planned to measured seconds per worker."""

    _ratio: dict[str, float] = field(default_factory=dict)
    _spans: dict[str, int] = field(default_factory=dict)

    def observe(self, reports: Iterable[StepReport], planned_with: Mapping[str, float]) -> None:
        """Take in a finished step; `planned_with` are the factors its plan already counted on."""
        for report in reports:
            alone = [
                s for s in report.spans if s.degree == 1 and s.module == "dit" and _planned(s) > 0 and not s.first_here
            ]
            measured = sum(work_of(s) for s in alone)
            if measured <= 0:
                continue
            ratio = sum(_planned(s) for s in alone) * planned_with.get(report.worker, 1.0) / measured
            before = self._ratio.get(report.worker, ratio)
            self._ratio[report.worker] = _MEMORY * before + (1 - _MEMORY) * ratio
            self._spans[report.worker] = self._spans.get(report.worker, 0) + len(alone)

    def factors(self, workers: Sequence[str]) -> tuple[float, ...]:
        """Speed of each worker, 1 for normal, rounded to tenths so that plans do not flutter; empty when all are."""
        known = [self._ratio[w] for w in workers if self._spans.get(w, 0) >= _LEAST_SPANS]
        if len(known) < len(workers) or len(workers) < 2:
            return ()
        middle = statistics.median(known)
        speeds = [self._ratio[w] / middle for w in workers]
        rounded = tuple(1.0 if abs(s - 1) < _NOTICEABLE else max(round(s, 1), 0.1) for s in speeds)
        return rounded if any(s != 1.0 for s in rounded) else ()


def _planned(span: Span) -> float:
    return span.planned_end_s - span.planned_start_s
