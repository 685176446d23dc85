"""What a step takes beside its cascades and its end: dispatch, calls between cascades, snapshots, turns of asides.

A plan's makespan adds up cascades alone. What is left of the measured time of steps is learned in a run, by the number
of workers, and kept with its costs. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actors.plan.types import refuse_below


@dataclass(frozen=True, kw_only=True, slots=True)
class RemainderPoint:
    """Median seconds of several steps."""

    workers: int
    nodes: int = 1
    seconds: float
    count: int = 1

    def __post_init__(self) -> None:
        refuse_below(1, self, "workers", "nodes", "count")
        refuse_below(0, self, "seconds")


def remainder_of(points: Sequence[RemainderPoint], workers: int, nodes: int) -> float:
    """Seconds on `workers` workers: as learned, else of the nearest number of workers that was; 0 where none was."""
    nearest = min(
        points,
        key=lambda one: (abs(math.log(one.workers / workers)), abs(one.nodes - nodes), one.workers, one.nodes),
        default=None,
    )
    return 0.0 if nearest is None else nearest.seconds
