"""How long bytes take between workers, as measured: all-to-alls of a bag, and handoffs. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from actors.plan.types import refuse_below, refuse_unless_positive

# exchange: an all-to-all of a bag, of so many bytes of each member. bag: an encode result from one member to all others
# of its bag. store: one from the worker that made it to another worker, through the object store.
TransferKind = Literal["exchange", "bag", "store"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferPoint:
    """One measured size."""

    kind: TransferKind
    workers: int  # of the bag; 2 for the object store
    nodes: int = 1
    num_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        refuse_below(1, self, "workers", "nodes", "num_bytes")
        refuse_unless_positive(self, "seconds")

    @property
    def sent(self) -> float:
        """Bytes that one member sends to others: all but its own part in an all-to-all."""
        return self.num_bytes * (self.workers - 1) / self.workers if self.kind == "exchange" else self.num_bytes


def speed_of(found: Iterable[TransferPoint], kind: TransferKind, nodes: int = 1) -> tuple[float, float] | None:
    """(latency in s, bytes a second of a member) of transfers of a kind inside a node or over so many: medians over the
    bags, each by the line through its smallest and largest size. None where nobody has measured two sizes."""
    bags: dict[int, list[TransferPoint]] = {}
    for one in found:
        if one.kind == kind and one.nodes == nodes:
            bags.setdefault(one.workers, []).append(one)
    lines = [line for of in bags.values() if (line := _line(of)) is not None]
    if not lines:
        return None
    return statistics.median(latency for latency, _ in lines), statistics.median(speed for _, speed in lines)


def _line(sizes: list[TransferPoint]) -> tuple[float, float] | None:
    small, large = (pick(sizes, key=lambda one: one.num_bytes) for pick in (min, max))
    if large.sent <= small.sent:
        return None
    if large.seconds <= small.seconds:  # a moment on a busy host: all of it counts as bytes
        return 0.0, large.sent / large.seconds
    per_byte = (large.seconds - small.seconds) / (large.sent - small.sent)
    return max(0.0, small.seconds - per_byte * small.sent), 1.0 / per_byte
