"""The loss of held-out clips while a run trains: at its checkpoints, by the workers that train (`actors.run.asides`).

The clips of a checkpoint are dealt out in as many parts as there may be workers. What a worker does not finish, because
it dies or leaves, begins again on another one. The mean over all clips and noise levels is one event.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, cast

from actors.messages import TurnReport
from actors.records.events import HeldOutFailed, HeldOutMeasured, RunEvent
from app.sampling.live import held_checkpoint
from app.settings.config import RunConfig
from app.validation.clips import HeldOutClip, held_out_clips
from data.errors import DataError, DataIOError
from ops.counted import counted

if TYPE_CHECKING:
    from app.validation.work import ClipLoss, ClipLosses, HeldOutWork
    from ops.geometry import Geometry

log = logging.getLogger(__name__)

RANGES = 4  # of the noise level, equally wide, for each of which a mean is reported


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    """The clips of one checkpoint on their way."""

    step: int
    began: float
    left: set[str]  # names of the works that are not done
    clips: int
    losses: list[ClipLoss] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)  # clips, by work


class LiveHeldOut:
    """Wants losses at every checkpoint whose step count is a multiple of `validation.every`; one round at a time."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._given, self._run_dir = config, run_dir
        self._every = config.validation.every if config.validation.sources else 0
        self._round: _Round | None = None
        self._wanted: list[HeldOutWork] = []
        self._dropped: set[str] = set()

    def open(self) -> None:
        """Find the clips now: what is wrong with them is said at the start of a run, and does not end it."""
        if not self._every:
            return
        try:
            _ = self._clips
        except (DataError, DataIOError, OSError) as error:
            log.warning("no held-out loss in this run unless that changes: %s", error)

    # -- as the controller's source of asides --------------------------------------------------------------------------

    @property
    def expected(self) -> bool:
        return bool(self._every)

    def wanted(self) -> list[HeldOutWork]:
        found, self._wanted = self._wanted, []
        return found

    def ended(self, report: TurnReport) -> RunEvent | None:
        """Some clips are done. Returns an event for the last ones of a round, or the first that fail."""
        now = self._round
        if now is None or report.aside not in now.left:
            return None
        if report.failed:
            self._dropped = set(now.left)
            self._end_round()
            return HeldOutFailed(step=now.step, why=report.failed)
        done = cast("ClipLosses", report.made)
        now.left.discard(report.aside)
        now.losses.extend(done.losses)
        now.unread.append(done.unread)
        if now.left:
            return None
        self._end_round()
        if not now.losses:
            return HeldOutFailed(step=now.step, why="none of the clips could be decoded")
        unread = sum(now.unread)
        # in one order, whichever worker was first: a mean depends on it in its last bits
        losses = sorted(now.losses, key=lambda one: (one.bucket, one.noise, one.loss))
        return measured(now.step, losses, now.clips - unread, unread, time.monotonic() - now.began)

    def dropped(self) -> Container[str]:
        """The others of a round of which one has failed."""
        return self._dropped

    # -- as the recorder's ---------------------------------------------------------------------------------------------

    def on_checkpoint(self, step: int) -> None:
        """Called after the checkpoint of `step` is complete."""
        if not self._every or (step + 1) % self._every:
            return
        from actors.state.checkpoint_files import step_folder
        from actors.state.checkpoint_writer import root_of
        from app.validation.work import HeldOutWork

        if self._round is not None:
            log.warning(
                "no held-out loss after %s: that after %s is still being computed",
                counted(step + 1, "step"),
                counted(self._round.step + 1, "step"),
            )
            return
        try:
            clips = self._clips
        except (DataError, DataIOError, OSError) as error:
            log.warning("no held-out loss after %s: %s", counted(step + 1, "step"), error)
            return
        folder = held_checkpoint(step_folder(root_of(self._run_dir), step), self._held_at)
        config = self._config
        parts = min(config.workers.max, len(clips))
        self._wanted = [
            HeldOutWork(
                folder=str(folder.resolve()),
                step=step,
                number=number,
                train=config.train,
                draws=config.validation.draws,
                timeout_s=config.data.engine.clip_timeout_s,
                clips=tuple(clips[number::parts]),
            )
            for number in range(parts)
        ]
        names = {work.name for work in self._wanted}
        self._round = _Round(step=step, began=time.monotonic(), left=names, clips=len(clips))

    def close(self) -> None:
        """The run is over."""
        if self._round is not None:
            log.warning("the held-out loss after %s was not computed", counted(self._round.step + 1, "step"))
            self._end_round()

    @property
    def _held_at(self) -> Path:
        return self._run_dir / ".held_out"

    def _end_round(self) -> None:
        self._round = None
        self._wanted = []
        shutil.rmtree(self._held_at, ignore_errors=True)

    @cached_property
    def _resolved(self) -> tuple[RunConfig, Geometry]:
        from ops.models.folders import resolve

        model, geometry = resolve(self._given.model)
        return replace(self._given, model=model), geometry

    @property
    def _config(self) -> RunConfig:
        return self._resolved[0]

    @cached_property
    def _clips(self) -> list[HeldOutClip]:
        return held_out_clips(*self._resolved)


def measured(step: int, losses: Sequence[ClipLoss], clips: int, unread: int, seconds: float) -> HeldOutMeasured:
    """The means over all noise levels of all clips, of those of each bucket, and of each range of the level."""
    by_bucket: dict[str, list[float]] = defaultdict(list)
    by_noise: dict[str, list[float]] = defaultdict(list)
    for one in losses:
        by_bucket[one.bucket].append(one.loss)
        by_noise[_range_of(one.noise)].append(one.loss)
    return HeldOutMeasured(
        step=step,
        loss=fmean(one.loss for one in losses),
        clips=clips,
        unread=unread,
        by_bucket={name: fmean(some) for name, some in sorted(by_bucket.items())},
        by_noise={name: fmean(some) for name, some in sorted(by_noise.items())},
        seconds=round(seconds, 3),
    )


def _range_of(noise: float) -> str:
    """Such as "0.25-0.5"."""
    number = min(int(noise * RANGES), RANGES - 1)
    return f"{number / RANGES:g}-{(number + 1) / RANGES:g}"
