"""The loss of held-out clips while a run trains: at its checkpoints, by the workers that train (`actors.run.asides`).

The clips of a checkpoint are dealt out in as many parts as there may be workers. What a worker does not finish, because
it dies or leaves, begins again on another one. The mean over all clips and noise levels is one event.

A bucket of which a worker has no memory for a clip is left out as a whole, at that checkpoint and at all later ones of
the run, also of a run that goes on: which clips a mean is of changes as seldom as that, and never within a bucket.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, cast

from actors.aside_turns import TurnReport
from actors.plan.spared import from_cache
from actors.plan.types import Module
from actors.records.events import HeldOutFailed, HeldOutMeasured, RunEvent, events_so_far
from app.sampling.rounds import CheckpointRound, CheckpointRounds, held_checkpoint
from app.settings.config import RunConfig
from app.validation.clips import HeldOutClip, held_out_clips, held_out_data
from data.errors import DataError, DataIOError
from ops.counted import by_numbers, counted

if TYPE_CHECKING:
    from actors.feed.item_cache import ItemCache
    from app.validation.work import ClipLosses, HeldOutWork, KeptClips
    from ops.geometry import Geometry

log = logging.getLogger(__name__)

RANGES = 4  # of the noise level, equally wide, for each of which a mean is reported


class LiveHeldOut:
    """Wants losses of the first checkpoint at or after each multiple of `validation.every` steps, and of the weights
    that the run begins with, in `CheckpointRounds`."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._given, self._run_dir, self._held_at = config, run_dir, run_dir / ".held_out"
        self._every = config.validation.every if config.validation.sources else 0
        self._rounds: CheckpointRounds[HeldOutWork, ClipLosses] = CheckpointRounds()
        self._num_rounds = 0
        self._no_room: dict[str, str] = {}  # buckets that are left out -> why

    def open(self, begins: bool) -> list[RunEvent]:
        """Find the clips now: what is wrong with them is known at the start of a run, and does not end it. Where it
        `begins`, with no step yet, the first weights are measured. A round in whose middle the controller or the whole
        run ended begins again. Returns an event for each that does not."""
        from actors.state.checkpoint_files import LaterFormat, is_complete

        left = sorted({int(held.name.split("-")[1]) for held in self._held_at.glob("step-*-*")})
        begins = begins or any(self._held_at.glob("first-*"))
        shutil.rmtree(self._held_at, ignore_errors=True)
        if not self._every:
            return []
        self._no_room = dict.fromkeys(_left_out_before(self._run_dir), "as before")
        try:
            clips = self._measurable()
        except (DataError, DataIOError, OSError, ValueError) as error:
            return [HeldOutFailed(step=-1, why=str(error), ever=True)]
        why = "the run ended before it was measured"
        try:
            if begins and self._given.validation.first:
                self._rounds.put(self._round_of(-1, clips))
            if left and is_complete(self._checkpoint(left[-1])):
                self._rounds.put(self._round_of(left[-1], clips))
                left.pop()
        except OSError as error:  # a full disk, or a checkpoint that may not be read: these are not worth a run's end
            why = f"{error.strerror or error}: {error.filename or self._held_at}"
            left = left or [-1]
        except LaterFormat as error:
            why = str(error)
        return [HeldOutFailed(step=step, why=why) for step in left]

    # -- as the controller's source of asides --------------------------------------------------------------------------

    @property
    def expected(self) -> bool:
        return bool(self._every)

    @property
    def encoders(self) -> tuple[Module, ...]:
        """What the run itself takes from its cache its held-out clips have there, too."""
        return ()

    def wanted(self) -> list[HeldOutWork]:
        return self._rounds.wanted()

    def ended(self, report: TurnReport) -> RunEvent | None:
        """Some clips are done. Returns an event for the last ones of a round, or the first that fail."""
        if (now := self._rounds.of(report.aside)) is None:
            return None
        if not report.failed:
            now.made[report.aside] = cast("ClipLosses", report.made)
            if not now.is_made:
                return None
        self._rounds.begin_next()
        if report.failed:
            return HeldOutFailed(step=now.step, why=report.failed)
        from app.validation.work import ClipLosses

        parts = [now.made[name] for name in now.works]  # in one order: a mean depends on it in its last bits
        done = ClipLosses.together(parts, self._no_room)
        if not done.losses:
            return HeldOutFailed(step=now.step, why=why_none(done))
        self._no_room = dict(done.no_room)
        return measured(now.step, done, self._clips, now.seconds)

    def dropped(self) -> Collection[str]:
        """The others of a round of which one has failed."""
        return self._rounds.dropped

    # -- as the recorder's ---------------------------------------------------------------------------------------------

    def on_checkpoint(self, step: int, before: int | None = None) -> RunEvent | None:
        """Called after the checkpoint of `step` is complete. Returns an event where there will be no loss, of this or
        of an earlier one. `before`: see `CheckpointAsides`."""
        from actors.state.checkpoint_retention import stands_for_multiple

        if not self._every or not stands_for_multiple(step, self._every, before):
            return None
        try:
            late = self._rounds.put(self._round_of(step, self._measurable()))
        except (DataError, DataIOError, OSError, ValueError) as error:
            return HeldOutFailed(step=step, why=str(error))
        return None if late is None else HeldOutFailed(step=late.step, why="the next one is due and it has not begun")

    def close(self) -> None:
        """The run is over, or goes on later: of what is not measured the step is kept, for `open`, and no file."""
        left = self._rounds.end()
        shutil.rmtree(self._held_at, ignore_errors=True)
        for one in left:
            log.warning("not measured yet: the held-out loss after %s", counted(one.step + 1, "step"))
            one.held_at.mkdir(parents=True, exist_ok=True)

    def _round_of(self, step: int, clips: Sequence[HeldOutClip]) -> CheckpointRound[HeldOutWork, ClipLosses]:
        from app.validation.work import HeldOutPart, HeldOutWork

        config, self._num_rounds = self._config, self._num_rounds + 1
        held_at = self._held_at / f"{'first' if step < 0 else f'step-{step}'}-{self._num_rounds}"
        folder = "" if step < 0 else str(held_checkpoint(self._checkpoint(step), held_at).resolve())
        held_at.mkdir(parents=True, exist_ok=True)  # for the controller after this one: not measured yet
        parts = min(config.workers.max, len(clips))
        works = [
            HeldOutWork(
                folder=folder,
                step=step,
                round=self._num_rounds,
                number=number,
                part=HeldOutPart(
                    train=config.train,
                    draws=config.validation.draws,
                    timeout_s=config.data.engine.clip_timeout_s,
                    clips=tuple(clips[number::parts]),
                    kept=self._kept,
                ),
            )
            for number in range(parts)
        ]
        return CheckpointRound(step=step, held_at=held_at, works={work.name: work for work in works})

    def _checkpoint(self, step: int) -> Path:
        from actors.state.checkpoint_files import root_of, step_folder

        return step_folder(root_of(self._run_dir), step)

    @cached_property
    def _resolved(self) -> tuple[RunConfig, Geometry]:
        from ops.models.folders import resolve

        model, geometry = resolve(self._given.model)
        return replace(self._given, model=model), geometry

    @property
    def _config(self) -> RunConfig:
        return self._resolved[0]

    def _measurable(self) -> list[HeldOutClip]:
        """The clips that are not left out. Raises DataError where there are none, and what `held_out_clips` raises."""
        if found := [clip for clip in self._clips if clip.bucket not in self._no_room]:
            return found
        raise DataError(f"the run leaves out clips of {', '.join(self._no_room)} for want of memory, and has no others")

    @cached_property
    def _clips(self) -> list[HeldOutClip]:
        return held_out_clips(*self._resolved, self._cache)

    @cached_property
    def _cache(self) -> ItemCache | None:
        """The run's cache, where it takes its own encode results from that."""
        from actors.pool.workers import uses_gpu
        from app.inputs.items import cache_of

        if not from_cache(self._given.data.cache):
            return None
        return cache_of(self._config, held_out_data(self._config), cuda=uses_gpu(self._config.workers))

    @property
    def _kept(self) -> KeptClips | None:
        from app.validation.work import KeptClips

        if self._cache is None:
            return None
        return KeptClips.over(self._cache, self._clips, from_cache(self._given.data.cache))


def _left_out_before(run_dir: Path) -> list[str]:
    """The buckets that the run has left out so far."""
    try:
        return sorted({bucket for event in events_so_far(run_dir, HeldOutMeasured) for bucket in event.no_room})
    except OSError as error:
        log.warning("held-out clips that were left out before may be measured again: %s", error)
        return []


def why_none(done: ClipLosses) -> str:
    """Why there is no loss at all."""
    if not done.no_room:
        return "none of the clips could be decoded"
    bucket, why = next(iter(done.no_room.items()))
    unread = f"{counted(len(done.unread), 'clip')} could not be decoded, and " if done.unread else ""
    return f"{unread}there is no memory for a clip of {bucket}: {why}"


def measured(step: int, done: ClipLosses, clips: Sequence[HeldOutClip], seconds: float) -> HeldOutMeasured:
    """The means over all noise levels of all clips, of those of each bucket, and of each range of the level. `clips`
    are all of them, left out or not."""
    by_bucket: dict[str, list[float]] = defaultdict(list)
    by_noise: dict[str, list[float]] = defaultdict(list)
    no_room = Counter(clip.bucket for clip in clips if clip.bucket in done.no_room)
    for one in done.losses:
        by_bucket[one.bucket].append(one.loss)
        by_noise[_range_of(one.noise)].append(one.loss)
    return HeldOutMeasured(
        step=step,
        loss=fmean(one.loss for one in done.losses),
        clips=len(clips) - no_room.total() - len(done.unread),
        unread=len(done.unread),
        no_room=dict(sorted(no_room.items(), key=_by_name)),
        by_bucket={name: fmean(some) for name, some in sorted(by_bucket.items(), key=_by_name)},
        by_noise={name: fmean(some) for name, some in sorted(by_noise.items())},
        seconds=round(seconds, 3),
    )


def _by_name(pair: tuple[str, object]) -> tuple[tuple[int, str], ...]:
    return by_numbers(pair[0])


def _range_of(noise: float) -> str:
    """Such as "0.25-0.5"."""
    number = min(int(noise * RANGES), RANGES - 1)
    return f"{number / RANGES:g}-{(number + 1) / RANGES:g}"
