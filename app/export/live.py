"""LoRA files of a live run, in RUN/lora/step-N/: the factors of each checkpoint as `heddle export --lora-only` writes
them.

A Ray task makes them beside the run, at low priority, from a checkpoint that is whole: no step and no checkpoint waits
for it. The folder of a checkpoint appears when all files in it are there, and stays when the checkpoint is deleted.
What goes wrong is an event and never ends the run.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import ray

from actors.ray_calls import cancel, get, task_of_its_own, wait
from actors.records.events import LoraFilesFailed, LoraFilesMade, RunEvent
from actors.refs import Ref
from actors.state.checkpoint_files import complete, step_folder
from actors.state.checkpoint_writer import root_of, step_of
from app.sampling.live import held_checkpoint
from app.settings.config import RunConfig
from app.settings.errors import is_ours, one_line
from app.settings.run_folder import LORA
from ops.counted import counted

log = logging.getLogger(__name__)

FINISH_S = 600.0  # the last ones may take this long after the run's last step
_TASK_S = 3600.0  # a task that takes longer hangs: so long is waited for a checkpoint to be written, too
_AT_ONCE = 4  # checkpoints of one task, of those that are missing at a resume
_TRIES = 3  # of a checkpoint whose task's process or node was lost
_NICE = 15
_LOOK_S = 0.5
_HELD = re.compile(rf"{LORA}/\.checkpoint-(\d+)")


@dataclass(kw_only=True, slots=True)
class LoraFilesReport:
    """What a task answers, by step."""

    made: dict[int, tuple[str, ...]] = field(default_factory=dict)  # files, relative to the run's folder
    failed: dict[int, str] = field(default_factory=dict)  # why


@dataclass(kw_only=True, slots=True)
class _Due:
    """A checkpoint whose files are to be made."""

    since: float  # monotonic seconds
    checkpoint: Path  # links to its files, which stay when the run deletes it
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
        self._is_on = bool(config.model.dit.lora_rank) and self._dtype != "off"
        self._due: dict[int, _Due] = {}  # by step
        self._running: Ref[LoraFilesReport] | None = None
        self._asked: tuple[int, ...] = ()  # steps of the running task
        self._began = 0.0

    def open(self) -> None:
        """The run begins or goes on, and no other process writes in its folder."""
        if not self._is_on:
            return
        for left in (self._run_dir / LORA).glob(".*"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        there = [step_of(folder) for folder in complete(root_of(self._run_dir))]
        missing = [step for step in there if not _folder_of(self._run_dir, step).is_dir()]
        for step in missing:
            self.on_checkpoint(step)

    def on_checkpoint(self, step: int) -> None:
        """The checkpoint of `step` is whole. Files that are there are of another one, before its steps were taken
        again."""
        if self._is_on:
            held_at = self._run_dir / LORA / f".checkpoint-{step}"
            held = held_checkpoint(step_folder(root_of(self._run_dir), step), held_at)
            self._due[step] = _Due(since=time.monotonic(), checkpoint=held)

    def heard(self) -> list[RunEvent]:
        """What has become of them since the last call; what is due is begun."""
        return self._hear(0.0)

    def finish(self, limit_s: float) -> list[RunEvent]:
        """The run has ended: waits for what is due, at most `limit_s`, and gives up the rest."""
        events, until = self._hear(0.0), time.monotonic() + limit_s
        while self._due and (left_s := until - time.monotonic()) > 0:
            events += self._hear(min(left_s, _LOOK_S))
        why = f"the run has ended, and they were not ready {limit_s:.0f} s later"
        events += [self._failed(step, why) for step in sorted(self._due)]
        self.close()
        return events

    def close(self) -> None:
        """Nothing is waited for."""
        if self._running is not None:
            cancel(self._running)
            self._running = None
        for step in list(self._due):
            self._let_go(step)

    def _begin(self) -> None:
        if self._running is not None or not self._due:
            return
        self._asked, self._began = tuple(sorted(self._due)[:_AT_ONCE]), time.monotonic()
        checkpoints = {step: str(self._due[step].checkpoint) for step in self._asked}
        task = task_of_its_own(make).options(num_cpus=0, max_retries=0, name="lora files")
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
            events = [self._failed(step, why) for step in self._asked]
        self._begin()
        return events

    def _heard_of(self, answer: Ref[LoraFilesReport]) -> list[RunEvent]:
        try:
            report = get(answer)
        except ray.exceptions.RayError as error:  # its process or node is gone
            return self._lost(one_line(error))
        events: list[RunEvent] = []
        for step, files in report.made.items():
            seconds = round(time.monotonic() - self._due[step].since, 3)
            self._let_go(step)
            events.append(LoraFilesMade(step=step, files=files, seconds=seconds))
        return events + [self._failed(step, why) for step, why in report.failed.items()]

    def _lost(self, why: str) -> list[RunEvent]:
        events: list[RunEvent] = []
        for step in self._asked:
            self._due[step].losses += 1
            if self._due[step].losses >= _TRIES:
                events.append(self._failed(step, why))
        return events

    def _failed(self, step: int, why: str) -> LoraFilesFailed:
        self._let_go(step)
        command = f"heddle export --checkpoint {self._run_dir} --after {step + 1} --lora-only --to FOLDER"
        remedy = f"A resume makes them while the checkpoint is there, and so does `{command}`"
        return LoraFilesFailed(step=step, why=f"{why}. {remedy}")

    def _let_go(self, step: int) -> None:
        if (held := self._due.pop(step).checkpoint).parent.name == LORA:
            shutil.rmtree(held, ignore_errors=True)


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

    target = _folder_of(run_dir, step)
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".made-", ignore_cleanup_errors=True) as beside:
        made = export(checkpoint, Path(beside) / "made", lora_only=True, dtype=dtype).folder
        names = tuple(sorted(file.name for file in made.iterdir()))
        for name in names:
            with (made / name).open("rb") as file:
                os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            target.rename(Path(beside) / "before")
        made.rename(target)
    return tuple(f"{LORA}/{target.name}/{name}" for name in names)
