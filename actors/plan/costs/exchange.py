"""How long the all-to-all of a bag takes inside a node, or across nodes, as measured. Pure."""

from __future__ import annotations

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
    bags: dict[tuple[int, int], list[ExchangePoint]] = {}
    for one in found:
        if (one.nodes > 1) == across:
            bags.setdefault((one.workers, one.nodes), []).append(one)
    lines = [line for of in bags.values() if (line := _line(of)) is not None]
    if not lines:
        return None
    return statistics.median(latency for latency, _ in lines), statistics.median(speed for _, speed in lines)


def _line(sizes: list[ExchangePoint]) -> tuple[float, float] | None:
    small, large = (pick(sizes, key=lambda one: one.num_bytes) for pick in (min, max))
    if large.sent <= small.sent:
        return None
    if large.seconds <= small.seconds:  # a moment on a busy host: all of it counts as bytes
        return 0.0, large.sent / large.seconds
    per_byte = (large.seconds - small.seconds) / (large.sent - small.sent)
    return max(0.0, small.seconds - per_byte * small.sent), 1.0 / per_byte
