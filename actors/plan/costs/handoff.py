"""What handing an encode result to another worker costs, from measurements: a running estimate. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.plan.types import refuse_below, refuse_unless_positive
from ops.units import GIB

_WINDOW = 64
_LEAST = 6  # fewer measurements say nothing
_SPREAD = 2.0  # sizes must differ by this factor before a bandwidth is read from them
_MATTERS = 0.01  # share of a typical DiT cascade


@dataclass(frozen=True, kw_only=True, slots=True)
class Handoff:
    """Cost of moving latents to a bag that shares no worker with the producer."""

    latency_s: float = 0.0
    gib_per_s: float = 0.0  # 0: the volume costs nothing

    def __post_init__(self) -> None:
        refuse_below(0, self, "latency_s", "gib_per_s")

    def seconds(self, gib: float) -> float:
        return self.latency_s + (gib / self.gib_per_s if self.gib_per_s > 0 else 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoffPoint:
    """One timed handoff through the object store, from the end of the encode to rows on the consumer's device."""

    num_bytes: int
    seconds: float
    nodes: int = 1  # 2: the consumer was on another one

    def __post_init__(self) -> None:
        refuse_below(1, self, "num_bytes", "nodes")
        refuse_unless_positive(self, "seconds")


@dataclass(kw_only=True, slots=True)
class HandoffEstimate:
    """(bytes, seconds) of the last handoffs. Medians, so that a stalled network or a loaded host does not move it."""

    seen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def add(self, num_bytes: int, seconds: float) -> None:
        """Raises ValueError for what cannot have been measured."""
        if not (math.isfinite(seconds) and seconds >= 0 and num_bytes >= 0):
            raise ValueError(f"a handoff of {num_bytes} bytes in {seconds} s; both must be finite and at least 0.")
        self.seen.append((num_bytes, seconds))

    def cost(self, typical_cascade_s: float) -> Handoff | None:
        """None before enough is known. A handoff costs nothing while a typical one is below 1 % of a typical DiT
        cascade: then placement by handoff would make every search dearer and no plan better."""
        if len(self.seen) < _LEAST:
            return None
        if statistics.median(s for _, s in self.seen) < _MATTERS * typical_cascade_s:
            return Handoff()
        ordered = sorted(self.seen)
        half = len(ordered) // 2
        small, large = _middle(ordered[:half]), _middle(ordered[-half:])
        if large[0] < _SPREAD * small[0] or large[1] <= small[1]:
            return Handoff(latency_s=statistics.median(s for _, s in self.seen))
        seconds_per_byte = (large[1] - small[1]) / (large[0] - small[0])
        latency_s = max(0.0, small[1] - seconds_per_byte * small[0])
        return Handoff(latency_s=latency_s, gib_per_s=1.0 / (seconds_per_byte * GIB))


def estimate_of(found: Sequence[HandoffPoint]) -> HandoffEstimate:
    """An estimate from the handoffs across nodes where any were timed, as most other workers are on another node
    then."""
    farthest = max((point.nodes for point in found), default=1)
    estimate = HandoffEstimate()
    for point in found:
        if point.nodes == farthest:
            estimate.add(point.num_bytes, point.seconds)
    return estimate


def _middle(points: list[tuple[int, float]]) -> tuple[float, float]:
    return statistics.median(b for b, _ in points), statistics.median(s for _, s in points)
