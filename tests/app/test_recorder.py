"""A run of millions of steps leaves a folder of bounded size; what is kept can be read back."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray.train

from actors.outcome import NotRecorded, Superseded
from actors.plan.types import StepPlan
from actors.records.events import EnvironmentSeen, RunFinished, SettingsChanged, WorkersAwaited
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


class Storage:
    """The disk below a folder, of which writes and new files fail while `refuses` is an error's number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses = 0
        self.only = ""  # part of a path; "": all of them
        write, write_text = os.write, Path.write_text

        def written(file: int, data: memoryview) -> int:
            self._check(os.readlink(f"/proc/self/fd/{file}"))
            return write(file, data)

        def text_written(path: Path, text: str, encoding: str | None = None) -> int:
            self._check(str(path))
            return write_text(path, text, encoding=encoding)

        monkeypatch.setattr("ops.line_file.os.write", written)
        monkeypatch.setattr(Path, "write_text", text_written)

    def _check(self, path: str) -> None:
        if self.refuses and self.only in path:
            raise OSError(self.refuses, os.strerror(self.refuses), path)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Storage:
    return Storage(monkeypatch)


@pytest.mark.parametrize(
    ("number", "only"),
    [
        *((errno.ENOSPC, only) for only in ("plans/", "timeline.jsonl", "workers.jsonl", "metrics.jsonl", "")),
        *((number, "") for number in (errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)),
        *((number, "") for number in (errno.EACCES, errno.EKEYEXPIRED, errno.EHOSTDOWN, errno.EREMOTEIO, errno.EAGAIN)),
    ],
)
def test_a_step_that_the_disk_refuses_is_recorded_once_by_a_later_try(
    tmp_path: Path, storage: Storage, number: int, only: str
) -> None:
    steps = [metrics_of({"step": step, "loss": 1.0, "mfu_by_worker": {"w0": 0.5}}) for step in range(3)]
    spans = [span_of({"step": 1, "name": "x"})]
    with Recorder(tmp_path) as writer:
        writer.on_step(steps[0], spans, plan())
        storage.refuses, storage.only = number, only
        for _ in range(3):
            with pytest.raises(NotRecorded, match=os.strerror(number)):
                writer.on_step(steps[1], spans, plan())
            assert writer.newest_line() == (0, 0), "it does not count"
        storage.refuses = 0
        writer.on_step(steps[1], spans, plan())
        writer.on_step(steps[2], spans, plan())
    run = RunDir(tmp_path)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2] == list(run.plans())
    assert [line["step"] for line in lines(tmp_path / "workers.jsonl")] == [0, 1, 2]
    assert len(list(run.spans())) == 3 and not any("recomputed" in line for line in lines(tmp_path / "metrics.jsonl"))


def test_who_was_superseded_writes_neither_steps_nor_events(tmp_path: Path) -> None:
    """The files are those of another start by then: two writers would mix their lines."""
    taken_over: list[str] = []

    def guard() -> None:
        if taken_over:
            raise Superseded(taken_over[0])

    first, second = (metrics_of({"step": step, "loss": 1.0}) for step in range(2))
    with Recorder(tmp_path, guard=guard) as writer:
        writer.on_step(first, [], plan())
        taken_over.append("by another start")
        files = [tmp_path / name for name in ("metrics.jsonl", "timeline.jsonl", "events.jsonl")]
        before = [path.read_bytes() if path.exists() else b"" for path in files]
        for late in (
            lambda: writer.on_step(second, [], plan()),
            lambda: writer.on_event(RunFinished(time=1.0, step=0, ledger={})),
        ):
            with pytest.raises(Superseded):
                late()
        assert [path.read_bytes() if path.exists() else b"" for path in files] == before


def test_lines_of_steps_are_synced_before_a_checkpoint_which_is_worth_more_than_they(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    synced: list[Path] = []

    def fsync(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").readlink())
        if len(synced) > 1:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with Recorder(tmp_path) as writer:
        writer.before_checkpoint()  # of the first step: there is no line yet
        writer.on_step(metrics_of({"step": 0, "loss": 1.0}), [], plan())
        writer.before_checkpoint()
        assert synced == [tmp_path / "metrics.jsonl"] and not caplog.records
        writer.before_checkpoint()
    assert [record.message for record in caplog.records if "Input/output error" in record.message]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_the_workers_compute_with_now_is_a_file_of_its_own(tmp_path: Path) -> None:
    first = EnvironmentSeen(time=1.0, from_step=0, software={"torch": "2.12"}, hosts=("a",))
    second = replace(first, time=2.0, from_step=500, software={"torch": "2.13"}).after(first)
    with Recorder(tmp_path) as writer:
        writer.on_event(first)
        writer.on_event(second)
        told = json.loads((tmp_path / "env.json").read_text())
        assert (told["from_step"], told["software"], told["changed"]) == (
            500,
            {"torch": "2.13"},
            ["torch 2.12 -> 2.13"],
        )
        (tmp_path / "env.json").unlink()
        (tmp_path / "env.json").mkdir()  # where nothing can be written: no reason to end a run
        writer.on_event(first)
    assert len(list(RunDir(tmp_path).events())) == 3


def test_events_that_the_disk_refuses_come_before_the_next_step(tmp_path: Path, storage: Storage) -> None:
    with Recorder(tmp_path) as writer:
        storage.refuses = errno.ENOSPC
        for number in range(3):
            writer.on_event(WorkersAwaited(time=1.0 + number, detail="0 of 1"))
        with pytest.raises(NotRecorded):
            writer.on_step(metrics_of({"step": 0}), [], plan())
        storage.refuses, storage.only = errno.ENOSPC, "events.jsonl"
        with pytest.raises(NotRecorded):
            writer.on_step(metrics_of({"step": 0}), [], plan())
        storage.refuses = 0
        writer.on_step(metrics_of({"step": 0}), [], plan())
    assert [event.time for event in RunDir(tmp_path).events()] == [1.0, 2.0, 3.0]


def test_the_last_events_are_written_with_the_end(tmp_path: Path, storage: Storage) -> None:
    with Recorder(tmp_path) as writer:
        storage.refuses = errno.ENOSPC
        writer.on_event(WorkersAwaited(time=1.0, detail="0 of 1"))
        storage.refuses = 0
    assert len(list(RunDir(tmp_path).events())) == 1


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EPERM])
def test_a_folder_that_is_gone_or_made_immutable_ends_a_run(tmp_path: Path, storage: Storage, number: int) -> None:
    """It does not come back by itself. EACCES may: a Kerberos ticket that has run out is renewed."""
    with Recorder(tmp_path) as writer:
        storage.refuses = number
        with pytest.raises(OSError, match=os.strerror(number)):
            writer.on_event(WorkersAwaited(time=1.0, detail="0 of 1"))
        with pytest.raises(OSError, match=os.strerror(number)):
            writer.on_step(metrics_of({"step": 0}), [], plan())


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
