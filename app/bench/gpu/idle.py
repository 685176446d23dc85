"""How much of its time a device does nothing, from the profiler: kernels and copies as a union of intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from app.bench.gpu.timeline import Interval, StreamWork, union


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUse:
    """A device's use from the start of the first kernel to the end of the last one."""

    idle_share: float
    longest_gap_s: float
    kernels: int
    copies: int


def device_use(events: Iterable[StreamWork]) -> DeviceUse:
    """On a CPU its ops stand for kernels, which checks only the arithmetic."""
    events = list(events)
    return use_of([(one.begin_ns, one.end_ns) for one in events], sum(one.is_copy for one in events))


def use_of(intervals: Iterable[Interval], copies: int = 0) -> DeviceUse:
    """The use of a device from intervals in any order, which may overlap (streams do). Without intervals it is all
    idle."""
    listed = list(intervals)
    if not listed:
        return DeviceUse(idle_share=1.0, longest_gap_s=0.0, kernels=0, copies=0)
    busy = union(listed)
    gaps = [after[0] - before[1] for before, after in pairwise(busy)]
    return DeviceUse(
        idle_share=sum(gaps) / max(busy[-1][1] - busy[0][0], 1),
        longest_gap_s=max(gaps, default=0) / 1e9,
        kernels=len(listed) - copies,
        copies=copies,
    )
