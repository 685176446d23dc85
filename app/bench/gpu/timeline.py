"""What every stream of a device does at the same time as the others: a line of each for the report, and a trace for
chrome://tracing or ui.perfetto.dev beside the results.

On a CPU threads stand for streams, and their ops for kernels.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from app.bench.gpu.measurement import Figure, Place

PREFIX = "timeline "  # of figures that are such lines
FOLDER = "timelines"
CELLS = 60  # of a line
_IDLE, _BUSY = 0.05, 0.95  # of a cell: from the one on some of it is drawn, from the other on all

Interval = tuple[int, int]  # begin and end in nanoseconds


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamWork:
    """A kernel or a copy."""

    name: str
    stream: int
    begin_ns: int
    end_ns: int

    @property
    def is_copy(self) -> bool:
        return "memcpy" in self.name.lower()


def traced(call: Callable[[], object], place: Place) -> list[StreamWork]:
    """What the device did for one call. Raises RuntimeError where profiling is not allowed."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler greets on stderr otherwise
    cuda = place.device.type == "cuda"
    # the device's side only: tracing the host would slow it down and add gaps
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        call()
        place.synchronize()
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    assert found.profiler is not None and found.profiler.kineto_results is not None
    return [
        StreamWork(
            name=one.name(),
            stream=one.device_resource_id(),
            begin_ns=one.start_ns(),
            end_ns=one.start_ns() + one.duration_ns(),
        )
        for one in found.profiler.kineto_results.events()
        if one.device_type() == wanted and one.duration_ns() > 0
    ]


def timeline(events: Sequence[StreamWork], name: str, place: Place) -> dict[str, Figure]:
    """A figure for each stream, the busiest first; the trace goes into the place's folder, if it has one."""
    if place.folder is not None and events:
        path = place.folder / FOLDER / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        _write(events, path)
    return {f"{PREFIX}{number}": text for number, text in enumerate(drawn(events), 1)}


def timeline_of(call: Callable[[], object], name: str, place: Place) -> dict[str, Figure]:
    """The timeline of one call; without lines where profiling is not allowed."""
    try:
        return timeline(traced(call, place), name, place)
    except RuntimeError as error:
        return {"profiler": str(error)}


def drawn(events: Sequence[StreamWork]) -> list[str]:
    """A line per stream: how busy, how much of that beside other streams, and when: `.` idle, `-` in part, `#` busy."""
    if not events:
        return []
    begin, end = min(one.begin_ns for one in events), max(one.end_ns for one in events)
    streams: dict[int, list[StreamWork]] = {}
    for one in events:
        streams.setdefault(one.stream, []).append(one)
    busy = {stream: union((one.begin_ns, one.end_ns) for one in of) for stream, of in streams.items()}
    lines = []
    for stream in sorted(busy, key=lambda one: -_length(busy[one])):
        others = union(interval for other in busy if other != stream for interval in busy[other])
        length = _length(busy[stream])
        times: Counter[str] = Counter()
        for one in streams[stream]:
            times[one.name] += one.end_ns - one.begin_ns
        edges = [begin + (end - begin) * cell // CELLS for cell in range(CELLS + 1)]
        shares = [covered(busy[stream], lo, hi) / max(hi - lo, 1) for lo, hi in pairwise(edges)]
        bar = "".join("." if share < _IDLE else "#" if share > _BUSY else "-" for share in shares)
        beside = sum(covered(others, *interval) for interval in busy[stream]) / max(length, 1)
        lines.append(
            f"[{bar}] stream {stream}: {length / max(end - begin, 1):6.1%} busy, {beside:4.0%} of it beside others, "
            f"{len(streams[stream])} kernels and copies, most time in {times.most_common(1)[0][0][:60]}"
        )
    return lines


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def covered(intervals: Sequence[Interval], begin: int, end: int) -> int:
    """The part of a stretch of time that intervals without overlaps cover."""
    total, at = 0, bisect_right(intervals, begin, key=lambda one: one[1])
    while at < len(intervals) and intervals[at][0] < end:
        lo, hi = intervals[at]
        total += min(hi, end) - max(lo, begin)
        at += 1
    return total


def _length(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


def _write(events: Sequence[StreamWork], path: Path) -> None:
    """In the format of Chrome's traces, microseconds from the first event on."""
    begin = min(one.begin_ns for one in events)
    found = [
        {
            "name": one.name,
            "ph": "X",
            "ts": (one.begin_ns - begin) / 1e3,
            "dur": (one.end_ns - one.begin_ns) / 1e3,
            "pid": "device",
            "tid": one.stream,
        }
        for one in events
    ]
    path.write_text(json.dumps({"traceEvents": found}), encoding="utf-8")
