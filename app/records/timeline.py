"""timeline.jsonl -> timeline.json, a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

One group of lanes per worker: what it did ("measured") above what the plan foresaw ("planned"), and one group with the
steps and the events of the run (joins, losses, recoveries).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from actors.records.events import RunEvent
from actors.records.span_record import SpanRecord
from app.records.rundir import RunDir
from app.records.tails import JsonObject

RUN_PID = 1_000_000  # the group of steps and events, away from worker ids
MEASURED, PLANNED = 0, 1
DETAILS = (
    "step",
    "cascade",
    "item",
    "bucket",
    "batch",
    "degree",
    "generation",
    "phases",
    "handoff_bytes",
    "handoff_s",
    "need_gib",
    "work_s",
    "wait_s",
    "exposed_s",
)
COLOURS = {
    "text": "rail_response",
    "vae": "thread_state_runnable",
    "dit": "thread_state_running",
    "finish": "generic_work",
}


class WindowTimes(NamedTuple):
    """When an execution of a step began and ended, in unix seconds. A tuple: old files have no beginning, and a tuple
    with the NaN that stands for it equals itself."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow:
    """One execution of a step: what ran from its start to its end, encodes for later steps included."""

    step: int
    times: WindowTimes
    spans: tuple[SpanRecord, ...]


def windows(spans: Iterable[SpanRecord]) -> Iterator[StepWindow]:
    """Executions in the order they happened, one at a time: a step's spans are written together. A step that was run
    again has several."""
    for start, members in groupby(spans, key=lambda span: span.step_start):
        held = tuple(members)
        finished = [span.step for span in held if span.module == "finish"]
        step = finished[0] if finished else min(span.step for span in held)
        yield StepWindow(step=step, times=WindowTimes(start, max(span.end for span in held)), spans=held)


def final_times(spans: Iterable[SpanRecord]) -> dict[int, WindowTimes]:
    """When the last execution of every step ran, in step order."""
    return dict(sorted({window.step: window.times for window in windows(spans)}.items()))


def _entries(spans: Iterable[SpanRecord], events: Iterable[RunEvent]) -> Iterator[JsonObject]:
    """Entries of a Chrome trace, one at a time; times are microseconds from the first span. `spans` is gone through
    three times."""
    origin, nodes = math.inf, {}
    for span in spans:
        origin = min(origin, span.start, span.step_start)
        nodes[span.worker] = span.node
    if not nodes:
        return
    yield from _lane_names(nodes)
    for span in spans:
        yield from _span_entries(span, origin)
    for window in windows(spans):
        yield _step_entry(window, origin)
    yield from (_event_entry(event, origin) for event in events if event.time >= origin)


def _lane_names(nodes: Mapping[str, str]) -> Iterator[JsonObject]:
    """Names of the lanes of workers, which are given with their nodes, and of the run's own."""
    yield _meta(RUN_PID, "process_name", "run")
    yield _meta(RUN_PID, "process_sort_index", -1, key="sort_index")
    for worker, node in sorted(nodes.items(), key=lambda pair: lane(pair[0])):
        pid = lane(worker)
        yield _meta(pid, "process_name", f"worker {worker}{f' on {node}' if node else ''}")
        yield _meta(pid, "process_sort_index", pid, key="sort_index")
        yield _meta(pid, "thread_name", "measured", tid=MEASURED)
        yield _meta(pid, "thread_name", "planned", tid=PLANNED)


def lane(worker: str) -> int:
    """The trace's process number of a worker id: the digits in it (w3 -> 4), or a checksum of its name."""
    digits = "".join(c for c in worker if c.isdigit())
    return int(digits[-8:]) + 1 if digits else zlib.crc32(worker.encode()) % 100_000


def _meta(pid: int, name: str, value: object, tid: int = 0, key: str = "name") -> JsonObject:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": {key: value}}


def _span_entries(span: SpanRecord, origin: float) -> list[JsonObject]:
    pid = lane(span.worker)
    line = span.line()
    details = {key: value for key in DETAILS if (value := line.get(key)) is not None and value == value}  # no NaN
    measured = _slice(pid, MEASURED, span.name, span.start - origin, span.seconds, details)
    measured["cat"] = span.module
    if span.module in COLOURS:
        measured["cname"] = COLOURS[span.module]
    times = span.planned
    if times is None:
        return [measured]
    start = span.step_start + times[0] - origin
    return [measured, _slice(pid, PLANNED, span.name, start, times[1] - times[0], details) | {"cat": "planned"}]


def _slice(pid: int, tid: int, name: str, start_s: float, seconds: float, details: JsonObject) -> JsonObject:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "ts": round(start_s * 1e6, 1),
        "dur": round(max(seconds, 0) * 1e6, 1),
        "args": details,
    }


def _step_entry(window: StepWindow, origin: float) -> JsonObject:
    name, start = f"step {window.step}", window.times.start - origin
    return _slice(RUN_PID, 0, name, start, window.times.seconds, {"step": window.step})


def _event_entry(event: RunEvent, origin: float) -> JsonObject:
    line = event.line()
    return {
        "ph": "i",
        "s": "g",
        "pid": RUN_PID,
        "tid": 1,
        "name": line["event"],
        "ts": round((event.time - origin) * 1e6, 1),
        "args": {key: value for key, value in line.items() if key not in ("time", "event")},
    }


def write_timeline(run: RunDir) -> Path:
    """Write `timeline.json` of a run and return its path."""
    path = run.path / "timeline.json"
    with path.open("w", encoding="utf-8") as file:
        file.write('{"traceEvents": [')
        for number, entry in enumerate(_entries(run.spans(), run.events())):
            file.write((", " if number else "") + json.dumps(entry))
        file.write('], "displayTimeUnit": "ms"}')
    return path
