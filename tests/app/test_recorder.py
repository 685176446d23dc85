"""A run of millions of steps leaves a folder of bounded size; what is kept can be read back."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray.train

from actors.plan.types import StepPlan
from actors.records.events import RunFinished, SettingsChanged, WorkersAwaited
from actors.records.metrics_line import metrics_of
from actors.records.span_record import span_of
from actors.step import StepAssignment
from app.records.rundir import RunDir
from app.run.asides import RunAsides
from app.run.recorder import Recorder
from app.settings.config import RunConfig
from app.settings.run_folder import prepare_run_dir


def plan() -> Any:
    step = StepPlan(step=0, cascades=(), makespan_s=1.0, lower_bound_s=1.0, planning_s=0.1, idle_ratio=0.0)
    return StepAssignment(step=step, cascades=(), planning_s=0.1)


def record(folder: Path, steps: int, plans: int = 1000, timeline_bytes: int = 2**27) -> RunDir:
    with Recorder(folder, plans=plans, timeline_bytes=timeline_bytes) as writer:
        for step in range(steps):
            writer.on_step(metrics_of({"step": step, "loss": 1.0}), [span_of({"step": step, "name": "x" * 80})], plan())
    return RunDir(folder)


def test_old_plans_are_thinned_out(tmp_path: Path) -> None:
    assert sorted(record(tmp_path, 35, plans=10).plans()) == [0, 10, 20, *range(25, 35)]


def test_the_timeline_keeps_its_newest_part(tmp_path: Path) -> None:
    run = record(tmp_path, 40, timeline_bytes=4000)
    steps = [span.step for span in run.spans()]
    assert steps == list(range(steps[0], 40)) and 9 < len(steps) < 30
    assert run.metrics().count() == 40


@pytest.fixture
def resumed(tmp_path: Path) -> tuple[RunConfig, Path, str]:
    """A resume with one worker more: its settings, the folder, and what its config.yaml was."""
    text = f"run: {{name: one, dir: {tmp_path}}}\nworkers: {{max: %d}}\ndata: {{sources: [{{path: x.tar}}]}}"
    run = prepare_run_dir(RunConfig.from_yaml(text % 2))
    before = (run / "config.yaml").read_text()
    config = RunConfig.from_yaml(text % 3)
    assert prepare_run_dir(config, resume=True) == run
    return config, run, before


def test_the_settings_of_a_resume_are_the_runs_with_its_first_step(resumed: tuple[RunConfig, Path, str]) -> None:
    config, run, before = resumed
    for _ in range(2):  # the controller's process was started again
        with Recorder(run, config=config, changes=["workers.max 2 -> 3"]) as writer:
            writer.on_event(WorkersAwaited(time=1.0, detail="0 of 1"))
            writer.on_step(metrics_of({"step": 0, "loss": 1.0}), [], plan())
    assert (run / "config.yaml").read_text() != before
    assert RunConfig.load(run / "config.yaml") == config and not list(run.glob(".*.part"))
    told = [event.settings for event in RunDir(run).events() if isinstance(event, SettingsChanged)]
    assert told == [("workers.max 2 -> 3",)]


def test_a_resume_that_is_refused_leaves_the_settings(resumed: tuple[RunConfig, Path, str]) -> None:
    config, run, before = resumed
    with Recorder(run, config=config, changes=["workers.max 2 -> 3"]) as writer:
        writer.on_event(WorkersAwaited(time=1.0, detail="0 of 1"))
    assert (run / "config.yaml").read_text() == before
    assert not [event for event in RunDir(run).events() if isinstance(event, SettingsChanged)]


def test_a_resume_with_nothing_left_to_do_has_its_settings(resumed: tuple[RunConfig, Path, str]) -> None:
    config, run, _ = resumed
    with Recorder(run, config=config) as writer:
        writer.on_event(RunFinished(time=1.0, step=9, ledger={}))
    assert RunConfig.load(run / "config.yaml") == config


@pytest.mark.timeout(60)
def test_a_ray_train_that_takes_no_report_in_holds_up_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, reported = threading.Event(), list[int]()
    begun = threading.Event()

    def report(metrics: dict[str, int]) -> None:
        begun.set()
        taken.wait()
        reported.append(metrics["step"])

    monkeypatch.setattr(ray.train, "report", report)
    with Recorder(tmp_path, asides=RunAsides([], share=0.05)) as writer:
        writer.on_checkpoint(tmp_path, 3)
        assert begun.wait(30)
        for step in (7, 11):
            writer.on_checkpoint(tmp_path, step)
        taken.set()
    assert reported == [3, 11], "and the newest of those that it was too slow for"


def test_a_ray_train_that_refuses_a_report_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[int] = []

    def report(metrics: dict[str, int]) -> None:
        reported.append(metrics["step"])
        if len(reported) > 1:
            threading.Event().wait()  # as Ray Train's own does after one that was refused
        refused.set()
        raise RuntimeError("its actor is gone")

    refused = threading.Event()
    monkeypatch.setattr(ray.train, "report", report)
    with Recorder(tmp_path, asides=RunAsides([], share=0.05)) as writer:
        writer.on_checkpoint(tmp_path, 3)
        assert refused.wait(30)
        writer.on_checkpoint(tmp_path, 7)
        began = time.monotonic()
    assert reported == [3] and time.monotonic() - began < 4.0
