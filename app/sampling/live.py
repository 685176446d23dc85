"""Samples while a run trains: its prompts, from its checkpoints, made by the workers that train (`actors.run.asides`).

Every prompt is an aside with a name; its file appears when it is made, the contact sheet with the last one. A clip that
takes more memory than the workers have, and those of a model of which they hold one expert of two, are made by a Ray
task of its own instead, which waits for a GPU that no worker holds.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Container
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from actors.aside_turns import TurnReport
from actors.plan.spared import from_cache
from actors.plan.types import Module
from actors.records.events import RunEvent, SamplesFailed, SamplesMade
from app.inputs.beside import encoders_of_samples, live_texts
from app.settings.config import RunConfig
from ops.counted import counted
from ops.typed import ConfigError
from ops.whole_file import write_whole

if TYPE_CHECKING:
    import numpy as np
    from ray import ObjectRef

    from app.sampling.clip_worker import MadeClip
    from app.sampling.kept_texts import KeptTexts
    from app.sampling.live_clip import LiveClip

log = logging.getLogger(__name__)

FINISH_S = 600.0  # the task's last samples may take this long after the run's last step


def make(run_dir: str, device: str) -> list[str]:
    """Runs in the task: the config's prompts from the latest checkpoint, into RUN/samples."""
    from app.sampling.clips import sample_run

    return [str(path) for path in sample_run(Path(run_dir), device=device)]


@dataclass(kw_only=True)
class _Round:
    """The samples of one checkpoint on their way."""

    step: int  # -1: of the first weights
    held_at: Path  # links to the checkpoint's files; of the first weights there is none
    began: float
    clips: list[LiveClip]
    shown: dict[int, np.ndarray] = field(default_factory=dict)


class LiveSamples:
    """Wants clips of the first checkpoint at or after each multiple of `sample.every` steps: one round at a time, while
    at most one waits, that of the newest checkpoint."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._given, self._run_dir = config, run_dir
        self._every = config.sample.every if config.sample.prompts else 0
        self._round: _Round | None = None
        self._next: _Round | None = None
        self._wanted: list[LiveClip] = []
        self._dropped: set[str] = set()
        self._num_rounds = 0
        self._running: ObjectRef[list[str]] | None = None
        for left in run_dir.glob("samples/.checkpoint*"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)

    def open(self, begins: bool) -> list[RunEvent]:
        """Where the run `begins`, clips of the weights that it begins with are wanted first. Returns an event where
        none will come."""
        if not (begins and self._every and self._config.sample.first):
            return []
        if self._config.model.dit.lacks_expert:
            why = "the run trains one of two experts, and a task of its own makes samples from checkpoints alone"
            return [SamplesFailed(step=-1, why=why)]
        try:
            self._next = self._round_of(-1)
        except (ConfigError, OSError) as error:
            return [SamplesFailed(step=-1, why=str(error))]
        self._begin_next()
        return []

    # -- as the controller's source of asides --------------------------------------------------------------------------

    @property
    def expected(self) -> bool:
        return bool(self._every) and not self._config.model.dit.lacks_expert

    @property
    def encoders(self) -> tuple[Module, ...]:
        return encoders_of_samples(self._given)

    def wanted(self) -> list[LiveClip]:
        found, self._wanted = self._wanted, []
        if found and self._round is not None and self._round.step < 0:
            self._round.began = time.monotonic()  # no checkpoint was awaited; Ray and the workers were starting
        return found

    def ended(self, report: TurnReport) -> RunEvent | None:
        """A clip is made: its file is written. Returns an event for the last one of a round, or the first that
        fails."""
        now = self._round
        clip = next((one for one in now.clips if one.name == report.aside), None) if now else None
        if now is None or clip is None:
            return None
        if not report.failed:
            try:
                return self._made(now, clip, cast("MadeClip", report.made))
            except OSError as error:  # a full disk
                report = replace(report, failed=f"{error.strerror or error}: {self._run_dir / 'samples'}")
        self._dropped = {one.name for one in now.clips}
        if not report.no_room or now.step < 0:  # of the first weights there is no checkpoint for a task
            if self._round is now:  # its contact sheet alone may be missing, and the next has begun
                self._begin_next()
            return SamplesFailed(step=now.step, why=report.failed)
        self._let_all_go()  # the task makes those of the newest checkpoint
        when = "" if self._start_task() else " once the run has ended, as its workers hold all GPUs"
        why = f"by the run's workers: {report.failed} A task of its own makes them{when}"
        return SamplesFailed(step=now.step, why=why)

    def dropped(self) -> Container[str]:
        """The others of a round of which one has failed."""
        return self._dropped

    def _made(self, now: _Round, clip: LiveClip, made: MadeClip) -> RunEvent | None:
        from app.drawing.video import contact_sheet
        from app.sampling.clips import clip_files, record_file

        prompts = self._config.sample.prompts
        name = "first" if now.step < 0 else f"step-{now.step}"
        files, sheet = clip_files(self._run_dir / "samples" / f"{name}.mp4", len(prompts))
        sheet.parent.mkdir(exist_ok=True)
        record_file(sheet).unlink(missing_ok=True)  # see `write_clips`
        write_whole(files[clip.number], made.mp4)
        now.shown[clip.number] = made.shown
        if len(now.shown) < len(prompts):
            return None
        self._begin_next()
        write_whole(sheet.with_suffix(".json"), json.dumps(list(prompts)))
        shown = [now.shown[index] for index in range(len(prompts))]
        contact_sheet(sheet, shown, prompts, columns=1 if len(prompts) <= 4 else 2)
        names = tuple(str(path.relative_to(self._run_dir)) for path in (*files, sheet))
        return SamplesMade(step=now.step, samples=names, seconds=round(time.monotonic() - now.began, 3))

    # -- as the recorder's -------------------------------------------------------------------------------------------

    def on_checkpoint(self, step: int, before: int | None = None) -> RunEvent | None:
        """Called after the checkpoint of `step` is complete. Returns an event where no samples will come of it, or of
        an earlier one. `before`: see `CheckpointAsides`."""
        from actors.state.checkpoint_files import stands_for_multiple

        if not self._every or not stands_for_multiple(step, self._every, before):
            return None
        if self._running is not None and not self._collect(self._running, 0.0):
            return SamplesFailed(step=step, why="the earlier ones are still being made")
        if self._config.model.dit.lacks_expert:
            self._start_task()
            return None
        try:
            due = self._round_of(step)
        except (ConfigError, OSError) as error:
            return SamplesFailed(step=step, why=str(error))
        if (late := self._next) is not None:
            self._let_go(late)
        self._next = due
        if self._round is None:
            self._begin_next()
        return None if late is None else SamplesFailed(step=late.step, why="the next are due and they have not begun")

    def _round_of(self, step: int) -> _Round:
        """Raises ConfigError and OSError for pictures that cannot be read."""
        from actors.state.checkpoint_files import step_folder
        from actors.state.checkpoint_writer import root_of
        from app.sampling.live_clip import LiveClip

        first, folder, self._num_rounds = self._first, "", self._num_rounds + 1
        held_at = self._run_dir / "samples" / f".checkpoint-{step}-{self._num_rounds}"
        if step >= 0:
            folder = str(held_checkpoint(step_folder(root_of(self._run_dir), step), held_at).resolve())
        clips = [
            LiveClip(
                folder=folder,
                step=step,
                round=self._num_rounds,
                number=number,
                config=self._config,
                first=tuple(picture for picture in first[number : number + 1] if picture is not None),
                texts=self._texts,
            )
            for number in range(len(self._config.sample.prompts))
        ]
        return _Round(step=step, held_at=held_at, began=time.monotonic(), clips=clips)

    def close(self) -> None:
        """The run is over: wait for the samples that the task makes."""
        for one in (self._round, self._next):
            if one is not None:
                left = len(one.clips) - len(one.shown)
                log.warning(
                    "not made: %s after %s; make them with `heddle sample`",
                    counted(left, "sample"),
                    counted(one.step + 1, "step"),
                )
        self._let_all_go()
        if self._running is not None and not self._collect(self._running, FINISH_S):
            log.warning("samples are not ready after %.0f s; make them with `heddle sample`", FINISH_S)

    def _begin_next(self) -> None:
        if self._round is not None:
            self._let_go(self._round)
        self._round, self._next = self._next, None
        self._wanted = list(self._round.clips) if self._round else []

    def _let_all_go(self) -> None:
        for one in (self._round, self._next):
            if one is not None:
                self._let_go(one)
        self._round, self._next, self._wanted = None, None, []

    def _let_go(self, ended: _Round) -> None:
        shutil.rmtree(ended.held_at, ignore_errors=True)

    @cached_property
    def _config(self) -> RunConfig:
        """The run's, its model resolved."""
        from ops.models.folders import resolve

        return replace(self._given, model=resolve(self._given.model)[0])

    @cached_property
    def _texts(self) -> KeptTexts | None:
        """Those of a run that takes its texts from a cache."""
        from actors.pool.workers import uses_gpu
        from app.inputs.items import cache_of
        from app.sampling.kept_texts import kept_texts

        if "text" not in from_cache(self._given.data.cache):
            return None
        cuda = uses_gpu(self._given.workers)
        dtype = self._config.model.text.dtype_on("cuda" if cuda else "cpu")
        return kept_texts(cache_of(self._config, self._given.data, cuda=cuda), live_texts(self._given), dtype)

    @cached_property
    def _first(self) -> list[np.ndarray | None]:
        from app.sampling.clips import ClipSettings, first_frames

        sample = self._config.sample
        return first_frames(self._config, sample.prompts, ClipSettings.of(self._config))

    # -- the task ----------------------------------------------------------------------------------------------------

    def note_what_waits(self) -> None:
        """Says at the start of a run when its samples wait for its end."""
        from actors.pool.workers import uses_gpu
        from actors.ray_calls import resources

        if not (self._every and self._config.model.dit.lacks_expert and uses_gpu(self._config.workers)):
            return
        gpus, workers = resources(free=False).get("GPU", 0.0), self._config.workers.max
        if gpus <= workers:
            log.warning(
                "samples of this run are made when it has ended: it trains one of two experts, so they take a GPU "
                "beside its up to %d workers, and the cluster has %g; add a GPU, lower workers.max, or train both "
                "(model.dit.expert: both)",
                workers,
                gpus,
            )

    def _start_task(self) -> bool:
        """Where the workers use GPUs it asks for one, too: it waits for one that no worker holds. Returns whether one
        is free now."""
        import ray

        from actors.pool.own_gpu import own_gpu
        from actors.pool.workers import uses_gpu
        from actors.ray_calls import resources

        gpu = uses_gpu(self._config.workers)
        free = not gpu or resources(free=True).get("GPU", 0.0) >= 1
        task = ray.remote(make).options(num_cpus=0.1, max_retries=0, **own_gpu(1 if gpu else 0))
        # without a GPU of its own it would still see those of the node
        self._running = task.remote(str(self._run_dir), "cuda" if gpu else "cpu")
        return free

    def _collect(self, running: ObjectRef[list[str]], timeout_s: float) -> bool:
        """Whether the running task has ended; its failure is logged, it never ends the run."""
        import ray

        ready, _ = ray.wait([running], timeout=timeout_s)
        if not ready:
            return False
        try:
            files: list[str] = ray.get(running)
            log.info("samples: %s", ", ".join(files))
        except ray.exceptions.RayError as error:
            log.warning("sampling failed: %s", error)
        self._running = None
        return True


def held_checkpoint(checkpoint: Path, at: Path) -> Path:
    """Links to the files of a checkpoint, which stay when the run removes it before the last aside has read it; the
    checkpoint itself where the file system has no links."""
    shutil.rmtree(at, ignore_errors=True)  # of a run that ended in the middle
    try:
        files = list(checkpoint.iterdir())
        at.mkdir(parents=True)
        for file in files:
            os.link(file, at / file.name)
    except OSError as error:
        log.info("%s is read where it is: %s", checkpoint.name, error)
        shutil.rmtree(at, ignore_errors=True)
        return checkpoint
    return at
