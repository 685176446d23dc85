"""Samples while a run trains: its prompts, from its checkpoints, made by the workers that train (`actors.run.asides`).

Every prompt is an aside with a name; its file appears when it is made, the contact sheet with the last one. A clip that
takes more memory than the workers have, and those of a model of which they hold one expert of two, are made by a Ray
task of its own instead, which waits for a GPU that no worker holds.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from actors.aside_turns import TurnReport
from actors.plan.spared import from_cache
from actors.plan.types import Module
from actors.records.events import RunEvent, SamplesFailed, SamplesMade
from app.inputs.beside import encoders_of_samples, live_texts
from app.sampling.rounds import CheckpointRound, CheckpointRounds, held_checkpoint
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


class LiveSamples:
    """Wants clips of the first checkpoint at or after each multiple of `sample.every` steps, in `CheckpointRounds`."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._given, self._run_dir = config, run_dir
        self._every = config.sample.every if config.sample.prompts else 0
        self._rounds: CheckpointRounds[LiveClip, np.ndarray] = CheckpointRounds()
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
            self._rounds.put(self._round_of(-1))
        except (ConfigError, OSError) as error:
            return [SamplesFailed(step=-1, why=str(error))]
        return []

    # -- as the controller's source of asides --------------------------------------------------------------------------

    @property
    def expected(self) -> bool:
        return bool(self._every) and not self._config.model.dit.lacks_expert

    @property
    def encoders(self) -> tuple[Module, ...]:
        return encoders_of_samples(self._given)

    def wanted(self) -> list[LiveClip]:
        return self._rounds.wanted()

    def ended(self, report: TurnReport) -> RunEvent | None:
        """A clip is made: its file is written. Returns an event for the last one of a round, or the first that
        fails."""
        if (now := self._rounds.of(report.aside)) is None:
            return None
        if not report.failed:
            try:
                return self._made(now, report.aside, cast("MadeClip", report.made))
            except OSError as error:  # a full disk
                report = replace(report, failed=f"{error.strerror or error}: {self._run_dir / 'samples'}")
        if not report.no_room or now.step < 0:  # of the first weights there is no checkpoint for a task
            if self._rounds.now is now:  # its contact sheet alone may be missing, and the next has begun
                self._rounds.begin_next()
            return SamplesFailed(step=now.step, why=report.failed)
        self._rounds.end()  # the task makes those of the newest checkpoint
        when = "" if self._start_task() else " once the run has ended, as its workers hold all GPUs"
        why = f"by the run's workers: {report.failed} A task of its own makes them{when}"
        return SamplesFailed(step=now.step, why=why)

    def dropped(self) -> Collection[str]:
        """The others of a round of which one has failed."""
        return self._rounds.dropped

    def _made(self, now: CheckpointRound[LiveClip, np.ndarray], clip: str, made: MadeClip) -> RunEvent | None:
        from app.drawing.video import contact_sheet
        from app.sampling.clips import clip_files, record_file

        prompts = self._config.sample.prompts
        name = "first" if now.step < 0 else f"step-{now.step}"
        files, sheet = clip_files(self._run_dir / "samples" / f"{name}.mp4", len(prompts))
        sheet.parent.mkdir(exist_ok=True)
        record_file(sheet).unlink(missing_ok=True)  # see `write_clips`
        write_whole(files[now.works[clip].number], made.mp4)
        now.made[clip] = made.shown
        if not now.is_made:
            return None
        self._rounds.begin_next()
        write_whole(sheet.with_suffix(".json"), json.dumps(list(prompts)))
        shown = [now.made[one] for one in now.works]
        contact_sheet(sheet, shown, prompts, columns=1 if len(prompts) <= 4 else 2)
        names = tuple(str(path.relative_to(self._run_dir)) for path in (*files, sheet))
        return SamplesMade(step=now.step, samples=names, seconds=now.seconds)

    # -- as the recorder's -------------------------------------------------------------------------------------------

    def on_checkpoint(self, step: int, before: int | None = None) -> RunEvent | None:
        """Called after the checkpoint of `step` is complete. Returns an event where no samples will come of it, or of
        an earlier one. `before`: see `CheckpointAsides`."""
        from actors.state.checkpoint_retention import stands_for_multiple

        if not self._every or not stands_for_multiple(step, self._every, before):
            return None
        if self._running is not None and not self._collect(self._running, 0.0):
            return SamplesFailed(step=step, why="the earlier ones are still being made")
        if self._config.model.dit.lacks_expert:
            self._start_task()
            return None
        try:
            late = self._rounds.put(self._round_of(step))
        except (ConfigError, OSError) as error:
            return SamplesFailed(step=step, why=str(error))
        return None if late is None else SamplesFailed(step=late.step, why="the next are due and they have not begun")

    def _round_of(self, step: int) -> CheckpointRound[LiveClip, np.ndarray]:
        """Raises ConfigError and OSError for pictures that cannot be read."""
        from actors.state.checkpoint_files import root_of, step_folder
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
        return CheckpointRound(step=step, held_at=held_at, works={clip.name: clip for clip in clips})

    def close(self) -> None:
        """The run is over: wait for the samples that the task makes."""
        for one in self._rounds.end():
            log.warning(
                "not made: %s after %s; make them with `heddle sample`",
                counted(len(one.works) - len(one.made), "sample"),
                counted(one.step + 1, "step"),
            )
        if self._running is not None and not self._collect(self._running, FINISH_S):
            log.warning("samples are not ready after %.0f s; make them with `heddle sample`", FINISH_S)

    @cached_property
    def _config(self) -> RunConfig:
        """The run's config, its model resolved."""
        from ops.models.folders import resolve

        return replace(self._given, model=resolve(self._given.model)[0])

    @cached_property
    def _texts(self) -> KeptTexts | None:
        """The texts of prompts, for a run that takes its texts from a cache."""
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
