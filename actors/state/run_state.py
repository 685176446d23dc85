"""The training state of a run outside its workers: shards in keepers, checkpoints on disk, and which of it is newest.

A generation starts from `choose`, a controller from `first`, and a run that ends early leaves its last committed step
on disk (`keep_last`) and nothing in the cluster's memory (`let_go`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import ray

from actors.config import RuntimeConfig
from actors.messages import Origin, Snapshot
from actors.outcome import EXIT_RESUMABLE, Outcome, StopRun
from actors.ray_calls import GONE
from actors.records.events import (
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointPassedOver,
    KeeperLost,
    KeeperSlow,
    KeepersRepaired,
    KeepersSilent,
    MemoryShort,
    RunEvent,
    SnapshotsFailed,
    SnapshotsForecast,
    StepsLost,
)
from actors.state import checkpoint_files as checkpoint
from actors.state import checkpoint_writer as checkpoints
from actors.state import keeper
from actors.state.checkpoint_files import load, trained_parameters
from actors.state.commit_log import CommitLog
from actors.state.keeper_fleet import Keepers
from actors.state.snapshots import origin_of
from actors.step import CollectedStep, DataLost, GenerationLost, Seat
from data.errors import DataError, DataIOError
from ops.models.config import ModelConfig

log = logging.getLogger(__name__)

_POSITION_S = 30.0  # the data's position may be an older one: nobody waits long for it
_EXPORT_S = 600.0  # a worker between two steps copies its shard; only one that is gone has nothing to give
_ROOM_S = 5.0  # a forecast is no reason to wait for a busy keeper
_REPAIR_S = 60.0  # steps that are under way come first
_REPAIR_PAUSE_S = 0.5  # after the first repair of the keepers; doubles with every further one that did not help
_LONGEST_PAUSE_S = 30.0
_MAX_REPAIRS = 8  # without a commit; over a minute, in which Ray has noticed a lost node


class RunState:
    """Where a run's training state is held. `tell` gets what belongs into events.jsonl."""

    _silent: tuple[str, ...] = ()  # keepers that live, have not answered, and may hold a newer state than was found
    _repairs = 0  # of the keepers since the last commit

    def __init__(
        self,
        run: str,
        config: RuntimeConfig,
        model: ModelConfig,
        commits: CommitLog,
        token: Callable[[int], Mapping[str, Any]],
        sealed: Callable[[Path, int], None],
        tell: Callable[[RunEvent], None],
    ) -> None:
        """`token(step)` is the data position before it, or raises DataLost; `sealed(folder, step)` is told of whole
        checkpoints."""
        self._config, self._model, self._commits, self._token, self._tell = config, model, commits, token, tell
        self._run_dir = Path(config.run_dir)
        self.keepers = Keepers(
            run,
            config.snapshot,
            lost=lambda name: tell(KeeperLost(keeper=name)),
            slow=lambda name, waited: tell(KeeperSlow(keeper=name, seconds=round(waited, 1))),
            needs=lambda: self._bytes_kept(sum(math.prod(p["shape"]) for p in self._parameters), keepers=1),
        )
        last = config.train.steps - 1
        self.writer = checkpoints.Writer(self._run_dir, config.checkpoint, last, self._meta, sealed, self._not_written)
        # Keepers refuse generations that they have left behind, also when the monitor has forgotten them.
        self.standing = self.keepers.standing(config.snapshot.patience_s)
        self._silent = self.keepers.silent
        self.survivors: list[Snapshot] = []  # held by workers that have left a failed generation
        self._first: Origin | None = None  # found by `first`, used by no generation yet
        self._generation = 0  # the newest that has been given a state
        self._forecast_told = False
        self._verdicts: dict[tuple[Path, int], str] = {}  # of checkpoints that were read: what is wrong with each
        self._repaired_at = 0.0  # monotonic seconds

    def first(self) -> Origin | None:
        """What this controller continues from; None: a new run."""
        newest = self.standing.committed
        if not self._silent:
            self._first = self._find([], newest)
            self._tell_torn()
        self._refuse_to_guess(self._first.step if self._first is not None else -1)
        return self._first

    def _find(self, exports: Sequence[Snapshot], newest: int) -> Origin | None:
        patience = self._config.snapshot.patience_s
        found = origin_of(self.keepers, exports, self.on_disk(), patience, newest)
        while found is not None and found.checkpoint is not None and self._is_damaged(Path(found.checkpoint)):
            found = origin_of(self.keepers, exports, self.on_disk(), patience, newest)
        self._silent = self.keepers.silent if (found.step if found is not None else -1) < newest else ()
        return found

    def _refuse_to_guess(self, step: int) -> None:
        """Going on from `step` would drop what a keeper holds that lives and has not answered: a person decides."""
        if not self._silent:
            return
        names, patience = ", ".join(self._silent), self._config.snapshot.patience_s
        where = f"step {step}" if step >= 0 else "the start"
        reason = (
            f"{names} may hold the newest state and has not answered for {patience:g} s (snapshot.patience_s). Nothing "
            f"was dropped. Continue with --resume when it answers; if it is ended first, the run continues from {where}"
        )
        self._tell(KeepersSilent(silent=tuple(self._silent), seconds=patience))
        raise StopRun(Outcome(code=EXIT_RESUMABLE, reason=reason, last_step=self._commits.committed))

    def choose(self, generation: int, world: Sequence[Seat]) -> Origin | None:
        """The newest whole state for a generation; `world` are workers of a cleanly ended one, which still hold it."""
        self._generation = generation
        if (first := self._first) is not None:
            self._first = None
            return first
        newest = self._commits.newest
        exports = [*self.survivors, *exports_of(world, newest)]
        origin = self._find(exports, newest)
        step = origin.step if origin is not None else -1
        if step < self._commits.committed:
            self._refuse_to_guess(step)
        self._silent = ()
        if (lost := self._commits.committed - step) > 0:
            where = origin.checkpoint if origin is not None else "the start"
            self._tell(StepsLost(to_step=step, lost_steps=lost))
            log.warning("no snapshot is whole; %d steps are computed again from %s", lost, where)
        self._commits.keep_until(step)
        self.keepers.rollback(step, generation)
        return origin

    def data_token(self) -> Mapping[str, Any] | None:
        """Position and identity of the data at or before the committed step: the keepers', else the checkpoint's."""
        position, committed = self.keepers.standing(_POSITION_S).position, self._commits.committed
        held = position if position is not None and position[0] <= committed else None
        while (found := self.on_disk()) is not None and (held is None or held[0] < found[0] <= committed):
            if not self._is_damaged(found[1]):
                return load(found[1])[0].get("data_token")
        return held[1] if held is not None else None

    def on_disk(self) -> tuple[int, Path] | None:
        """The newest complete checkpoint that has not been found damaged."""
        folders = checkpoint.complete(checkpoints.root_of(self._run_dir))
        whole = [folder for folder in folders if not self._verdicts.get(_stamp(folder))]
        return (checkpoints.step_of(whole[-1]), whole[-1]) if whole else None

    def _is_damaged(self, folder: Path) -> bool:
        """Reads it, once per checkpoint."""
        if (stamp := _stamp(folder)) not in self._verdicts:
            self._verdicts[stamp] = why = checkpoint.damage(folder)
            if why:
                log.warning("%s is passed over: %s", folder, why)
                self._tell(CheckpointDamaged(folder=folder.name, why=why))
        return bool(self._verdicts[stamp])

    def _tell_torn(self) -> None:
        """A person who looks for the newest checkpoint is told why another is used."""
        on_disk = self.on_disk()
        for folder in checkpoint.incomplete(checkpoints.root_of(self._run_dir), on_disk[0] if on_disk else -1):
            log.warning("%s is passed over: it is not complete", folder)
            self._tell(CheckpointPassedOver(folder=folder.name, why="it is not complete"))

    # -- during the run ------------------------------------------------------------------------------------------------

    def is_exported(self, step: int) -> bool:
        """Whether workers copy their state after this step, for keepers or for a checkpoint."""
        snapshot = self._config.snapshot
        return (snapshot.enabled and step % snapshot.every == 0) or self.writer.due(step)

    def finished(self, done: CollectedStep) -> None:
        """All workers have finished a step; it is committed when its shards are held."""
        if not self._forecast_told:
            self._forecast_told = True
            self._forecast(done.snapshots)
        self._commits.add(done)
        if done.snapshots and self.writer.due(done.running.step):
            self.writer.save(done.running.step, done.snapshots)

    def committed(self, done: CollectedStep, position: Mapping[str, Any] | None) -> None:
        """The step is safe: older ones may go. `position` is the data's behind it, with its counts: kept with the
        state, so that whoever goes on from that state has them exactly."""
        if done.running.generation == self._generation:  # it holds a newer state: theirs may leave the memory
            self.survivors = []
        self._repairs = 0
        if done.snapshots:  # with snapshot.every > 1 the last one that was taken must stay
            self.keepers.commit(done.running.step, position)
        self.writer.poll()

    def repair_keepers(self, world: Sequence[Seat], quiet: bool) -> None:
        """A keeper is gone or does not take its shard: start another where one is gone, and give them the newest shards
        of the workers they serve. Raises GenerationLost when it is a worker that is gone, and StopRun when repairs do
        not help; not before the workers are `quiet`, since then their own state goes to disk.

        On a lost node that Ray has not noticed yet, every new one is lost at once: such tries keep a distance, which
        grows.
        """
        pause = min(_LONGEST_PAUSE_S, _REPAIR_PAUSE_S * 2.0 ** max(0, self._repairs - 1))
        if (left := self._repaired_at + pause - time.monotonic()) > 0:
            time.sleep(min(_REPAIR_PAUSE_S, left))
            if left > _REPAIR_PAUSE_S:
                return  # the controller looks around meanwhile
        if self._repairs >= _MAX_REPAIRS:
            if quiet:
                self._give_up_snapshots()
            time.sleep(_REPAIR_PAUSE_S)
            return
        self._repairs += 1
        self._repaired_at = time.monotonic()
        why = self._commits.failure
        if self._repairs > 1:  # one is everyday
            log.warning("the keepers are repaired for the %d. time since the last commit: %s", self._repairs, why)
            self._tell(KeepersRepaired(repairs=self._repairs, why=why))
        self.keepers.repair([seat.node for seat in world], self._give_up_s())
        asked = {seat.handle.set_keepers.remote(self.keepers.of(rank)): seat for rank, seat in enumerate(world)}
        held: list[Snapshot] = []
        while asked:
            done, _ = ray.wait(list(asked), timeout=_REPAIR_S)
            if not done:
                log.warning("%s could not be given new keepers yet", ", ".join(seat.name for seat in asked.values()))
                return
            seat = asked.pop(done[0])
            try:
                held += filter(None, [ray.get(done[0])])
            except GONE:
                raise GenerationLost([seat.name], {}) from None
            except ray.exceptions.RayError as error:
                log.warning("%s could not be given new keepers yet: %s", seat.name, error)
                return
        self._commits.replace_acknowledgements(held)

    def _give_up_s(self) -> float:
        """How long a keeper must have been silent to be replaced; a shard that waits for too long has shown it."""
        return 0.0 if self._commits.overdue else self._config.snapshot.patience_s

    def _give_up_snapshots(self) -> None:
        why = self._commits.failure
        self._tell(SnapshotsFailed(repairs=self._repairs, why=why))
        reason = (
            f"the keepers did not take the state of step {self._commits.committed + 1} in {self._repairs} attempts: "
            f"{why}. What the workers hold is written as a checkpoint. Add memory or nodes, lower snapshot.copies, or "
            f"set snapshot.enabled: false, and continue with --resume"
        )
        raise StopRun(Outcome(code=1, reason=reason, last_step=self._commits.newest))

    # -- the end -------------------------------------------------------------------------------------------------------

    def keep_last(self, world: Sequence[Seat]) -> None:
        """The run ends before its last step: the last one whose state is whole goes from memory to disk. `world` are
        workers that wait between two steps.

        Steps that are finished but not committed, since keepers were late or failed, are committed by being on disk.
        """
        if self._silent:
            return
        newest = self._commits.newest
        found = self._find(self.survivors, newest)
        if world and (found.step if found is not None else -1) < newest:  # they may be slow to answer
            found = self._find([*self.survivors, *exports_of(world, newest)], newest)
        if found is not None and found.checkpoint is None:
            self.writer.save_origin(found)
        self.writer.wait()
        if found is not None and self._commits.committed < found.step <= (self.on_disk() or (-1,))[0]:
            self._commits.keep_until(found.step)

    def let_go(self) -> bool:
        """Free the cluster's memory. False when a step is held nowhere else: then the keepers stay."""
        if self._silent:
            log.error("the keepers stay: %s may hold the newest state", ", ".join(self._silent))
            return False
        on_disk = self.on_disk()
        if (on_disk[0] if on_disk is not None else -1) < self._commits.committed:
            log.error(
                "step %d is not on disk; the keepers stay, and --resume on this cluster continues from them",
                self._commits.committed,
            )
            return False
        self.keepers.close()
        return True

    # -- parts ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _parameters(self) -> list[dict[str, Any]]:
        """Names and shapes of what is trained. Needs no worker and no memory."""
        return trained_parameters(self._model)

    def _meta(self, step: int) -> dict[str, Any]:
        """What a checkpoint says about itself."""
        return {
            "step": step,
            "parameters": self._parameters,
            "config": self._config.config_yaml,
            "seed": self._config.train.seed,
            "data_token": self._position_after(step),
        }

    def _position_after(self, step: int) -> Mapping[str, Any] | None:
        """The feeder's word, or without one the newest position that is known, from which the next feeder walks on."""
        try:
            return self._token(step + 1)
        except (DataLost, DataError, DataIOError, ray.exceptions.RayError) as error:  # it may be what ends the run
            log.info("step %d is written with an earlier position of the data: %s", step, error)
            return self.data_token()

    def _not_written(self, step: int, why: str) -> None:
        self._tell(CheckpointFailed(step=step, why=why))

    def _bytes_kept(self, total: int, keepers: int) -> int:
        """What each of so many keepers holds of a state of `total` elements."""
        ema, copies = self._config.train.optimizer.ema_decay > 0, self._config.snapshot.copies
        return keeper.forecast_bytes(total, ema=ema, copies=copies, num_keepers=keepers)

    def _forecast(self, snapshots: Sequence[Snapshot]) -> None:
        """Say what snapshots take of the nodes' memory, and where there is too little of it."""
        total, keepers = max((s.total for s in snapshots), default=0), len(self.keepers.in_use())
        if not (total and keepers):
            return
        held = self._bytes_kept(total, keepers)
        self._tell(SnapshotsForecast(keepers=keepers, mib_per_keeper=round(held / 2**20, 1)))
        for host, room in self.keepers.rooms(_ROOM_S):
            if room < held:
                log.warning(
                    "snapshots take %.1f GiB on %s, which can spare %.1f GiB: add nodes or memory, lower "
                    "snapshot.copies, or set snapshot.enabled: false",
                    held / 2**30,
                    host,
                    room / 2**30,
                )
                self._tell(MemoryShort(host=host, mib_needed=held >> 20, mib_room=room >> 20))


def exports_of(world: Sequence[Seat], step: int) -> list[Snapshot]:
    """The state after `step` as these workers hold it between two steps; they leave their groups."""
    answers: list[Snapshot] = []
    asked = [(seat.name, seat.handle.hand_over.remote(step)) for seat in world]
    until = time.monotonic() + _EXPORT_S  # for all of them together
    for name, reference in asked:
        try:
            answers.extend(ray.get(reference, timeout=max(0.0, until - time.monotonic())).exports)
        except ray.exceptions.RayError as error:
            log.warning("%s did not hand over its state: %s", name, error)
    return answers


def _stamp(folder: Path) -> tuple[Path, int]:
    """A checkpoint as it was written: one that is written again has another."""
    try:
        return folder, (folder / checkpoint.COMPLETE).stat().st_mtime_ns
    except OSError:
        return folder, 0
