"""Files that one process writes and another follows, also when the writer dies or takes lines back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.records.events import PoolResized, RunFinished
from actors.records.metrics_line import metrics_of
from app.records.follow import Follower, Tail
from app.records.metrics import Metrics
from app.run.recorder import Recorder


def test_recomputed_steps_are_shown_once_and_no_line_is_cut(tmp_path: Path) -> None:
    with Metrics(tmp_path, track=()) as metrics:
        for step in range(4):
            metrics.step(metrics_of({"step": step, "loss": 1.0, "time": 100.0 + step}))
        tail = Tail(tmp_path / "metrics.jsonl")
        metrics.step(
            metrics_of({"step": 3, "loss": 0.5, "time": 110.0})
        )  # one line is taken back, the new one is longer
        assert [(line["step"], line["loss"], line["recomputed"]) for line in tail.read()] == [(3, 0.5, True)]
        metrics.step(metrics_of({"step": 4, "loss": 0.4, "time": 111.0}))
        assert [line["step"] for line in tail.read()] == [4]
        assert tail.read() == []


def test_a_line_that_a_killed_writer_left_unfinished_is_cut(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"time": 1, "event": "start"}\n{"time": 2, "ev')
    with Recorder(tmp_path) as recorder:
        recorder.on_event(RunFinished(time=3, step=0, ledger={}))
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["start", "finish"]


def test_half_a_line_at_the_start_does_not_end_what_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a kill leaves: the resumed run's follower looks first, then the recorder cuts it."""
    events = tmp_path / "events.jsonl"
    events.write_text('{"time": 1, "event": "resize", "target": 2}\n{"time": 2, "ev')
    with Follower(tmp_path, 9), Recorder(tmp_path) as recorder:
        recorder.on_event(PoolResized(time=3, target=7))
        recorder.on_event(PoolResized(time=4, target=8))
    shown = capsys.readouterr().out
    assert "asked for 7 workers" in shown and "asked for 8 workers" in shown and "asked for 2" not in shown


def test_a_line_that_is_no_json_is_passed_over(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "events.jsonl")
    (tmp_path / "events.jsonl").write_text('{"time": 1}\n{"ti{"time": 2}\n{"time": 3}\n')
    assert [line["time"] for line in tail.read()] == [1, 3]


def test_lines_cut_and_written_again_beyond_the_old_place_are_found(tmp_path: Path) -> None:
    """Between two looks the file was cut and has become longer than it was."""
    with Metrics(tmp_path, track=()) as metrics:
        for step in range(6):
            metrics.step(metrics_of({"step": step, "time": 100.0 + step}))
        tail = Tail(tmp_path / "metrics.jsonl")
        for step in range(2, 9):
            metrics.step(metrics_of({"step": step, "time": 200.0 + step}))
    assert [line["step"] for line in tail.read()] == list(range(2, 9))
    assert tail.read() == []
