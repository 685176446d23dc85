"""How fast each worker is compared with the others, from measured cascades. Pure; the planner gives a slow one less.

Workers are compared on the same work alone, seconds = work / speed: what a plan expected of a shape is no measure, as
it may be wrong for a shape that always the same worker gets.

Cascades on one worker tell. Inside a bag everybody takes the time of the slowest: who never runs alone, as where a
layout of bags is fixed, is judged by bags of one size, and is as fast as the best of its own. Whoever runs alone is not
blamed for others: plans give less to who seems slow, so it would hardly be seen again.
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
_LEAST_SPANS = 40  # comparable ones, before a bag is judged
_STAYS = 0.04  # a factor that is off by less stays as it is, so that plans do not flutter
_ROUNDS = 10  # of the fit; shapes and bags are well mixed, and it settles in a few
_MOST = 4096  # bags that are kept: those that change with every plan are many, and who was not seen for longest goes

Work = tuple[object, ...]  # what makes two cascades the same work
Bag = tuple[str, ...]  # the workers that ran it together


@dataclass
class Speeds:
    """Running means of the logarithm of seconds, by bag and work."""

    _known: dict[Bag, dict[Work, tuple[float, int]]] = field(default_factory=dict)  # mean, count
    _told: dict[str, float] = field(default_factory=dict)

    def observe(
        self,
        reports: Iterable[StepReport],
        planned_with: Mapping[str, float],
        node_of: Mapping[str, str] | None = None,
    ) -> None:
        """Take in a finished step; `planned_with` are the factors its plan already counted on, `node_of` says where
        workers are: bags over as many nodes are compared with each other."""
        for bag, spans in _bags(reports):
            if any(span.first_here or cannot_be(span) for span in spans):
                continue
            longest = max(spans, key=work_of)
            nodes = len({(node_of or {}).get(worker, "") for worker in bag})
            work, seconds = (len(bag), nodes, *_work(longest)), work_of(longest)
            if len(longest.pieces) > 1:  # packs are hardly ever the same: as a share of what was expected of them
                slowest = min(planned_with.get(worker, 1.0) for worker in bag)
                expected = (longest.planned_end_s - longest.planned_start_s) * slowest
                if expected <= 0:
                    continue
                seconds /= expected
            if not 0 < seconds < math.inf:  # of an expectation that cannot be
                continue
            means = self._known[bag] = self._known.pop(bag, {})  # the last one now
            mean, count = means.get(work, (0.0, 0))
            count = min(count + 1, _NEWEST)
            means[work] = mean + (math.log(seconds) - mean) / count, count
        while len(self._known) > _MOST:
            del self._known[next(iter(self._known))]

    def factors(self, workers: Sequence[str]) -> tuple[float, ...]:
        """Speed of each worker beside the median one, 1 for normal and for who is not known yet; empty when all are."""
        known: dict[str, float] = {}
        alone = {bag[0] for bag in self._known if len(bag) == 1}
        for bags in self._fitted(set(workers)):
            middle = statistics.median(bags.values())
            if len({worker for bag in bags for worker in bag}) < max(2, len(workers) / 2) or len(bags) < 2:
                continue
            for bag, speed in bags.items():
                for worker in bag if len(bag) == 1 else set(bag) - alone:
                    known[worker] = max(speed - middle, known.get(worker, -math.inf))
        for worker, speed in known.items():
            found = max(math.exp(speed), 0.1)
            told = self._told.get(worker, 1.0)
            if abs(found - 1) < _NOTICEABLE:
                self._told[worker] = 1.0
            elif abs(found - told) > _STAYS:
                self._told[worker] = round(found, 2)
        factors = tuple(self._told.get(worker, 1.0) for worker in workers)
        return factors if any(speed != 1.0 for speed in factors) else ()

    def _fitted(self, workers: set[str]) -> list[dict[Bag, float]]:
        """Logarithm of the speed of every bag that has run enough of what others ran, too, one mapping for each size
        of bags and number of their nodes: their works are never the same."""
        kinds: dict[tuple[object, ...], list[tuple[Bag, Work, float, int]]] = {}
        for bag, means in self._known.items():
            often = len(bag) == 1 or sum(count for _, count in means.values()) >= _LEAST_SPANS
            if often and workers.issuperset(bag):
                for work, (mean, count) in means.items():
                    kinds.setdefault(work[:2], []).append((bag, work, mean, count))
        found = [_speeds(rows) for rows in kinds.values()]
        return [speeds for speeds in found if speeds]


def _speeds(rows: Sequence[tuple[Bag, Work, float, int]]) -> dict[Bag, float]:
    """By rows of (bag, work, mean logarithm of its seconds, how many): least squares of log seconds = log work - log
    speed, by turns for work and bags."""
    shared: dict[Work, int] = {}
    for _, work, _, _ in rows:
        shared[work] = shared.get(work, 0) + 1
    rows = [row for row in rows if shared[row[1]] > 1]
    if not rows:
        return {}
    bags = {bag: n for n, bag in enumerate(dict.fromkeys(row[0] for row in rows))}
    works = {work: n for n, work in enumerate(dict.fromkeys(row[1] for row in rows))}
    who, what = np.array([bags[row[0]] for row in rows]), np.array([works[row[1]] for row in rows])
    mean, count = np.array([row[2] for row in rows]), np.array([float(row[3]) for row in rows])
    of_bag, of_work = np.bincount(who, count, len(bags)), np.bincount(what, count, len(works))
    speed = np.zeros(len(bags))
    for _ in range(_ROUNDS):
        size = np.bincount(what, count * (mean + speed[who]), len(works)) / of_work
        speed = np.bincount(who, count * (size[what] - mean), len(bags)) / np.maximum(of_bag, 1.0)
    return {bag: float(speed[n]) for bag, n in bags.items() if of_bag[n] >= _LEAST_SPANS}


def _bags(reports: Iterable[StepReport]) -> Iterable[tuple[Bag, list[Span]]]:
    """The workers of every cascade with what they say of it; a bag only where all of its members do."""
    together: dict[tuple[int, str], list[tuple[str, Span]]] = {}
    for report in reports:
        for span in report.spans:
            if span.module == "finish":
                continue
            if span.degree == 1:
                yield (report.worker,), [span]
            else:
                together.setdefault((span.step, span.cascade), []).append((report.worker, span))
    for told in together.values():
        if len(told) == told[0][1].degree:
            yield tuple(sorted(worker for worker, _ in told)), [span for _, span in told]


def _work(span: Span) -> Work:
    """Equal for cascades that cost the same; of packs the shapes."""
    if len(span.pieces) > 1:
        return (span.module, "packed", *sorted({piece.bucket for piece in span.pieces}))
    return (span.module, *((piece.bucket, piece.batch) for piece in span.pieces))
