"""A run of millions of steps leaves a folder of bounded size; what is kept can be read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.plan.types import StepPlan
from actors.records.metrics_line import metrics_of
from actors.records.span_record import span_of
from actors.step import StepAssignment
from app.records.rundir import RunDir
from app.run import recorder
from app.run.recorder import Recorder


def plan() -> Any:
    step = StepPlan(step=0, cascades=(), makespan_s=1.0, lower_bound_s=1.0, planning_s=0.1, idle_ratio=0.0)
    return StepAssignment(step=step, cascades=(), planning_s=0.1)


def record(folder: Path, steps: int) -> RunDir:
    with Recorder(folder) as writer:
        for step in range(steps):
            writer.on_step(metrics_of({"step": step, "loss": 1.0}), [span_of({"step": step, "name": "x" * 80})], plan())
    return RunDir(folder)


def test_old_plans_are_thinned_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_PLANS", 10)
    assert sorted(record(tmp_path, 35).plans()) == [0, 10, 20, *range(25, 35)]


def test_the_timeline_keeps_its_newest_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_TIMELINE_BYTES", 4000)
    run = record(tmp_path, 40)
    steps = [span.step for span in run.spans()]
    assert steps == list(range(steps[0], 40)) and 9 < len(steps) < 30
    assert run.metrics().count() == 40
