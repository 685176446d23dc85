"""How much of its time a device does nothing, from the profiler: kernels and copies as a union of intervals."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from app.bench.gpu.measurement import Place

Interval = tuple[int, int]  # begin and end in nanoseconds


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUse:
    """A device's use from the start of the first kernel to the end of the last one."""

    idle_share: float
    longest_gap_s: float
    kernels: int
    copies: int


def device_use(call: Callable[[], object], place: Place) -> DeviceUse:
    """Profile one call. On a CPU its ops stand for kernels, which checks only the arithmetic."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler greets on stderr otherwise
    cuda = place.device.type == "cuda"
    # the device's side only: tracing the host would slow it down and add gaps
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as traced:
        call()
        place.synchronize()
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    assert traced.profiler is not None and traced.profiler.kineto_results is not None
    events = [e for e in traced.profiler.kineto_results.events() if e.device_type() == wanted and e.duration_ns() > 0]
    copies = sum("memcpy" in e.name().lower() for e in events)
    return use_of([(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events], copies)


def use_of(intervals: Iterable[Interval], copies: int = 0) -> DeviceUse:
    """The use of a device from intervals in any order, which may overlap (streams do). Without intervals it is all
    idle."""
    ordered = sorted(intervals)
    if not ordered:
        return DeviceUse(idle_share=1.0, longest_gap_s=0.0, kernels=0, copies=0)
    begin, reached = ordered[0]
    idle = longest = 0
    for start, end in ordered:
        gap = max(0, start - reached)
        idle, longest, reached = idle + gap, max(longest, gap), max(reached, end)
    return DeviceUse(
        idle_share=idle / max(reached - begin, 1),
        longest_gap_s=longest / 1e9,
        kernels=len(ordered) - copies,
        copies=copies,
    )
