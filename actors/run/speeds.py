"""How fast each worker is compared with the others, from measured cascades. Pure; the planner gives a slow one less.

Only cascades on one worker tell: inside a bag everybody takes the time of the slowest.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from actors.messages import Span, StepReport
from actors.planning.observations import cannot_be, work_of

_MEMORY = 0.98  # weight of the past at each step
_NOTICEABLE = 0.3  # smaller deviations are noise (shared CPUs: 20 %) and change no plan
_LEAST_SPANS = 40  # before a worker is judged
_STAYS = 0.04  # a factor that is off by less stays as it is, so that plans do not flutter


@dataclass
class Speeds:
    """Running ratio of planned to measured seconds per worker."""

    _ratio: dict[str, float] = field(default_factory=dict)
    _spans: dict[str, int] = field(default_factory=dict)
    _told: dict[str, float] = field(default_factory=dict)

    def observe(self, reports: Iterable[StepReport], planned_with: Mapping[str, float]) -> None:
        """Take in a finished step; `planned_with` are the factors its plan already counted on."""
        for report in reports:
            alone = [
                s
                for s in report.spans
                if s.degree == 1 and s.module != "finish" and _planned(s) > 0 and not s.first_here and not cannot_be(s)
            ]
            measured = sum(work_of(s) for s in alone)
            if measured <= 0:
                continue
            ratio = sum(_planned(s) for s in alone) * planned_with.get(report.worker, 1.0) / measured
            before = self._ratio.get(report.worker, ratio)
            self._ratio[report.worker] = _MEMORY * before + (1 - _MEMORY) * ratio
            self._spans[report.worker] = self._spans.get(report.worker, 0) + len(alone)

    def factors(self, workers: Sequence[str]) -> tuple[float, ...]:
        """Speed of each worker beside the median one, 1 for normal and for who is not known yet; empty when all are."""
        known = {w: self._ratio[w] for w in workers if self._spans.get(w, 0) >= _LEAST_SPANS}
        if len(known) < max(2, len(workers) / 2):
            return ()
        middle = statistics.median(known.values())
        for worker, ratio in known.items():
            speed = max(ratio / middle, 0.1)
            told = self._told.get(worker, 1.0)
            if abs(speed - 1) < _NOTICEABLE:
                self._told[worker] = 1.0
            elif abs(speed - told) > _STAYS:
                self._told[worker] = round(speed, 2)
        factors = tuple(self._told.get(worker, 1.0) for worker in workers)
        return factors if any(speed != 1.0 for speed in factors) else ()


def _planned(span: Span) -> float:
    return span.planned_end_s - span.planned_start_s
