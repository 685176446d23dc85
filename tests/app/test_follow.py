"""Files that one process writes and another follows, also when the writer dies or takes lines back."""

from __future__ import annotations

import json
from pathlib import Path

from app.metrics import Metrics
from app.recorder import Recorder
from app.train import _Tail


def test_recomputed_steps_are_shown_once_and_no_line_is_cut(tmp_path: Path) -> None:
    with Metrics(tmp_path, tensorboard=False) as metrics:
        for step in range(4):
            metrics.step({"step": step, "loss": 1.0, "time": 100.0 + step})
        tail = _Tail(tmp_path / "metrics.jsonl")
        metrics.step({"step": 3, "loss": 0.5, "time": 110.0})  # one line is taken back, the new one is longer
        assert [(line["step"], line["loss"], line["recomputed"]) for line in tail.read()] == [(3, 0.5, True)]
        metrics.step({"step": 4, "loss": 0.4, "time": 111.0})
        assert [line["step"] for line in tail.read()] == [4]
        assert tail.read() == []


def test_a_line_that_a_killed_writer_left_unfinished_is_cut(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"time": 1, "event": "start"}\n{"time": 2, "ev')
    with Recorder(tmp_path) as recorder:
        recorder.on_event({"time": 3, "event": "finish"})
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["start", "finish"]
