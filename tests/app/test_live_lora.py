"""LoRA files of a live run: those of `heddle export --lora-only`, from each checkpoint, whole, and never in the way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import typer
from safetensors.torch import load_file

from actors.names import run_id
from actors.outcome import Exit
from actors.planning.forecasts import lora_files_gib
from actors.records.events import LoraFilesFailed, LoraFilesMade, RunEvent, RunFinished
from actors.records.metrics_line import metrics_of
from actors.state import checkpoint_files
from app.commands.workers import stop
from app.export import live
from app.export.export import export
from app.export.live import FINISH_S, LiveLora, LoraFilesReport
from app.plan.dry_run import lora_bytes
from app.run.lock import FolderLock, lock_path
from app.run.recorder import Recorder
from app.run.signals import RunSignals
from app.settings.config import RunConfig
from ops.models import lora_files
from ops.models.base.config import DiTConfig
from ops.models.load import dit_skeleton
from ops.models.lora import B, read_factors
from ops.models.lora_files import num_written, write_factors, writing_bytes
from ops.models.wan.config import WanConfig
from ops.models.weights import is_lora, write_tensors
from ops.typed import ConfigError
from tests.app import test_export
from tests.app.test_export import haar_run
from tests.app.test_recorder import plan
from tests.app.test_sample import tiny_run
from tests.families.registry import ONE_EACH, VARIANTS

NAMES = ["comfyui_lora_weights.safetensors", "pytorch_lora_weights.safetensors"]


def lora_run(**checkpoint: Any) -> RunConfig:
    config = haar_run(lora_rank=2)
    return replace(config, checkpoint=replace(config.checkpoint, **checkpoint))


def write_checkpoint(run: Path, step: int, config: RunConfig | None = None, **more: Any) -> Path:
    """Returns its folder."""
    return test_export.write_checkpoint(run, config or lora_run(), step=step, **more) / "checkpoints" / f"step-{step}"


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class Tasks:
    """In place of Ray's: a task runs in this process when it is waited for, unless it hangs, or has lost its process
    (`lost` times)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.cancelled: list[object] = []
        self.hangs, self.lost = False, 0
        monkeypatch.setattr(live, "remote_of", lambda plain, once: self)
        monkeypatch.setattr(live, "wait", lambda some, timeout: ([], some) if self.hangs else (some, []))
        monkeypatch.setattr(live, "get", self.get)
        monkeypatch.setattr(live, "cancel", self.cancelled.append)
        monkeypatch.setattr(live, "node_id", lambda: "ab" * 28)
        monkeypatch.setattr(live.os, "nice", lambda by: None)

    def options(self, **options: Any) -> Tasks:
        assert options["num_cpus"] == options["max_retries"] == 0
        assert options["scheduling_strategy"].node_id == "ab" * 28, "on this node, which has read the model's folder"
        return self

    def remote(self, run_dir: str, checkpoints: dict[int, str], dtype: str) -> Any:
        self.asked.append(tuple(checkpoints))
        return (run_dir, checkpoints, dtype)

    def get(self, task: Any) -> LoraFilesReport:
        if self.lost:
            self.lost -= 1
            raise ray.exceptions.WorkerCrashedError
        return live.make(*task)


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Tasks:
    return Tasks(monkeypatch)


def steps_of(events: Sequence[RunEvent]) -> list[tuple[str, int]]:
    assert all(isinstance(event, LoraFilesMade | LoraFilesFailed) for event in events)
    return [(event.event, event.step) for event in events]  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_files_are_those_of_the_command_byte_for_byte(dtype: str, tmp_path: Path, tasks: Tasks) -> None:
    config, run = lora_run(lora_files=dtype), tmp_path / "run"
    write_checkpoint(run, 9, config)
    lora = LiveLora(config, run)
    lora.on_checkpoint(9)
    (event,) = lora.heard()
    assert isinstance(event, LoraFilesMade) and event.step == 9 and event.seconds >= 0
    assert event.files == tuple(f"lora/step-9/{name}" for name in NAMES)
    export(run / "checkpoints" / "step-9", tmp_path / "out", lora_only=True, dtype=dtype)
    assert files_below(run / "lora") == [f"step-9/{name}" for name in NAMES], "nothing else, hidden or not"
    for name in NAMES:
        ours, theirs = run / "lora" / "step-9" / name, tmp_path / "out" / name
        assert ours.read_bytes() == theirs.read_bytes() and ours.stat().st_mode == theirs.stat().st_mode
    assert (run / "lora" / "step-9").stat().st_mode == (tmp_path / "out").stat().st_mode
    assert event.describe().startswith(f"LoRA files after 10 steps: lora/step-9/{NAMES[0]}, lora/step-9/{NAMES[1]} (")


@pytest.mark.parametrize("config", [tiny_run(), lora_run(lora_files="off")], ids=["no factors", "off"])
def test_a_run_without_factors_and_one_that_does_not_want_them_has_none(
    config: RunConfig, tmp_path: Path, tasks: Tasks
) -> None:
    write_checkpoint(tmp_path, 9)
    lora = LiveLora(config, tmp_path)
    lora.open()
    lora.on_checkpoint(19)
    assert lora.heard() == [] == lora.finish(FINISH_S) and not tasks.asked and not (tmp_path / "lora").exists()


def test_a_start_looks_at_no_checkpoint_whose_files_are_there(
    tmp_path: Path, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took a minute for 2,500 that are kept, before the first step."""
    for step in (9, 19, 29):
        write_checkpoint(tmp_path, step)
    (tmp_path / "lora" / "step-9").mkdir(parents=True)
    (tmp_path / "lora" / "step-29").mkdir()
    read, opened = checkpoint_files._listed, list[str]()
    monkeypatch.setattr(checkpoint_files, "_listed", lambda folder: opened.append(folder.name) or read(folder))
    lora = LiveLora(lora_run(), tmp_path)
    assert lora.open() == [] and opened == ["step-19"]
    tasks.hangs = True
    assert lora.heard() == [] and tasks.asked == [(19,)]


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE])
def test_a_checkpoint_that_may_not_be_read_takes_no_files_from_the_others(
    code: int, tmp_path: Path, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of somebody else turned them off for the whole start."""
    for step in (9, 19):
        write_checkpoint(tmp_path, step)
    read = checkpoint_files._listed

    def refused(folder: Path) -> Any:
        if folder.name == "step-9":
            raise OSError(code, os.strerror(code), str(folder))
        return read(folder)

    monkeypatch.setattr(checkpoint_files, "_listed", refused)
    lora = LiveLora(lora_run(), tmp_path)
    assert lora.open() == [] and set(lora._due) == {19}


def test_one_task_at_a_time_and_no_checkpoint_is_left_out(tmp_path: Path, tasks: Tasks) -> None:
    lora = LiveLora(lora_run(), tmp_path)
    tasks.hangs = True
    for step in (9, 19, 29):
        write_checkpoint(tmp_path, step)
        lora.on_checkpoint(step)
        assert lora.heard() == []
    assert tasks.asked == [(9,)]
    tasks.hangs = False
    assert steps_of(lora.heard()) == [("lora_files", 9)]
    assert tasks.asked == [(9,), (19, 29)], "the oldest first: it is deleted first"
    assert steps_of(lora.finish(FINISH_S)) == [("lora_files", 19), ("lora_files", 29)] and lora.heard() == []


def test_a_resume_makes_those_that_are_missing_and_removes_what_a_killed_run_has_left(
    tmp_path: Path, tasks: Tasks
) -> None:
    for step in (9, 19, 29):
        write_checkpoint(tmp_path, step)
    (tmp_path / "lora" / "step-19").mkdir(parents=True)
    (tmp_path / ".lora" / "made-abc" / "made").mkdir(parents=True)
    (tmp_path / "lora" / ".made-step-29" / "made").mkdir(parents=True)  # on another file system
    others = [".cache", ".git"]
    for name in others:
        (tmp_path / "lora" / name).mkdir()
    (tmp_path / "lora" / "step-3").mkdir()  # its checkpoint is deleted
    lora = LiveLora(lora_run(), tmp_path)
    lora.open()
    assert steps_of(lora.heard()) == [("lora_files", 9), ("lora_files", 29)]
    there = [*others, "step-19", "step-29", "step-3", "step-9"]
    assert sorted(path.name for path in (tmp_path / "lora").iterdir()) == there
    lora.close()
    assert not (tmp_path / ".lora").exists() and sorted(path.name for path in (tmp_path / "lora").iterdir()) == there


def test_files_of_steps_that_were_taken_again_are_replaced(tmp_path: Path, tasks: Tasks) -> None:
    before = tmp_path / "lora" / "step-9"
    before.mkdir(parents=True)
    (before / "old.safetensors").touch()
    write_checkpoint(tmp_path, 9)
    lora = LiveLora(lora_run(), tmp_path)
    lora.on_checkpoint(9)
    assert steps_of(lora.heard()) == [("lora_files", 9)]
    assert files_below(tmp_path / "lora") == [f"step-9/{name}" for name in NAMES]


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_read_to_its_end(tmp_path: Path, tasks: Tasks) -> None:
    """Also one whose turn comes late."""
    lora, tasks.hangs = LiveLora(lora_run(), tmp_path), True
    for step in (9, 19, 29):
        folder = write_checkpoint(tmp_path, step)
        lora.on_checkpoint(step)
        assert lora.heard() == []
        shutil.rmtree(folder)
    assert not (tmp_path / "lora").exists(), "ComfyUI lists what lies there, also in hidden folders"
    tasks.hangs = False
    assert steps_of(lora.finish(FINISH_S)) == [("lora_files", 9), ("lora_files", 19), ("lora_files", 29)]
    assert not (tmp_path / ".lora").exists(), "its disk space is free"


def test_a_full_disk_is_one_event_with_the_remedy_and_a_resume_tries_again(
    tmp_path: Path, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, 9)
    write_checkpoint(tmp_path, 19)

    def full(file: Path, tensors: object) -> None:
        file.write_bytes(b"some")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    lora = LiveLora(lora_run(), tmp_path)
    lora.open()
    with monkeypatch.context() as broken:
        broken.setattr("ops.models.lora_files.write_tensors", full)
        first, second = lora.heard()
    assert steps_of([first, second]) == [("lora_files_failed", 9), ("lora_files_failed", 19)]
    said = "No space left on device. Free space, or choose another path. A resume makes them"
    assert said in first.describe()
    assert f"heddle export --checkpoint {tmp_path} --after 10 --lora-only --to FOLDER" in first.describe()
    assert list((tmp_path / "lora").iterdir()) == [] and lora.heard() == [], "nothing half written, and no second word"
    lora = LiveLora(lora_run(), tmp_path)
    lora.open()
    assert steps_of(lora.heard()) == [("lora_files", 9), ("lora_files", 19)]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lambda folder: (folder / "COMPLETE").unlink(), "checkpoints/step-9 is no complete checkpoint"),
        (lambda folder: (folder / "meta.json").write_text("{}"), "checkpoints/step-9 is no complete checkpoint"),
        (lambda folder: next(folder.glob("shard-*")).write_bytes(b"x"), "checkpoints/step-9 is no complete checkpoint"),
    ],
    ids=["incomplete", "meta", "shard"],
)
def test_a_checkpoint_that_cannot_be_read_is_named_and_the_next_ones_are_made(
    broken: Any, why: str, tmp_path: Path, tasks: Tasks
) -> None:
    folder = write_checkpoint(tmp_path, 9)
    write_checkpoint(tmp_path, 19)
    lora = LiveLora(lora_run(), tmp_path)
    broken(folder)
    lora.on_checkpoint(9)
    lora.on_checkpoint(19)
    made, failed = lora.heard()
    assert steps_of([made, failed]) == [("lora_files", 19), ("lora_files_failed", 9)]
    assert isinstance(failed, LoraFilesFailed) and why in failed.why and "Traceback" not in failed.why


def test_a_missing_folder_of_the_model_is_said_once_and_again_when_it_is_back_or_something_else_is_wrong(
    tmp_path: Path, tasks: Tasks
) -> None:
    base, away, lora = tmp_path / "base", tmp_path / "away", LiveLora(lora_run(), tmp_path / "run")
    test_export.publish(base)
    config = test_export.pipeline_run(base, lora_rank=2)

    def heard(step: int) -> list[str]:
        lora.on_checkpoint(step)
        return [event.describe() for event in lora.heard()]

    for step in (9, 19, 29, 39, 49, 59):
        write_checkpoint(tmp_path / "run", step, config)
    base.rename(away)
    (said,) = heard(9)
    assert f"{base}" in said and "does not exist" in said and said.startswith("no LoRA files after 10 steps (")
    assert heard(19) == [] == heard(29)
    (tmp_path / "run" / "checkpoints" / "step-39" / "COMPLETE").unlink()
    (said,) = heard(39)
    assert "checkpoints/step-39 is no complete checkpoint" in said
    assert len(heard(49)) == 1, "the reason is another one again"
    away.rename(base)
    (said,) = heard(59)
    assert said.startswith("LoRA files after 60 steps")


def test_factors_that_are_not_finite_are_no_file(tmp_path: Path, tasks: Tasks) -> None:
    write_checkpoint(tmp_path, 9, filled=float("nan"))
    lora = LiveLora(lora_run(), tmp_path)
    lora.on_checkpoint(9)
    (event,) = lora.heard()
    assert isinstance(event, LoraFilesFailed) and "holds numbers that are not finite" in event.why


@pytest.mark.parametrize(("lost", "ends"), [(2, "lora_files"), (3, "lora_files_failed")])
def test_a_task_whose_process_is_lost_is_begun_again_but_not_for_ever(
    lost: int, ends: str, tmp_path: Path, tasks: Tasks
) -> None:
    write_checkpoint(tmp_path, 9)
    tasks.lost = lost
    lora = LiveLora(lora_run(), tmp_path)
    lora.on_checkpoint(9)
    told = [event for _ in range(lost + 1) for event in lora.heard()]
    assert steps_of(told) == [(ends, 9)] and len(tasks.asked) == 3


def test_a_task_that_hangs_is_ended_and_the_next_checkpoint_has_its_own(
    tmp_path: Path, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, 9)
    write_checkpoint(tmp_path, 19)
    lora, tasks.hangs, now = LiveLora(lora_run(), tmp_path), True, time.monotonic()
    lora.on_checkpoint(9)
    assert lora.heard() == []
    monkeypatch.setattr(live.time, "monotonic", lambda: now + 3700)
    (event,) = lora.heard()
    assert isinstance(event, LoraFilesFailed) and "was not written in 3600 s" in event.why and len(tasks.cancelled) == 1
    tasks.hangs = False
    lora.on_checkpoint(19)
    assert steps_of(lora.heard()) == [("lora_files", 19)]


def test_the_end_of_a_run_does_not_wait_for_ever(tmp_path: Path, tasks: Tasks) -> None:
    write_checkpoint(tmp_path, 9)
    lora, tasks.hangs = LiveLora(lora_run(), tmp_path), True
    lora.on_checkpoint(9)
    (event,) = lora.finish(0.01)
    assert isinstance(event, LoraFilesFailed) and "the run has ended, and they were not ready" in event.why
    assert len(tasks.cancelled) == 1 and lora.heard() == []


def test_those_that_are_not_ready_at_the_end_of_a_run_are_one_event(tmp_path: Path, tasks: Tasks) -> None:
    lora, tasks.hangs = LiveLora(lora_run(), tmp_path), True
    for step in (9, 19, 1029):
        write_checkpoint(tmp_path, step)
        lora.on_checkpoint(step)
        assert lora.heard() == []
    (event,) = lora.finish(0.01)
    assert isinstance(event, LoraFilesFailed) and (event.step, event.others) == (9, (19, 1029))
    assert event.describe().startswith("no LoRA files after 10, 20 and 1,030 steps (the run has ended, and they were")
    assert "while their checkpoints are there" in event.why and f"{tmp_path} --after 10 --lora-only" in event.why
    assert not (tmp_path / ".lora").exists()


def test_a_link_to_another_file_system_has_the_files_too(tmp_path: Path, tasks: Tasks) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this host has no second file system")
    with tempfile.TemporaryDirectory(dir=elsewhere) as loras:
        (tmp_path / "lora").symlink_to(loras)
        (Path(loras) / ".cache").mkdir()
        lora = LiveLora(lora_run(), tmp_path)
        lora.open()
        for _ in range(2):  # the second time in place of the first
            write_checkpoint(tmp_path, 9)
            lora.on_checkpoint(9)
            assert steps_of(lora.heard()) == [("lora_files", 9)]
            shutil.rmtree(tmp_path / "checkpoints")
        lora.close()
        assert sorted(path.name for path in Path(loras).iterdir()) == [".cache", "step-9"]
        assert files_below(Path(loras)) == [f"step-9/{name}" for name in NAMES]


def test_a_folder_that_may_not_be_read_is_one_event_and_no_files(
    tmp_path: Path, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, 9)
    (tmp_path / "lora").mkdir()
    plain = Path.is_dir

    def is_dir(path: Path) -> bool:
        if path.parent.name == "lora":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return plain(path)

    monkeypatch.setattr(Path, "is_dir", is_dir)
    lora = LiveLora(lora_run(), tmp_path)
    (event,) = lora.open()
    said = f"no LoRA files (Permission denied: {tmp_path}/lora/step-9. Have it readable; a resume tries again)"
    assert event.describe() == said
    lora.on_checkpoint(19)
    assert lora.heard() == [] == lora.finish(FINISH_S) and not tasks.asked


def test_a_checkpoint_that_is_written_again_leaves_the_running_task_its_own(tmp_path: Path, tasks: Tasks) -> None:
    lora, tasks.hangs = LiveLora(lora_run(), tmp_path), True
    for _ in range(3):
        folder = write_checkpoint(tmp_path, 9)
        lora.on_checkpoint(9)
        assert lora.heard() == []
        shutil.rmtree(folder)
    tasks.hangs = False
    assert steps_of(lora.finish(FINISH_S)) == [("lora_files", 9), ("lora_files", 9)], "once more: of the newest"
    assert tasks.asked == [(9,), (9,)] and not (tmp_path / ".lora").exists()


def test_checkpoints_that_wait_for_a_task_that_hangs_do_not_pile_up(
    tmp_path: Path, tasks: Tasks, caplog: pytest.LogCaptureFixture
) -> None:
    lora, tasks.hangs = LiveLora(lora_run(), tmp_path), True
    steps = range(9, 79, 10)
    for step in steps:
        folder = write_checkpoint(tmp_path, step)
        lora.on_checkpoint(step)
        assert lora.heard() == []
        if step < 49:
            shutil.rmtree(folder)
    assert len(list((tmp_path / ".lora").iterdir())) == 3, "that of the task and two that wait"
    assert sum("come slower than checkpoints" in one.message for one in caplog.records) == 1
    tasks.hangs = False
    told = {step: event for event, step in steps_of(lora.finish(FINISH_S))}
    lost = {19, 29, 39}
    assert told == {step: "lora_files_failed" if step in lost else "lora_files" for step in steps}


@pytest.mark.parametrize("asked", ["to stop", "by a signal, after the last step"])
def test_what_waits_when_a_run_is_stopped_is_left_to_its_resume_in_silence(
    asked: str, tmp_path: Path, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora, tasks.hangs = LiveLora(lora_run(), tmp_path), True
    for step in (9, 19):
        write_checkpoint(tmp_path, step)
        lora.on_checkpoint(step)
        assert lora.heard() == []
    if asked == "to stop":
        assert lora.finish(0.01, resumes=True) == []
    else:
        monkeypatch.setattr("app.run.signals.monitor_of", lambda folder: exec("raise LookupError"))
        monkeypatch.setattr("app.run.apart._came", 0)  # and so again after this test
        began = time.monotonic()
        with RunSignals() as signals, signals.stopping(tmp_path, lambda: True):
            signal.raise_signal(signal.SIGTERM)
        assert lora.finish(60.0) == [] and time.monotonic() - began < 30
    assert len(tasks.cancelled) == 1 and not (tmp_path / ".lora").exists()
    tasks.hangs, resumed = False, LiveLora(lora_run(), tmp_path)
    resumed.open()
    assert steps_of(resumed.heard()) == [("lora_files", 9), ("lora_files", 19)]


def test_stop_ends_the_wait_of_a_run_for_its_last_lora_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps are done and the monitor has ended."""
    monkeypatch.setattr("app.run.operator.must_answer", lambda address: None)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("app.run.operator.monitor_of", lambda folder: exec("raise LookupError('it is not alive')"))
    folder = tmp_path / "run"
    folder.mkdir()
    run_id(folder)
    with pytest.raises(ConfigError, match="it is not alive"):
        stop(folder, wait_s=60.0)
    write_checkpoint(folder, 9)
    monkeypatch.setattr(LiveLora, "_begin", lambda self: time.sleep(0.02))  # no task ever runs
    lock, began = FolderLock(lock_path(folder, "driver")), time.monotonic()
    lock.take(0.0, print)
    lora = LiveLora(lora_run(), folder)
    told: list[RunEvent] = []
    lora.open()
    stop(folder, wait_s=0.0)
    assert "ends without the LoRA files that it waits for" in capsys.readouterr().out
    with pytest.raises(typer.Exit) as ended:
        stop(folder, wait_s=0.3)
    assert ended.value.exit_code == Exit.RESUMABLE, "it still lives"
    (folder / ".lora" / "stopped").unlink()

    def end() -> None:
        told.extend(lora.finish(300.0))
        lock.release()

    run = threading.Thread(target=end)
    run.start()
    stop(folder, wait_s=60.0)
    run.join(60.0)
    assert not run.is_alive() and not told and time.monotonic() - began < 200
    assert "the run has ended; a --resume makes the LoRA files" in capsys.readouterr().out


class Told:
    """LoRA files as the recorder knows them: an event with every step, and one in the end."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.broken = False

    def on_checkpoint(self, step: int) -> None:
        self.said.append(step)

    def heard(self) -> list[RunEvent]:
        if self.broken:
            raise RuntimeError("Ray is gone")
        return [LoraFilesMade(step=1, files=("a",), seconds=1.0)]

    def finish(self, limit_s: float, *, resumes: bool = False) -> list[RunEvent]:
        self.said.append((limit_s, resumes))
        return [LoraFilesMade(step=2, files=("b",), seconds=1.0)]

    def close(self) -> None:
        self.said.append("closed")


def events_in(folder: Path) -> list[tuple[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [(line["event"], line.get("step")) for line in lines if line["event"] != "tracker_quiet"]


@pytest.mark.parametrize("finished", [True, False])
def test_the_recorder_tells_of_them_and_waits_for_the_last_ones(finished: bool, tmp_path: Path) -> None:
    told: Any = Told()
    with Recorder(tmp_path, lora=told) as recorder:
        recorder.on_step(metrics_of({"step": 0, "loss": 1.0}), [], plan())
        recorder.on_checkpoint(tmp_path / "checkpoints" / "step-0", 0)
        if finished:
            recorder.on_event(RunFinished(time=1.0, step=0, ledger={}))
    assert told.said == [0, (600.0, False) if finished else (5.0, True), "closed"]
    ends = [("finish", 0)] if finished else []
    assert events_in(tmp_path) == [("lora_files", 1), ("lora_files", 1), *ends, ("lora_files", 2)]


def test_what_fails_there_is_no_harm_to_the_run_and_a_run_that_fails_does_not_wait(tmp_path: Path) -> None:
    told: Any = Told()
    told.broken = True
    with pytest.raises(ConfigError, match="of the run"), Recorder(tmp_path, lora=told) as recorder:
        recorder.on_step(metrics_of({"step": 0, "loss": 1.0}), [], plan())
        raise ConfigError("of the run")
    assert told.said == ["closed"] and (tmp_path / "metrics.jsonl").stat().st_size > 0


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "denied"), KeyboardInterrupt()])
def test_an_event_of_them_that_cannot_be_written_does_not_change_how_a_run_ends(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one who does not wait for them leaves nothing open."""
    told: Any = Told()
    with suppress(KeyboardInterrupt), Recorder(tmp_path, lora=told) as recorder:
        recorder.on_step(metrics_of({"step": 0, "loss": 1.0}), [], plan())

        def add(lines: object) -> None:
            raise error

        closed: list[str] = []
        monkeypatch.setattr(recorder._events, "add", add)
        monkeypatch.setattr(recorder._metrics, "close", lambda: closed.append("metrics"))
        monkeypatch.setattr(recorder._reports, "close", lambda: closed.append("reports"))
        if isinstance(error, KeyboardInterrupt):
            told.finish = lambda limit_s, resumes=False: add(None)
    assert closed == ["metrics", "reports"] and told.said[-1] == "closed"


@pytest.mark.parametrize(("form", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2), ("off", 0)])
def test_a_dry_run_counts_the_files_of_all_checkpoints_for_both_programs(form: str, size: int) -> None:
    config = lora_run(lora_files=form, every=300, keep_last=1)
    factors = {name: torch.zeros_like(w, device="cpu") for name, w in factors_of(config.model.dit).items()}
    once = sum(tensor.numel() for tensor in factors.values())
    assert lora_bytes(config, config.model.dit) == 2 * size * once * 4, "after 300, 600, 900 and 1,000 steps"
    assert lora_bytes(tiny_run(), tiny_run().model.dit) == 0


@pytest.mark.parametrize("family", ONE_EACH)
def test_a_dry_run_counts_what_is_written_also_where_comfyui_has_one_layer_for_three(
    family: str, tmp_path: Path
) -> None:
    dit = replace(VARIANTS[family], lora_rank=2)
    factors = {name: torch.ones_like(weight, device="cpu") for name, weight in factors_of(dit).items()}
    write_factors(tmp_path, dit, factors, "", torch.float32)
    stored = sum(tensor.numel() for file in tmp_path.iterdir() for tensor in load_file(file).values())
    assert num_written(dit) == stored > 0


@pytest.mark.parametrize(("form", "counted"), [("float32", True), ("bfloat16", True), ("off", False)])
def test_what_writing_them_takes_of_a_node_is_forecast_and_can_be_turned_off(form: Any, counted: bool) -> None:
    config = lora_run(lora_files=form)
    gib = writing_bytes(config.model.dit.experts) / 2**30
    assert lora_files_gib(config.checkpoint, config.model) == (gib if counted else 0.0)
    assert lora_files_gib(tiny_run().checkpoint, tiny_run().model) == 0.0


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writing_factors_takes_no_more_memory_than_is_forecast(dtype: str, tmp_path: Path) -> None:
    """In a process of its own, as the task has it: factors of 13 and 104 MiB. What more of them takes is over a third
    of what is forecast for it: that is not far too much."""
    ranks = (32, 256)
    words = [sys.executable, "-c", _WRITES, dtype, str(tmp_path), *map(str, ranks)]
    shown = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    taken = [int(line) for line in shown.splitlines()]
    small = WanConfig(num_layers=4, num_heads=8, head_dim=128, ffn_dim=4096)
    said = [writing_bytes(replace(small, lora_rank=rank).experts) for rank in ranks]
    assert all(here <= most for here, most in zip(taken, said, strict=True)), (taken, said)
    assert taken[1] - taken[0] > (said[1] - said[0]) / 3, (taken, said)


_WRITES = """
import sys
from pathlib import Path

import torch

from ops.models.load import dit_skeleton
from ops.models.lora_files import write_factors
from ops.models.wan.config import WanConfig
from ops.models.weights import is_lora

for rank in map(int, sys.argv[3:]):
    dit = WanConfig(num_layers=4, num_heads=8, head_dim=128, ffn_dim=4096, lora_rank=rank)
    weights = dit_skeleton(dit).state_dict()
    factors = {name: torch.ones(weight.shape) for name, weight in weights.items() if is_lora(name)}
    write_factors(Path(sys.argv[2]), dit, factors, "", getattr(torch, sys.argv[1]))
    # of this process alone: ru_maxrss would begin with the peak of the parent
    print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10)
"""


def test_one_form_of_the_factors_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take gigabytes, beside a run that needs its host's memory."""
    dit, live_ones = replace(lora_run().model.dit, lora_alpha=1.0), []
    made: list[weakref.ref[torch.Tensor]] = []

    def write(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        live_ones.append(sum(one() is not None for one in made))
        write_tensors(file, tensors)
        made.extend(weakref.ref(tensor) for name, tensor in tensors.items() if name.endswith(B))

    def read(*given: Any) -> dict[str, torch.Tensor]:
        live_ones.append(sum(one() is not None for one in made))
        return read_factors(*given)

    monkeypatch.setattr(lora_files, "write_tensors", write)
    monkeypatch.setattr(lora_files, "read_factors", read)
    factors = {name: torch.ones_like(weight, device="cpu") for name, weight in factors_of(dit).items()}
    write_factors(tmp_path, dit, factors, "", torch.float32)
    assert live_ones == [0, 0, 0, 0] and made


def factors_of(dit: DiTConfig) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in dit_skeleton(dit).state_dict().items() if is_lora(name)}
