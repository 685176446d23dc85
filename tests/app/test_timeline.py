"""The trace shows what each worker did beside what was planned."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.records.span_record import SpanRecord, span_of
from app.records import timeline
from app.records.rundir import OLDER_TIMELINE, TIMELINE, RunDir
from app.records.timeline import (
    FINISH,
    MEASURED,
    PLANNED,
    RUN_PID,
    StepRange,
    WindowTimes,
    final_times,
    lane,
    windows,
    write_timeline,
)
from ops.typed import ConfigError


def slices(entries: list[dict], pid: int, tid: int) -> list[dict]:
    return [entry for entry in entries if entry["ph"] == "X" and (entry["pid"], entry["tid"]) == (pid, tid)]


def trace(run: RunDir) -> list[dict]:
    """The entries of the written file, which is JSON as a whole."""
    written = json.loads(write_timeline(run).path.read_text())
    assert written.keys() == {"traceEvents", "displayTimeUnit"} and written["displayTimeUnit"] == "ms"
    return written["traceEvents"]


def test_every_span_is_a_slice_of_its_worker_and_planned_ones_have_a_twin(run_folder: Path) -> None:
    run = RunDir.open(run_folder)
    entries = trace(run)
    for worker in ("w0", "w1", "w2"):
        mine = [span for span in run.spans() if span.worker == worker]
        cascades = [span for span in mine if span.module != "finish"]
        assert len(slices(entries, lane(worker), MEASURED)) == len(cascades)
        assert len(slices(entries, lane(worker), FINISH)) == len(mine) - len(cascades)
        assert len(slices(entries, lane(worker), PLANNED)) == len(cascades)


def test_measured_and_planned_slices_keep_their_times(run_folder: Path) -> None:
    run = RunDir.open(run_folder)
    spans, entries = list(run.spans()), trace(run)
    late = next(span for span in spans if span.step == 12 and span.worker == "w1" and span.module == "dit")
    origin = min(span.start for span in spans)
    measured = next(e for e in slices(entries, lane("w1"), MEASURED) if e["name"] == late.name)
    foreseen = next(e for e in slices(entries, lane("w1"), PLANNED) if e["name"] == late.name)
    assert measured["ts"] == pytest.approx((late.start - origin) * 1e6, abs=1)
    assert measured["dur"] == pytest.approx(2.2e6, abs=10)
    assert foreseen["dur"] == pytest.approx(0.7e6, abs=10)


def test_steps_and_events_have_their_own_lane(run_folder: Path) -> None:
    entries = trace(RunDir.open(run_folder))
    assert [entry["name"] for entry in slices(entries, RUN_PID, 0)] == [f"step {step}" for step in range(30)]
    assert "dead" in [entry["name"] for entry in entries if entry["ph"] == "i"]


def span(step: int, start: float, module: str = "dit", ran_in: float = 0.0) -> SpanRecord:
    line = {
        "step": step,
        "worker": "w0",
        "module": module,
        "name": module,
        "cascade": module,
        "start": start,
        "end": start + 1,
        "step_start": ran_in,
    }
    return span_of(line)


def test_an_encode_for_the_next_step_belongs_to_the_step_it_ran_in() -> None:
    found = windows([span(4, 10, ran_in=10), span(5, 11, "vae", ran_in=10), span(4, 12, "finish", ran_in=10)])
    assert [(window.step, len(window.spans), window.times.seconds) for window in found] == [(4, 3, 3)]


def test_only_the_last_execution_of_a_recomputed_step_counts() -> None:
    spans = [span(4, 10, ran_in=10), span(4, 20, ran_in=20), span(5, 30, ran_in=30)]
    assert final_times(spans) == {4: WindowTimes(20, 21), 5: WindowTimes(30, 31)}


def overlaps(entries: list[dict]) -> list[str]:
    """Slices that a viewer leaves out: they begin within another one of their lane and end after it."""
    found, open_ones = [], defaultdict[tuple[int, int], list[float]](list)
    for entry in sorted((entry for entry in entries if entry["ph"] == "X"), key=lambda entry: entry["ts"]):
        start, end, ends = entry["ts"], entry["ts"] + entry["dur"], open_ones[entry["pid"], entry["tid"]]
        while ends and ends[-1] <= start:
            ends.pop()
        if ends and end > ends[-1]:
            found.append(entry["name"])
        else:
            ends.append(end)
    return found


def overlapping(folder: Path, planned_s: float = 0.0, steps: int = 40) -> RunDir:
    """Steps of 0.3 s and a bit, each of which begins before the last one has ended. Their three cascades touch; an
    encode for the next step goes on while the step finishes. `planned_s`: what each cascade was planned to take."""
    step_s, lines = 0.3 + 1e-5 / 3, []
    for step in range(steps):
        began, took = 1_700_000_000.1 + step * step_s, step_s / 3
        times = [(began + n * took, began + (n + 1) * took) for n in range(3)]
        modules = ("dit", "dit", "vae")
        ran = [(f"{module} {n}", module, *when) for n, (module, when) in enumerate(zip(modules, times, strict=True))]
        for n, (name, module, start, end) in enumerate(
            [*ran, ("finish", "finish", times[2][0] + 0.05, times[2][1] + 0.01)]
        ):
            line = span(step, 0.0, module).line() | {"name": name, "start": start, "end": end, "step_start": began}
            if planned_s and module != "finish":
                line |= {"planned_start_s": n * planned_s, "planned_end_s": (n + 1) * planned_s}
            lines.append(json.dumps(line) + "\n")
    (folder / "config.yaml").write_text("run: {name: long}\n")
    (folder / TIMELINE).write_text("".join(lines))
    return RunDir.open(folder)


@pytest.mark.parametrize("planned_s", [0.1 + 1e-6 / 3, 0.15, 0.04, 0.25])
def test_no_slice_of_a_lane_overlaps_another_one(tmp_path: Path, planned_s: float) -> None:
    entries = trace(overlapping(tmp_path, planned_s))
    assert overlaps(entries) == []
    assert len([entry for entry in entries if entry["ph"] == "X"]) == 40 * (4 + 3 + 1)
    (pid,) = {entry["pid"] for entry in entries} - {RUN_PID}
    named = {
        (entry["pid"], entry["tid"]): entry["args"]["name"] for entry in entries if entry.get("name") == "thread_name"
    }
    used = {(entry["pid"], entry["tid"]) for entry in entries if entry["ph"] == "X"}
    assert used <= named.keys() and len({(at, name) for (at, _), name in named.items()}) == len(named)
    assert {named[pid, MEASURED], named[pid, PLANNED], named[pid, FINISH]} == {"measured", "planned", "finish"}
    assert sorted(name for (at, _), name in named.items() if at == RUN_PID) == ["events", "steps", "steps 2"]
    assert len(slices(entries, pid, MEASURED)) == 40 * 3, "they touch, so one lane has all"
    assert ("planned 2" in named.values()) == (planned_s > 0.101)


def test_a_plan_that_is_far_too_slow_takes_eight_lanes_of_a_worker(tmp_path: Path) -> None:
    entries = trace(overlapping(tmp_path, planned_s=10.0))
    names = {entry["args"]["name"] for entry in entries if entry.get("name") == "thread_name"}
    assert overlaps(entries) == [] and {name for name in names if name.startswith("planned")} == {
        "planned",
        *(f"planned {number}" for number in range(2, 9)),
    }


def test_a_run_without_spans_gives_an_empty_trace(run_folder: Path) -> None:
    (run_folder / "timeline.jsonl").write_text("")
    assert trace(RunDir.open(run_folder)) == []


def long_timeline(folder: Path, steps: int = 40) -> RunDir:
    """Ten spans of a step, the first half of the steps in the older file."""
    (folder / "config.yaml").write_text("run: {name: long}\n")
    for name, held in ((OLDER_TIMELINE, range(steps // 2)), (TIMELINE, range(steps // 2, steps))):
        spans = [span(step, 10.0 * step, f"dit{n}", ran_in=10.0 * step) for step in held for n in range(10)]
        (folder / name).write_text("".join(json.dumps(one.line()) + "\n" for one in spans))
    return RunDir.open(folder)


@pytest.mark.parametrize(("most", "first"), [(20, 39), (95, 31), (200, 21), (210, 20), (215, 19), (400, 0)])
def test_of_a_long_timeline_the_newest_whole_steps_are_shown(tmp_path: Path, most: int, first: int) -> None:
    run = long_timeline(tmp_path)
    written = write_timeline(run, most=most)
    steps = [entry["name"] for entry in slices(json.loads(written.path.read_text())["traceEvents"], RUN_PID, 0)]
    assert steps == [f"step {step}" for step in range(first, 40)]
    assert (written.first, written.last, written.whole) == (first, 39, first == 0)


def test_a_step_of_more_spans_than_are_shown_is_shown_in_part(tmp_path: Path) -> None:
    written = write_timeline(long_timeline(tmp_path), most=7)
    entries = json.loads(written.path.read_text())["traceEvents"]
    assert [entry["name"] for entry in slices(entries, RUN_PID, 0)] == ["step 39"]
    assert sum(entry.get("name", "").startswith("dit") and entry["ph"] == "X" for entry in entries) >= 7
    assert (written.first, written.last, written.whole) == (39, 39, False)


def test_two_reports_at_once_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is written while the first is not finished."""
    run, pid, inner = long_timeline(tmp_path), os.getpid(), list[Path]()

    def entries(shown: Any, *more: Any, **named: Any) -> Iterator[Any]:
        yield from whole(shown, *more, **named)
        if not inner:
            inner.append(tmp_path)
            monkeypatch.setattr(os, "getpid", lambda: pid + 1)
            inner.append(write_timeline(run).path)
            monkeypatch.setattr(os, "getpid", lambda: pid)

    whole = timeline._entries
    monkeypatch.setattr(timeline, "_entries", entries)
    written = write_timeline(run)
    assert len(json.loads(written.path.read_text())["traceEvents"]) > 400 and list(tmp_path.glob(".*.part")) == []


def test_what_is_not_shown_is_not_parsed(tmp_path: Path) -> None:
    run = long_timeline(tmp_path)
    older = tmp_path / OLDER_TIMELINE
    older.write_text("no JSON\n" + older.read_text())
    newest, are_older = run.newest_spans(210)
    assert [span.step for span in newest] == [step for step in range(19, 40) for _ in range(10)] and are_older
    with pytest.raises(ConfigError, match=r"timeline.1.jsonl line 1 is not JSON"):
        list(run.spans())
    with (tmp_path / TIMELINE).open("a") as file:
        file.write("no span\n{}\n")
    with pytest.raises(ConfigError, match=r"timeline.jsonl line 201 is not JSON"):
        list(run.newest_spans(5)[0])


def test_a_timeline_that_is_moved_while_it_is_read_is_still_read_by_whole_lines(tmp_path: Path) -> None:
    """The run goes on: what was the newest file is the older one now, in which another byte begins a line."""
    run = long_timeline(tmp_path)
    newest, _ = run.newest_spans(210)
    lines = (tmp_path / TIMELINE).read_text().splitlines(keepends=True)
    (tmp_path / OLDER_TIMELINE).write_text(lines[0].replace(" ", "", 1) + "".join(lines[1:]))
    (tmp_path / TIMELINE).write_text("")
    assert {span.step for span in newest} == {38, 39}


def test_steps_are_shown_that_are_asked_for(tmp_path: Path) -> None:
    run = long_timeline(tmp_path)
    written = write_timeline(run, StepRange.parse("5-7"))
    steps = [entry["name"] for entry in slices(json.loads(written.path.read_text())["traceEvents"], RUN_PID, 0)]
    assert steps == ["step 5", "step 6", "step 7"] and not written.whole
    assert StepRange.parse("12") == StepRange(12, 12)
    before = written.path.read_text()
    with pytest.raises(ConfigError, match="no step from 50 to 60; it keeps the newest steps, now from 0 on"):
        write_timeline(run, StepRange.parse("50-60"))
    assert written.path.read_text() == before and list(tmp_path.glob(".*.part")) == []
    for wrong in ("7-5", "a", "1-2-3", "-3"):
        with pytest.raises(ConfigError, match="such as 4000-4100"):
            StepRange.parse(wrong)
