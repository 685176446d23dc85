"""Timing of tensor code on whatever device it runs: L2-cold, medians, launch gaps removed.

A variant is given as `make(i)`, which builds one closure over its own buffers. Enough of them are built that one round
over all touches four times the L2 cache, so every call finds its inputs in memory. On CUDA a round is captured in one
graph (host overhead stays out) and timed with events. On CPU it is the processor time of one thread, which other
programs on the machine do not add to.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

COLD_BYTES = 4 * 60 * 2**20  # four times the 60 MB L2 of a Hopper GPU
MAX_BUFFERS = 32

Closure = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one call: median, and the distance between the quartiles as a share of it."""

    seconds: float
    spread: float

    @staticmethod
    def of(samples: list[float]) -> Timing:
        middle = statistics.median(samples)
        low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else (middle,) * 3
        return Timing(seconds=middle, spread=(high - low) / middle)


def measure(make: Callable[[int], Closure], bytes_per_call: int, device: torch.device, repeats: int) -> Timing:
    """Median seconds of one call over `repeats` rounds."""
    if device.type == "cuda":
        return _measure_cuda(make, bytes_per_call, repeats)
    call = make(0)
    call()
    samples = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        samples.append(time.process_time() - start)
    return Timing.of(samples)


def _measure_cuda(make: Callable[[int], Closure], bytes_per_call: int, repeats: int) -> Timing:
    num_buffers = min(max(2, -(-COLD_BYTES // bytes_per_call)), MAX_BUFFERS)
    # Autograd runs a backward on the stream of its forward, so both are built and captured on one side stream.
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls = [make(i) for i in range(num_buffers)]
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / num_buffers)
    return Timing.of(samples)


def copy_of(num_bytes: int, device: torch.device, repeats: int) -> Timing:
    """A copy that moves `num_bytes`, half of them read and half written."""

    def make(_: int) -> Closure:
        source = torch.randn(num_bytes // 4, device=device, dtype=torch.bfloat16)
        target = torch.empty_like(source)
        return lambda: torch.neg(source, out=target)

    return measure(make, num_bytes, device, repeats)


def peak_bytes(call: Closure, device: torch.device) -> int:
    """Memory that one call needs beyond what is there: the allocator's peak on CUDA, its profiled calls on CPU."""
    if device.type != "cuda":
        return _peak_cpu_bytes(call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_cpu_bytes(call: Closure) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler greets on stderr otherwise
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = call()  # what a call returns counts too
    del kept
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def ceilings(device: torch.device, repeats: int) -> dict[str, float]:
    """Bytes per second of a copy (1 read, 1 write) and a triad (2 reads, 1 write) of bf16 tensors.

    The copy is made by a kernel: in a graph `copy_` is a copy of the driver's, at 0.62 of the speed on an H200."""
    elements = 2**29 if device.type == "cuda" else 2**23
    a, b, c = (torch.randn(elements, device=device, dtype=torch.bfloat16) for _ in range(3))
    size = 2 * elements
    copy = measure(lambda _: lambda: torch.neg(a, out=c), size * 2, device, repeats)
    triad = measure(lambda _: lambda: torch.add(a, b, out=c), size * 3, device, repeats)
    return {"copy": 2 * size / copy.seconds, "triad": 3 * size / triad.seconds}
