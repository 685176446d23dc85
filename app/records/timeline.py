"""timeline.jsonl -> timeline.json, a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

One group of lanes per worker: what it did ("measured", and the ends of steps, beside which it may encode early, as
"finish") above what the plan foresaw ("planned"), and one group with the steps and the events of the run (joins,
losses, recoveries). What overlaps has lanes of its own ("planned 2"): a viewer leaves out a slice that begins within
another one of its lane and ends after it.

The trace has the newest steps, or those that are asked for, up to a size that a browser can be asked to open: the
timeline of a large run has five times as much.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from actors.records.events import RunEvent
from actors.records.span_record import SpanRecord
from app.records.rundir import RunDir
from app.records.tails import JsonObject
from ops.typed import ConfigError
from ops.whole_file import whole_file

RUN_PID = 1_000_000  # the group of steps and events, away from worker ids
MEASURED, PLANNED, FINISH = 0, 1, 2
STEPS, EVENTS = 0, 1  # of RUN_PID
_APART = 4  # from a lane to the second one of its kind
_ORDER = (MEASURED, FINISH, PLANNED)  # from above
_TOUCH_US = 1  # bars that overlap by so little touch: unix seconds are floats of 0.24 us
_MOST_PLANNED = 8  # lanes of a worker, where steps take a small part of what was planned
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


MOST_SPANS = 100_000  # of a trace: some 80 MB as JSON; not tried how much more a browser would open


@dataclass(frozen=True, slots=True)
class StepRange:
    """Steps from `first` to `last`, both included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> StepRange:
        """`4000-4100`, or one step. Raises ConfigError."""
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", text)
        found = cls(int(match[1]), int(match[2] or match[1])) if match else None
        if found is None or found.last < found.first:
            raise ConfigError(f"--steps {text!r} must be a step or a range of them in their order, such as 4000-4100.")
        return found

    def has(self, step: int) -> bool:
        return self.first <= step <= self.last


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenTimeline:
    """What a trace shows; `whole`: all steps that the run's timeline has. `first` is -1 where there is none."""

    path: Path
    first: int
    last: int
    whole: bool


class WindowTimes(NamedTuple):
    """When an execution of a step began and ended, in unix seconds."""

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


def _entries(shown: Iterable[StepWindow], events: Iterable[RunEvent], to_the_end: bool = True) -> Iterator[JsonObject]:
    """Entries of a Chrome trace, one at a time; times are microseconds from the first span. Events are those since
    then, up to the end of the last step unless it is the run's."""
    origin, end = math.nan, -math.inf
    named: set[str] = set()
    lanes = _Lanes()
    for window in shown:
        if not named:
            origin = min(window.times.start, *(span.start for span in window.spans))
            yield _meta(RUN_PID, "process_name", "run")
            yield _meta(RUN_PID, "process_sort_index", -1, key="sort_index")
            yield _meta(RUN_PID, "thread_name", "events", tid=EVENTS)
        end = max(end, window.times.end)
        for span in window.spans:
            if span.worker not in named:
                named.add(span.worker)
                yield from _worker_names(span)
        for bar in sorted(_bars(window), key=lambda bar: bar.start):
            yield from lanes.entries(bar, origin)
    last = math.inf if to_the_end else end
    yield from (_event_entry(event, origin) for event in events if named and origin <= event.time <= last)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bar:
    """A slice before it has a lane; times in unix seconds."""

    pid: int
    kind: int
    kind_name: str
    name: str
    start: float
    end: float
    args: JsonObject
    look: JsonObject = field(default_factory=dict)  # its category and colour


def _bars(window: StepWindow) -> Iterator[_Bar]:
    """Bars of the spans of a step, and of the step itself."""
    for span in window.spans:
        line = span.line()
        details = {key: value for key in DETAILS if (value := line.get(key)) is not None and value == value}  # no NaN
        kind, kind_name = (FINISH, "finish") if span.module == "finish" else (MEASURED, "measured")
        look: JsonObject = {"cat": span.module}
        if span.module in COLOURS:
            look["cname"] = COLOURS[span.module]
        bar = _Bar(
            pid=lane(span.worker),
            kind=kind,
            kind_name=kind_name,
            name=span.name,
            start=span.start,
            end=span.end,
            args=details,
            look=look,
        )
        yield bar
        if (times := span.planned) is not None:
            start, end = (span.step_start + seconds for seconds in times)
            yield replace(bar, kind=PLANNED, kind_name="planned", start=start, end=end, look={"cat": "planned"})
    args: JsonObject = {"step": window.step}
    start, end = window.times
    yield _Bar(pid=RUN_PID, kind=STEPS, kind_name="steps", name=f"step {window.step}", start=start, end=end, args=args)


class _Lanes:
    """Finds a lane for one bar after another: the first one of its kind whose last bar has ended."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], list[int]] = {}  # of a group and a kind: where each lane's last bar ends

    def entries(self, bar: _Bar, origin: float) -> Iterator[JsonObject]:
        """The slice of a bar, in whole microseconds, so that slices which touch do so to the last bit, and the name of
        its lane where that is new; nothing where a plan's lanes are all taken."""
        start = round((bar.start - origin) * 1e6)
        end = max(start, round((bar.end - origin) * 1e6))
        ends = self._ends.setdefault((bar.pid, bar.kind), [])
        number = next((number for number, until in enumerate(ends) if until - start <= _TOUCH_US), len(ends))
        tid = bar.kind + _APART * number
        if number == len(ends):
            if bar.kind_name == "planned" and number == _MOST_PLANNED:
                return
            ends.append(start)
            order = _ORDER.index(bar.kind) * 100 + number
            name = f"{bar.kind_name} {number + 1}" if number else bar.kind_name
            yield _meta(bar.pid, "thread_name", name, tid=tid)
            yield _meta(bar.pid, "thread_sort_index", order, tid=tid, key="sort_index")
        start = max(start, ends[number])
        ends[number] = end = max(start, end)
        found: JsonObject = {"ph": "X", "pid": bar.pid, "tid": tid, "name": bar.name, "ts": start, "dur": end - start}
        yield found | {"args": bar.args} | bar.look


def _worker_names(span: SpanRecord) -> Iterator[JsonObject]:
    """The name of the lanes of a span's worker."""
    pid = lane(span.worker)
    yield _meta(pid, "process_name", f"worker {span.worker}{f' on {span.node}' if span.node else ''}")
    yield _meta(pid, "process_sort_index", pid, key="sort_index")


def lane(worker: str) -> int:
    """The trace's process number of a worker id: the digits in it (w3 -> 4), or a checksum of its name."""
    digits = "".join(c for c in worker if c.isdigit())
    return int(digits[-8:]) + 1 if digits else zlib.crc32(worker.encode()) % 100_000


def _meta(pid: int, name: str, value: object, tid: int = 0, key: str = "name") -> JsonObject:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": {key: value}}


def _event_entry(event: RunEvent, origin: float) -> JsonObject:
    line = event.line()
    return {
        "ph": "i",
        "s": "g",
        "pid": RUN_PID,
        "tid": EVENTS,
        "name": line["event"],
        "ts": round((event.time - origin) * 1e6, 1),
        "args": {key: value for key, value in line.items() if key not in ("time", "event")},
    }


def write_timeline(run: RunDir, steps: StepRange | None = None, most: int = MOST_SPANS) -> WrittenTimeline:
    """Write `timeline.json` of a run: its newest whole steps or `steps`, at most `most` spans. Raises ConfigError where
    the timeline has none of these steps."""
    spans, older = (run.spans(), False) if steps else run.newest_spans(most)
    shown = _Shown(spans, steps, most, skip_first=older)
    path = run.path / "timeline.json"
    with whole_file(path) as part:
        with part.open("w", encoding="utf-8") as file:
            file.write('{"traceEvents": [')
            for number, entry in enumerate(_entries(shown, run.events(), to_the_end=steps is None)):
                file.write((", " if number else "") + json.dumps(entry))
            file.write('], "displayTimeUnit": "ms"}')
        if steps and not shown.count:
            raise ConfigError(
                f"the timeline of {run.path} has no step from {steps.first} to {steps.last}; it keeps the newest "
                f"steps, now from {shown.oldest} on. Leave --steps out, or give some of these."
            )
    return WrittenTimeline(path=path, first=shown.first, last=shown.last, whole=not (older or steps or shown.cut))


class _Shown:
    """The windows that are drawn, gone through once; then it says which they were."""

    def __init__(self, spans: Iterable[SpanRecord], steps: StepRange | None, most: int, skip_first: bool) -> None:
        """`skip_first`: the first window may be a part of one, and is shown only where there is no other."""
        self._spans, self._steps, self._most, self._skip_first = spans, steps, most, skip_first
        self.first = self.last = self.oldest = -1
        self.count = 0
        self.cut = False

    def __iter__(self) -> Iterator[StepWindow]:
        part: StepWindow | None = None
        for number, window in enumerate(windows(self._spans)):
            self.oldest = window.step if number == 0 else self.oldest
            if self._skip_first and number == 0:
                part = window
                continue
            part = None
            if self._steps and not self._steps.has(window.step):
                continue
            if self.count and self.count + len(window.spans) > self._most:
                self.cut = True
                return
            yield self._shown(window)
        if part is not None:
            yield self._shown(part)

    def _shown(self, window: StepWindow) -> StepWindow:
        self.count += len(window.spans)
        self.first = window.step if self.first < 0 else self.first
        self.last = window.step
        return window
