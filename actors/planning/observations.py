"""What a run learns of a cascade: one duration, of work alone, whatever number of workers ran it. Pure.

Example: a bag of three whose last worker comes 10 s late and that then works for 20 s. Two workers report a wait of
10 s, all three work of 20 s; the observation is 20 s at the speed of its slowest worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from actors.messages import Piece, Span
from actors.plan.costs.point import MOST_POINTS, NEWEST, PointKey, Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.spanning import BagSpread
from actors.plan.costs.topology import Topology
from actors.plan.types import Cluster, Module, PlanError

_CHANGED = 0.05  # share by which a worker's speed must differ for what it measured to be doubted
_LEAST = 0.1  # of a cascade that is not its detour: noise cannot make the rest nothing
_CLOCKS = 1.05  # work may be so much longer than the span around it: two clocks measured them


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """One executed cascade."""

    module: Module
    parts: tuple[Samples, ...]  # of different shapes; several in a packed cascade
    degree: int
    seconds: float  # at normal speed of its workers
    spanned: BagSpread | None = None  # None on one node
    strays: bool = False  # its bag was in more NVLink islands of a node than it had to be
    bag: tuple[int, ...] = ()  # the workers that ran it


def observations(
    spans: Sequence[Span], text_tokens: Mapping[str, int], topology: Topology
) -> tuple[list[Observation], list[str]]:
    """(one observation per cascade, one sentence for each whose timing cannot be true).

    The last of the bag to end decides: the others wait for it at the next collective. A cascade is left out when a
    worker ran its shape for the first time, had to repeat a part of it, or when not all of its bag are there.
    """
    of_cascade: dict[tuple[int, str], list[Span]] = {}
    for span in spans:
        if span.module != "finish" and span.pieces:
            of_cascade.setdefault((span.step, span.cascade), []).append(span)
    found, refused = [], []
    for ranks in of_cascade.values():
        span = ranks[0]
        if len(ranks) != span.degree or any(s.first_here or s.exceeded_gib is not None for s in ranks):
            continue
        if why := next((why for s in ranks if (why := cannot_be(s))), ""):
            refused.append(why)
            continue
        bag = [worker for worker in span.bag if worker < topology.num_workers]
        over = len({topology.node[w] for w in bag})
        found.append(
            Observation(
                module=cast(Module, span.module),
                parts=Samples.by_shape(samples_of(span.pieces, text_tokens)),
                degree=span.degree,
                seconds=max(work_of(s) for s in ranks) * min((topology.speed[w] for w in bag), default=1.0),
                spanned=BagSpread.of(over, topology.overlap(bag)) if over > 1 else None,
                strays=over == 1 and topology.strays(bag),
                bag=tuple(bag),
            )
        )
    return found, refused


def work_of(span: Span) -> float:
    """Seconds of a worker's span apart from waiting for its bag; all of it where nobody measured that."""
    return span.end - span.start if span.work_s is None else span.work_s


def cannot_be(span: Span) -> str:
    """Why the timing of a span is refused, or "": NaN, negative, or more work than there was time."""
    work, around = work_of(span), span.end - span.start
    if 0 < work <= _CLOCKS * around + 1e-3:
        return ""
    return (
        f"{span.name} reports {work:g} s of work within {around:g} s; it must be above 0 and not longer. It is left "
        f"out of what the plan learns."
    )


def samples_of(pieces: Iterable[Piece], text_tokens: Mapping[str, int]) -> list[Samples]:
    """The samples of a cascade, by item."""
    return [Samples.of(piece.batch, piece.bucket, text_tokens.get(piece.item, 0)) for piece in pieces]


def learn(profile: Profile, found: Iterable[Observation], island_gbps: float = 0.0) -> list[str]:
    """Have the profile learn these. Returns a sentence for each that it refuses. What a bag has taken more in NVLink
    islands that it did not need is no part of its price, by a GPU's GB/s to another island (`island_gbps`; 0: what the
    profile says)."""
    refused = []
    # asked of all of them first: each moves the fit, and to make that anew takes longer than all else here
    asked = []
    for one in found:
        cascade = one.module, one.parts, one.degree, one.spanned
        try:
            prices = profile.prices_of(*cascade) if len(one.parts) > 1 else None
        except PlanError as error:  # a part that has no price cannot be divided
            refused.append(str(error))
        else:
            asked.append((one, profile.again(*cascade), prices))
    for one, again, prices in asked:
        try:
            detour = profile.detour_together(one.module, one.parts, one.degree, island_gbps) if one.strays else 0.0
            seconds = max(one.seconds - detour, _LEAST * one.seconds)
            profile.observe_packed(
                one.module, one.parts, one.degree, seconds, spanned=one.spanned, again=again, prices=prices
            )
        except ValueError as error:
            refused.append(str(error))
    try:
        if any(one.spanned is not None for one, _, _ in asked):
            profile.learn_cross_node()
    except ValueError as error:
        refused.append(str(error))
    return refused


class Witnesses:
    """Which workers the newest measurements of every point come from: `seconds` count on their speeds, and a worker
    that turns out to be slow has made its points look dear."""

    def __init__(self) -> None:
        self._bags: dict[tuple[PointKey, BagSpread | None], deque[tuple[int, ...]]] = {}
        self._speed: tuple[float, ...] = ()
        self._workers = (-1, 0)  # generation, number of workers

    def saw(self, found: Iterable[Observation]) -> None:
        """The profile has learned from these observations."""
        for one in found:
            for part in one.parts:
                point = part.key(one.module, one.degree), one.spanned
                bags = self._bags[point] = self._bags.pop(point, deque(maxlen=NEWEST))  # the last that ran comes last
                bags.append(one.bag)
        while len(self._bags) > 2 * MOST_POINTS:  # on one node and over nodes; a profile knows no more of them
            del self._bags[next(iter(self._bags))]

    def doubted(self, cluster: Cluster, generation: int) -> list[tuple[PointKey, BagSpread | None]]:
        """(point, how its bag lay over nodes) of what was mostly learned from workers whose speed was believed to be
        another than it is now; each is returned once."""
        size = cluster.num_workers
        speed = cluster.speed or (1.0,) * size
        before, self._speed = self._speed or (1.0,) * size, speed
        if (generation, size) != self._workers:  # numbers are other workers, also where as many have come as have gone
            gone: tuple[int, ...] = ()  # what they measured still counts, and nobody doubts it any more
            self._bags = {point: deque([gone] * len(bags), NEWEST) for point, bags in self._bags.items()}
            self._workers = generation, size
            return []
        changed = {w for w, (now, then) in enumerate(zip(speed, before, strict=True)) if abs(now / then - 1) > _CHANGED}
        found = [
            point
            for point, bags in self._bags.items()
            if 2 * sum(not changed.isdisjoint(bag) for bag in bags) > len(bags)
        ]
        for point in found:
            del self._bags[point]
        return found
