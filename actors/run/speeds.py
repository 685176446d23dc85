"""How fast each worker is compared with the others, from measured cascades. Pure; the planner gives a slow one less.

Inside a bag all workers take the time of the slowest; what counts there is what a worker computes itself, its work less
what it waits for results of the others. Ranks of a DiT bag compute alike; encoders deal whole clips and captions, so
nothing of their bags is counted. Workers are compared on the same work alone, seconds = work / speed: what a plan
expected of a shape is no measure, as it may be wrong for a shape that always the same worker gets.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.messages import Span, StepReport
from actors.planning.observations import cannot_be, work_of

_NEWEST = 50  # cascades of a shape that a worker is known by: later ones count with 1 / 50
_NOTICEABLE = 0.3  # smaller deviations are noise (shared CPUs: 20 %) and change no plan
_NORMAL = 0.2  # a worker that was reported as slow is normal again below this: at 0.3 its factor would flutter
_LEAST_SPANS = 40  # comparable ones, before a worker is judged
_STAYS = 0.04  # a factor that is off by less stays as it is, so that plans do not flutter
_ROUNDS = 10  # of the fit; shapes and workers are well mixed, and it settles in a few
_MOST_WORKS = 1000  # that are remembered, those that came last: packs of many buckets hardly ever come again
_MOST_MEANS = 64_000  # of them in all, each of a work and a worker: a step's fit takes 1 us of each

WorkKey = tuple[object, ...]  # what makes two cascades the same work


@dataclass
class Speeds:
    """Running means of the logarithm of seconds, by work and worker: of the workers that are there, and of the work
    that came last, however long the run. `bags`: ranks of a DiT bag compute alike; those of spatial-temporal layers
    have frames, of which one more or less makes a difference."""

    bags: bool = True
    _known: dict[WorkKey, dict[str, tuple[float, int]]] = field(default_factory=dict, init=False)  # mean, count
    _told: dict[str, float] = field(default_factory=dict, init=False)
    _workers: tuple[str, ...] = field(default=(), init=False)  # that `factors` was asked for last

    def observe(self, reports: Iterable[StepReport], planned_with: Mapping[str, float]) -> None:
        """Take in a finished step; `planned_with` are the factors its plan already counted on."""
        for bag in _bags(reports):
            if len(bag) > 1 and not (self.bags and _tells(bag)):
                continue
            slowest = min(planned_with.get(worker, 1.0) for worker in bag)
            for worker, span in bag.items():
                if span.first_here or cannot_be(span):
                    continue
                work, seconds = _work(span), work_of(span) - (span.exposed_s if span.degree > 1 else 0.0)
                if len(span.pieces) > 1:  # packs are hardly ever the same: as a share of what was expected of them
                    expected = (span.planned_end_s - span.planned_start_s) * slowest
                    if expected <= 0:
                        continue
                    seconds /= expected
                if not 0 < seconds < math.inf:  # of an expectation that cannot be
                    continue
                by_worker = self._known[work] = self._known.pop(work, {})  # in the order in which they came last
                mean, count = by_worker.get(worker, (0.0, 0))
                count = min(count + 1, _NEWEST)
                by_worker[worker] = mean + (math.log(seconds) - mean) / count, count
        means = sum(map(len, self._known.values()))
        while len(self._known) > _MOST_WORKS or (means > _MOST_MEANS and len(self._known) > 1):
            means -= len(self._known.pop(next(iter(self._known))))

    def factors(self, workers: Sequence[str], expected: Sequence[float] = ()) -> tuple[float, ...]:
        """Speed of each of the generation's `workers` relative to a normal one, which is 1. A worker not known yet has
        its `expected` speed, by default 1. () if all are 1. Measurements of other workers are dropped: their names do
        not come back."""
        self._forget_all_but(workers)
        told = dict(zip(workers, expected)) | self._told
        known = self._fitted(workers)
        if len(known) < max(2, len(workers) / 2):
            known = {}
        normal = self._normal(known) if known else 0.0
        for worker, speed in known.items():
            found = max(math.exp(speed - normal), 0.1)
            before = told.get(worker, 1.0)
            if abs(found - 1) < (_NOTICEABLE if before == 1.0 else _NORMAL):
                self._told[worker] = 1.0
            elif abs(found - before) > _STAYS:
                self._told[worker] = round(found, 2)
        factors = tuple((told | self._told).get(worker, 1.0) for worker in workers)
        return factors if any(speed != 1.0 for speed in factors) else ()

    def _normal(self, known: Mapping[str, float]) -> float:
        """Logarithm of the speed that counts as 1: at first the median worker's. Later the one that leaves most
        workers' factors as they were, whoever came and went: with two kinds of GPU the median jumps, and prices were
        learned relative to the earlier one."""
        stayed = [speed - math.log(self._told[worker]) for worker, speed in known.items() if worker in self._told]
        return statistics.median(stayed or known.values())

    def _forget_all_but(self, workers: Sequence[str]) -> None:
        if tuple(workers) == self._workers:
            return
        self._workers, here = tuple(workers), set(workers)
        for work, by_worker in list(self._known.items()):
            for worker in by_worker.keys() - here:
                del by_worker[worker]
            if not by_worker:
                del self._known[work]
        for worker in self._told.keys() - here:
            del self._told[worker]

    def _fitted(self, workers: Sequence[str]) -> dict[str, float]:
        """Logarithm of the speed of every worker that has run enough work in common with others: least squares of log
        seconds = log work - log speed, solved for work and for workers in turn. Work that only one worker has run is
        left out: it fits any speed. `_known` is of these workers only."""
        number = {worker: n for n, worker in enumerate(workers)}
        rows = [
            (number[worker], work, mean, count)
            for work, by_worker in self._known.items()
            if len(by_worker) > 1
            for worker, (mean, count) in by_worker.items()
        ]
        if not rows:
            return {}
        works = {work: n for n, work in enumerate(dict.fromkeys(row[1] for row in rows))}
        who, what = np.array([row[0] for row in rows]), np.array([works[row[1]] for row in rows])
        mean, count = np.array([row[2] for row in rows]), np.array([float(row[3]) for row in rows])
        of_worker = np.bincount(who, count, len(workers))
        of_work = np.bincount(what, count, len(works))
        speed = np.zeros(len(workers))
        for _ in range(_ROUNDS):
            size = np.bincount(what, count * (mean + speed[who]), len(works)) / of_work
            speed = np.bincount(who, count * (size[what] - mean), len(workers)) / np.maximum(of_worker, 1.0)
        return {worker: float(speed[n]) for worker, n in number.items() if of_worker[n] >= _LEAST_SPANS}


def _bags(reports: Iterable[StepReport]) -> list[dict[str, Span]]:
    """The spans of every whole cascade, by worker."""
    found: dict[tuple[object, ...], dict[str, Span]] = {}
    for report in reports:
        for number, span in enumerate(report.spans):
            if span.module != "finish":
                alone = (report.worker, number) if span.degree == 1 else ()
                found.setdefault((span.step, span.cascade, *alone), {})[report.worker] = span
    return [bag for bag in found.values() if len(bag) == next(iter(bag.values())).degree]


def _tells(bag: Mapping[str, Span]) -> bool:
    """Whether the ranks of a bag compute alike, and have measured what they waited for."""
    return all(span.module == "dit" for span in bag.values()) and any(span.exposed_s > 0 for span in bag.values())


def _work(span: Span) -> WorkKey:
    """A key that is equal for cascades of equal cost. Packed cascades differ by their buckets alone."""
    if len(span.pieces) > 1:
        return (span.module, span.degree, "packed", *sorted({piece.bucket for piece in span.pieces}))
    return (span.module, span.degree, *((piece.bucket, piece.batch) for piece in span.pieces))
