"""timeline.jsonl -> timeline.json, a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

One group of lanes per worker: what it did ("measured") above what the plan foresaw ("planned"), and one group with the
steps and the events of the run (joins, losses, recoveries).
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.records.events import RunEvent
from actors.records.span_record import SpanRecord
from app.rundir import Record, RunDir

RUN_PID = 1_000_000  # the group of steps and events, away from worker ids
MEASURED, PLANNED = 0, 1
DETAILS = ("step", "cascade", "item", "bucket", "batch", "degree", "generation", "phases", "handoff_bytes", "handoff_s")
COLOURS = {
    "text": "rail_response",
    "vae": "thread_state_runnable",
    "dit": "thread_state_running",
    "finish": "generic_work",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow:
    """One execution of a step: what ran from its start to its end, encodes for later steps included."""

    step: int
    start: float  # unix seconds
    end: float
    spans: tuple[SpanRecord, ...]


def windows(spans: Iterable[SpanRecord]) -> list[StepWindow]:
    """Executions in the order they happened. A step that was run again has several."""
    groups: dict[float, list[SpanRecord]] = defaultdict(list)
    for span in spans:
        groups[span.step_start].append(span)
    found = []
    for start, members in sorted(groups.items()):
        finished = [span.step for span in members if span.module == "finish"]
        step = finished[0] if finished else min(span.step for span in members)
        found.append(StepWindow(step=step, start=start, end=max(span.end for span in members), spans=tuple(members)))
    return found


def final_windows(spans: Iterable[SpanRecord]) -> list[StepWindow]:
    """The last execution of every step, in step order."""
    return [window for _, window in sorted({window.step: window for window in windows(spans)}.items())]


def trace(spans: Sequence[SpanRecord], events: Iterable[RunEvent] = ()) -> Record:
    """A Chrome trace of executed spans and run events. Times are microseconds from the first span."""
    if not spans:
        return {"traceEvents": [], "displayTimeUnit": "ms"}
    origin = min(min(span.start, span.step_start) for span in spans)
    entries = list(_lane_names(spans))
    for span in spans:
        entries += _span_entries(span, origin)
    entries += _step_entries(spans, origin)
    entries += [_event_entry(event, origin) for event in events if event.time >= origin]
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _lane_names(spans: Sequence[SpanRecord]) -> Iterable[Record]:
    yield _meta(RUN_PID, "process_name", "run")
    yield _meta(RUN_PID, "process_sort_index", -1, key="sort_index")
    nodes = {span.worker: span.node for span in spans}
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


def _meta(pid: int, name: str, value: Any, tid: int = 0, key: str = "name") -> Record:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": {key: value}}


def _span_entries(span: SpanRecord, origin: float) -> list[Record]:
    pid = lane(span.worker)
    line = span.line()
    details = {key: value for key in DETAILS if (value := line[key]) is not None and value == value}  # no NaN
    measured = _slice(pid, MEASURED, span.name, span.start - origin, span.seconds, details)
    measured["cat"] = span.module
    if span.module in COLOURS:
        measured["cname"] = COLOURS[span.module]
    times = span.planned
    if times is None:
        return [measured]
    start = span.step_start + times[0] - origin
    return [measured, _slice(pid, PLANNED, span.name, start, times[1] - times[0], details) | {"cat": "planned"}]


def _slice(pid: int, tid: int, name: str, start_s: float, seconds: float, details: Record) -> Record:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "ts": round(start_s * 1e6, 1),
        "dur": round(max(seconds, 0) * 1e6, 1),
        "args": details,
    }


def _step_entries(spans: Sequence[SpanRecord], origin: float) -> list[Record]:
    return [
        _slice(
            RUN_PID, 0, f"step {window.step}", window.start - origin, window.end - window.start, {"step": window.step}
        )
        for window in windows(spans)
    ]


def _event_entry(event: RunEvent, origin: float) -> Record:
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
    path.write_text(json.dumps(trace(run.spans(), run.events())), encoding="utf-8")
    return path
