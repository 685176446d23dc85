"""How long the all-to-all of a bag takes inside a node, or across nodes, as measured. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from actors.plan.types import refuse_below, refuse_unless_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangePoint:
    """One measured size."""

    workers: int  # of the bag
    num_bytes: int  # that each member has before and after
    seconds: float
    nodes: int = 1  # of its members

    def __post_init__(self) -> None:
        refuse_below(2, self, "workers")
        refuse_below(1, self, "num_bytes", "nodes")
        refuse_unless_positive(self, "seconds")

    @property
    def sent(self) -> float:
        """Bytes that one member sends to others: all but its own part."""
        return self.num_bytes * (self.workers - 1) / self.workers


def exchange_speed(found: Iterable[ExchangePoint], *, across: bool = False) -> tuple[float, float] | None:
    """(latency in s, bytes a second of a member) inside a node, or `across` nodes: medians over the bags, each by the
    line through its smallest and largest size. None where nobody has measured two sizes."""
    lines = list(_lines(found, across).values())
    if not lines:
        return None
    return statistics.median(latency for latency, _ in lines), statistics.median(speed for _, speed in lines)


@dataclass(frozen=True, slots=True)
class CallLatency:
    """What an all-to-all inside a node takes however little it sends, by the logarithm of its bag's size: the line
    through the measured bags (least squares), which does not fall."""

    of_two: float = 0.0  # s
    per_doubling: float = 0.0

    @classmethod
    def of(cls, found: Iterable[ExchangePoint]) -> CallLatency:
        """The latency by measured all-to-alls; zeros where nobody has measured two sizes."""
        known = {math.log2(workers) - 1: line[0] for (workers, _), line in _lines(found, across=False).items()}
        if not known:
            return cls()
        middle, mean = statistics.fmean(known), statistics.fmean(known.values())
        spread = sum((at - middle) ** 2 for at in known)
        slope = sum((at - middle) * latency for at, latency in known.items()) / spread if spread else 0.0
        slope = min(max(slope, 0.0), mean / middle if middle else math.inf)
        return cls(of_two=mean - slope * middle, per_doubling=slope)

    def seconds(self, degree: int) -> float:
        """Seconds of a call in a bag of at least two; 0 for one."""
        return self.of_two + self.per_doubling * (math.log2(degree) - 1) if degree > 1 else 0.0


def _lines(found: Iterable[ExchangePoint], across: bool) -> dict[tuple[int, int], tuple[float, float]]:
    """(latency, bytes a second) by (workers, nodes) of the bags of which two sizes were measured."""
    bags: dict[tuple[int, int], list[ExchangePoint]] = {}
    for one in found:
        if (one.nodes > 1) == across:
            bags.setdefault((one.workers, one.nodes), []).append(one)
    return {place: line for place, of in bags.items() if (line := _line(of)) is not None}


def _line(sizes: list[ExchangePoint]) -> tuple[float, float] | None:
    small, large = (pick(sizes, key=lambda one: one.num_bytes) for pick in (min, max))
    if large.sent <= small.sent:
        return None
    if large.seconds <= small.seconds:  # a moment on a busy host: all of it counts as bytes
        return 0.0, large.sent / large.seconds
    per_byte = (large.seconds - small.seconds) / (large.sent - small.sent)
    return max(0.0, small.seconds - per_byte * small.sent), 1.0 / per_byte
