"""LoRA files of a live run, in RUN/lora/step-N/: the factors of each checkpoint as `heddle export --lora-only` writes
them.

A Ray task makes them beside the run, at low priority, from a checkpoint that is whole: no step and no checkpoint waits
for it. It runs on the node of the run's controller, which has read the model's folder there. The folder of a
checkpoint appears when all files in it are there, and stays when the checkpoint is deleted. What goes wrong is an
event, said once until the reason is another one, and never ends the run. Files that are not whole lie in RUN/.lora/,
and so do links to the checkpoints that wait: ComfyUI lists whatever it finds in RUN/lora/, hidden folders too.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.ray_calls import cancel, get, node_id, remote_of, wait
from actors.records.events import LoraFilesFailed, LoraFilesMade, RunEvent
from actors.refs import Ref
from actors.state.checkpoint_files import LaterFormat, is_complete, root_of, step_folder, step_folders, step_of
from app.sampling.rounds import held_checkpoint
from app.settings.config import RunConfig
from app.settings.errors import is_ours, one_line
from app.settings.run_folder import LORA, LORA_SCRATCH, LORA_STOPPED
from ops.counted import counted

log = logging.getLogger(__name__)

FINISH_S = 600.0  # the last ones may take this long after the run's last step
_TASK_S = 3600.0  # a task that takes longer hangs: so long is waited for a checkpoint to be written, too
_AT_ONCE = 4  # checkpoints of one task, of those that are missing at a resume
_TRIES = 3  # of a checkpoint whose task's process or node was lost
_NICE = 15
_LOOK_S = 0.5
_ENDS_S = 2.0  # the process of a cancelled task may take so long to be gone
_HELD_AT_ONCE = 2  # checkpoints that wait and whose files stay for that: each takes the disk space of one that is kept
_BESIDE = (".made-", ".before-")  # in RUN/lora, where that is a link to another file system
_HELD = re.compile(rf"{re.escape(LORA_SCRATCH)}/checkpoint-(\d+)-\d+")


@dataclass(kw_only=True, slots=True)
class LoraFilesReport:
    """What a task answers, by step."""

    made: dict[int, tuple[str, ...]] = field(default_factory=dict)  # files, relative to the run's folder
    failed: dict[int, str] = field(default_factory=dict)  # why


@dataclass(kw_only=True, slots=True)
class _Due:
    """A checkpoint whose files are to be made."""

    since: float  # monotonic seconds
    held: Path | None = None  # links to its files, which stay when the run deletes it
    losses: int = 0  # of its task


class LiveLora:
    """Makes the files of each checkpoint, one task at a time and the oldest first. Nothing of a run that trains no
    factors, or with `checkpoint.lora_files: off`.

    lora = LiveLora(config, run_dir); lora.open()      # also those that are missing of checkpoints that are there
    lora.on_checkpoint(step)                           # it is whole
    lora.heard()                                       # events, asked for again and again; never waits
    lora.finish(FINISH_S)                              # the run has ended
    """

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._run_dir, self._dtype = run_dir, config.checkpoint.lora_files
        self._scratch = run_dir / LORA_SCRATCH
        self._is_on = bool(config.model.dit.lora_rank) and self._dtype != "off"
        self._due: dict[int, _Due] = {}  # those that wait, by step
        self._asked: dict[int, _Due] = {}  # those of the running task
        self._running: Ref[LoraFilesReport] | None = None
        self._began = 0.0
        self._number = 0  # of the links to a checkpoint: one that is written again must not take those of a task
        self._has_let_go = False
        self._told = ""  # why the newest failed

    def open(self) -> list[RunEvent]:
        """The run begins or goes on, and no other process writes in its folder. Returns an event where no files will
        come."""
        if not self._is_on:
            return []
        self._clear()  # of a run that was killed
        try:
            there = {step_of(folder): folder for folder in step_folders(root_of(self._run_dir))}
            lacking = [step for step in there if not _folder_of(self._run_dir, step).is_dir()]
        except OSError as error:  # a folder that may not be read
            self._is_on = False
            why = (
                f"{error.strerror or error}: {error.filename or self._run_dir}. Have it readable; a resume tries again"
            )
            return [LoraFilesFailed(step=-1, why=why)]
        missing = []
        for step in lacking:
            with suppress(OSError, LaterFormat):  # one that is not read now takes no files from the others
                if is_complete(there[step]):
                    missing.append(step)
        self._due = {step: _Due(since=time.monotonic()) for step in missing}
        for step in sorted(missing)[-_HELD_AT_ONCE:]:
            self._hold(step, self._due[step])
        return []

    def on_checkpoint(self, step: int) -> None:
        """The checkpoint of `step` is whole. Files that are there are of another one, before its steps were taken
        again."""
        if not self._is_on:
            return
        if (before := self._due.pop(step, None)) is not None:
            _let_go(before)
        self._due[step] = due = _Due(since=time.monotonic())
        self._hold(step, due)
        held = [one for one in sorted(self._due) if self._due[one].held is not None]
        for late in held[:-_HELD_AT_ONCE]:
            _let_go(self._due[late])
            if not self._has_let_go:
                self._has_let_go = True
                log.warning(
                    "LoRA files come slower than checkpoints: there will be none of those that are deleted first "
                    "(checkpoint.keep_last); the first that waits for its turn is that after %s",
                    counted(late + 1, "step"),
                )

    def heard(self) -> list[RunEvent]:
        """What has become of them since the last call; what is due is begun."""
        return self._hear(0.0)

    def finish(self, limit_s: float, *, resumes: bool = False) -> list[RunEvent]:
        """The run has ended: waits for what is due, at most `limit_s` or until somebody asks for its end, and gives up
        the rest; in silence where a resume is to make it."""
        events, until = self._hear(0.0), time.monotonic() + limit_s
        while self._waits and (left_s := until - time.monotonic()) > 0:
            if not resumes and self._is_stopped():
                resumes = True
                break
            events += self._hear(min(left_s, _LOOK_S))
        if (left := self._waits) and resumes:
            log.info("LoRA files of %s are left to the resume", counted(len(left), "checkpoint"))
        elif left:
            events.append(self._failed(left, f"the run has ended, and they were not ready {limit_s:.0f} s later"))
        self.close()
        return events

    def close(self) -> None:
        """Nothing is waited for, and what is not whole is removed."""
        running, self._running = self._running, None
        self._due.clear()
        self._asked.clear()
        if running is not None:
            try:
                cancel(running)
                wait([running], timeout=_ENDS_S)  # it may write till then
            except Exception as error:  # Ray is gone, and its tasks with it
                log.info("the task that makes LoRA files could not be ended: %s", error)
        if self._is_on:
            self._clear()

    @property
    def _waits(self) -> list[int]:
        return sorted({*self._due, *self._asked})

    def _is_stopped(self) -> bool:
        """The run was asked to end after its last step."""
        return (self._scratch / LORA_STOPPED).exists()

    def _clear(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)
        with suppress(OSError):
            for left in [path for name in _BESIDE for path in (self._run_dir / LORA).glob(f"{name}step-*")]:
                shutil.rmtree(left, ignore_errors=True)

    def _hold(self, step: int, due: _Due) -> None:
        self._number += 1
        checkpoint = step_folder(root_of(self._run_dir), step)
        held = held_checkpoint(checkpoint, self._scratch / f"checkpoint-{step}-{self._number}")
        due.held = None if held == checkpoint else held

    def _begin(self) -> None:
        if self._running is not None or not self._due:
            return
        self._asked = {step: self._due.pop(step) for step in sorted(self._due)[:_AT_ONCE]}
        self._began = time.monotonic()
        checkpoints: dict[int, str] = {}
        for step, due in self._asked.items():
            if due.held is None:
                self._hold(step, due)
            checkpoints[step] = str(due.held or step_folder(root_of(self._run_dir), step))
        here = NodeAffinitySchedulingStrategy(node_id(), soft=False)
        task = remote_of(make, once=True).options(
            num_cpus=0, max_retries=0, name="lora files", scheduling_strategy=here
        )
        self._running = task.remote(str(self._run_dir), checkpoints, self._dtype)

    def _hear(self, timeout_s: float) -> list[RunEvent]:
        self._begin()
        if (running := self._running) is None:
            return []
        done, _ = wait([running], timeout=timeout_s)
        if not done and time.monotonic() - self._began < _TASK_S:
            return []
        self._running = None
        if done:
            events = self._heard_of(running)
        else:
            cancel(running)
            why = f"{self._run_dir / LORA} was not written in {_TASK_S:.0f} s"
            events = [self._failed([step], why) for step in list(self._asked)]
        self._begin()
        return events

    def _heard_of(self, answer: Ref[LoraFilesReport]) -> list[RunEvent]:
        try:
            report = get(answer)
        except ray.exceptions.RayError as error:  # its process or node is gone
            return self._lost(one_line(error))
        events: list[RunEvent] = []
        for step, files in report.made.items():
            due = self._asked.pop(step)
            _let_go(due)
            events.append(LoraFilesMade(step=step, files=files, seconds=round(time.monotonic() - due.since, 3)))
            self._told = ""
        for why in dict.fromkeys(report.failed.values()):
            event = self._failed([step for step, said in report.failed.items() if said == why], why)
            if why != self._told:
                events.append(event)
            else:
                log.info("%s", event.describe())
            self._told = why
        return events

    def _lost(self, why: str) -> list[RunEvent]:
        events: list[RunEvent] = []
        for step, due in list(self._asked.items()):
            due.losses += 1
            if due.losses >= _TRIES:
                events.append(self._failed([step], why))
                continue
            del self._asked[step]
            if step in self._due:  # written again meanwhile
                _let_go(due)
            else:
                self._due[step] = due
        return events

    def _failed(self, steps: Sequence[int], why: str) -> LoraFilesFailed:
        """Let go of checkpoints: of the running task, or else of those that wait. The event says so."""
        for step in steps:
            for some in (self._asked, self._due):
                if step in some:
                    _let_go(some.pop(step))
                    break
        first, *others = steps
        command = f"heddle export --checkpoint {self._run_dir} --after {first + 1} --lora-only --to FOLDER"
        remedy = f"A resume makes them while the checkpoint is there, and so does `{command}`"
        if others:
            remedy = f"A resume makes them while their checkpoints are there; `{command}` makes those of the first"
        return LoraFilesFailed(step=first, others=tuple(others), why=f"{why}. {remedy}")


def _let_go(due: _Due) -> None:
    if due.held is not None:
        shutil.rmtree(due.held, ignore_errors=True)
    due.held = None


def _folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / LORA / f"step-{step}"


def make(run_dir: str, checkpoints: Mapping[int, str], dtype: str) -> LoraFilesReport:
    """Runs in the task: the files of these checkpoints, one after the other. Their folders are by step."""
    os.nice(_NICE)
    report = LoraFilesReport()
    for step, checkpoint in checkpoints.items():
        try:
            report.made[step] = write(Path(run_dir), step, Path(checkpoint), dtype)
        except Exception as error:  # the boundary of a process: the others are made
            if not is_ours(error):
                log.exception("no LoRA files after %s", counted(step + 1, "step"))
            name = "" if is_ours(error) else f"{type(error).__name__}: "
            said = _HELD.sub(r"checkpoints/step-\1", one_line(error))  # the links are gone when it is read
            report.failed[step] = f"{name}{said}".rstrip(".")
    return report


def write(run_dir: Path, step: int, checkpoint: Path, dtype: str) -> tuple[str, ...]:
    """Write the files of the checkpoint of `step`, in place of those that are there; returns their names, from the
    run's folder on.

    Raises what `export` raises, and OSError.
    """
    from app.export.export import export

    target, scratch = _folder_of(run_dir, step), run_dir / LORA_SCRATCH
    target.parent.mkdir(exist_ok=True)
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="made-", ignore_cleanup_errors=True) as beside:
        made = export(checkpoint, Path(beside) / "made", lora_only=True, dtype=dtype).folder
        names = tuple(sorted(file.name for file in made.iterdir()))
        _sync(made)
        try:
            _put(made, target, Path(beside) / "before")
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _copy(made, target)
    return tuple(f"{LORA}/{target.name}/{name}" for name in names)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _put(made: Path, target: Path, before: Path) -> None:
    """Give the folder its name; what had that name before is moved to `before`."""
    with suppress(FileNotFoundError):
        target.rename(before)
    made.rename(target)


def _copy(made: Path, target: Path) -> None:
    """The same where RUN/lora is a link to another file system."""
    new, before = beside = _beside(target)
    try:
        for left in beside:
            shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(made, new)
        _sync(new)
        _put(new, target, before)
    finally:
        for left in beside:
            shutil.rmtree(left, ignore_errors=True)


def _beside(target: Path) -> tuple[Path, Path]:
    """The new folder and the one before, while they are exchanged on another file system."""
    new, before = (target.with_name(f"{name}{target.name}") for name in _BESIDE)
    return new, before
