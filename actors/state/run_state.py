"""The training state of a run outside its workers: shards in keepers, checkpoints on disk, and which of it is newest.

A controller starts from `first`, a generation from `recover`. A run that ends early leaves its last committed step on
disk (`keep_last`) and nothing in the cluster's memory (`free_memory`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import ray

from actors.config import RuntimeConfig
from actors.held_state import Origin, Snapshot
from actors.letters import Failures, RelayFinder
from actors.messages import WorkerInfo
from actors.outcome import Exit, Outcome, StopRun, Tell
from actors.ray_calls import wait
from actors.records.events import (
    KeepersRepaired,
    KeepersSilent,
    MemoryShort,
    SnapshotsFailed,
    SnapshotsForecast,
    SnapshotsSpaced,
    StepsLost,
)
from actors.refs import Ref
from actors.state import keeper
from actors.state.checkpoint_files import LaterFormat, Meta, ParameterMeta, trained_parameters
from actors.state.checkpoint_writer import Writer
from actors.state.checkpoints_on_disk import CheckpointsOnDisk
from actors.state.keeper import Process, Standing
from actors.state.keeper_fleet import Base, Keepers
from actors.state.recovery import CommitLog, KeeperInventory, Recovery, newest_whole, recovery_of
from actors.state.snapshot_interval import SnapshotInterval
from actors.state.survivors import handed_over
from actors.step import CollectedStep, DataLost, GenerationLost, Position, Seat
from data.errors import DataError, DataIOError
from ops.counted import counted
from ops.models.config import ModelConfig
from ops.shards import bytes_per_weight
from ops.units import GIB

log = logging.getLogger(__name__)

_POSITION_S = 30.0  # an older position of the data also serves, so there is no long wait for it
_ROOM_S = 5.0  # a forecast is no reason to wait for a busy keeper
_HELD_S = 60.0  # for keepers to take note of what workers hand over, and to copy it where there are other nodes
_LEAVING_S = 10.0  # for keepers to answer while nodes leave, and before the same question is asked once more
_LEAVING_ANEW_S = 30.0  # between two attempts to write what leaves with its nodes: storage may be away for a moment
_NOT_GIVEN = "its newest checkpoint, which storage does not give now"
_OF_LATER_VERSION = "its newest checkpoint, with the version of Heddle that wrote it"
_REPAIR_PAUSE_S = 0.5  # after the first repair of the keepers; doubles with every further one that did not help
_LONGEST_PAUSE_S = 30.0
_MOST_STEPS_BETWEEN = 100  # two snapshots, where no checkpoint is written either
_MAX_REPAIRS = 8  # without a commit; over a minute, in which Ray has noticed a lost node


@dataclass(frozen=True, kw_only=True, slots=True)
class StuckCommit:
    """Why the oldest finished step cannot be committed until its shards are given to others."""

    why: str
    overdue: bool = False  # no keeper has answered
    calm: bool = False  # nothing is wrong and no commit waits: such a repair counts as none


class PositionSource(Protocol):
    """What knows where the data stands (`actors.feed.step_source`)."""

    def token(self, step: int) -> Position:
        """The data's position before this step. Raises DataLost, DataError or DataIOError."""
        ...


class RunState:
    """Where a run's training state is held, and which of it is newest. Starts nothing, calls nothing but its parts.

    Its caller says how far the run is: what follows for finished steps is returned, as a `Recovery` or as the step that
    went to disk.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        model: ModelConfig,
        *,
        keepers: Keepers,
        standing: Standing,
        writer: Writer,
        disk: CheckpointsOnDisk,
        positions: PositionSource,
        tell: Tell,
    ) -> None:
        """`standing` is how far the run is by what its keepers said just now; `keepers.silent` have not answered."""
        self._config, self._model, self._tell = config, model, tell
        self.keepers, self.standing, self.writer, self.disk = keepers, standing, writer, disk
        self._positions = positions
        # They live, have not answered, and may hold a newer state than was found.
        self._silent: tuple[str, ...] = keepers.silent
        self._first: Origin | None = None  # found by `first`, used by no generation yet
        self._is_chosen = False  # `first` has answered: checkpoints of later steps are of what is computed anew
        self._until = math.inf  # at the end: the newest step whose checkpoint counts
        self._forecast_told = False
        self.interval = SnapshotInterval(
            setting=config.snapshot.every, most=config.checkpoint.every or _MOST_STEPS_BETWEEN
        )
        self._held: tuple[Snapshot, ...] = ()  # the shards of the newest committed step that has some
        self._uncopied = False  # the generation goes on from shards that were cut anew, each on the node of its worker
        self._counted: float = -1  # at the end: the newest step that may count, by what keepers hold; inf: not known
        self._saved_leaving = -1  # the newest step of which a checkpoint had to be written as its nodes leave
        # What `save_leaving` asked keepers last: up to which step, and which keepers are on nodes that leave.
        self._leaving_asked: tuple[int, Sequence[keeper.KeeperHandle]] = (-1, ())
        self._leaving_again = -math.inf  # monotonic seconds; when the same is asked once more
        self._repairs = 0  # of the keepers since the last commit
        self._repaired_at = 0.0  # monotonic seconds

    def first(self, recorded: tuple[int, int] | None = None) -> Origin | None:
        """The state that this controller continues from; None: a new run. `recorded` are step and generation of the
        newest line of metrics. A checkpoint of a later step is used only where there is no other."""
        if not self._silent:
            commits = CommitLog(committed=self.standing.committed, recorded=recorded)
            until = self._newest_counted(commits)
            self._first = self._find(commits, until).origin
            if self._first is None:
                self._first, until = self._find(commits).origin, math.inf
            self.disk.tell_passed_over(self.disk.newest_step(until))
        if self._silent:
            where = _named(self._first.step) if self._first is not None else self._where_without_keepers()
            self._refuse_to_guess(where, self.standing.committed)
        self._is_chosen = True
        return self._first

    def _newest_counted(self, commits: CommitLog) -> float:
        """The newest step whose checkpoint counts; inf: any may. A checkpoint begins after its step's line of metrics
        was synced, so one that is later than the newest line was passed over while storage did not give it, and the run
        went on without it; or a power cut came after a sync that had failed. The lines do not say which. To use it in
        the first case would drop what the run has done since, so it does not count: in the second case the steps
        between are computed again."""
        if self._is_chosen:
            return commits.newest
        return commits.wanted if commits.recorded is not None else math.inf

    def _find(self, commits: CommitLog, until: float = math.inf) -> Recovery:
        """The newest whole state, of keepers or of checkpoints up to step `until`. A checkpoint that is chosen and
        turns out to be damaged is left out; while it is read a newer one may become whole."""
        while True:
            recovery = self._decide(found := self.disk.newest(until), commits)
            folder = recovery.origin.checkpoint if recovery.origin is not None else None
            if folder is None or not (self.disk.is_damaged(Path(folder)) or self.disk.newest(until) != found):
                if recovery.origin is None and (why := self.disk.withheld):  # a new start would drop all of the run
                    raise why
                self._silent = self.keepers.silent if recovery.step < commits.wanted else ()
                return recovery

    def _decide(self, checkpoint: tuple[int, Path] | None, commits: CommitLog) -> Recovery:
        """Asks the keepers. Those that live are waited for as long as `snapshot.patience_s`, unless what others hold
        gives the newest step."""

        def decide(inventories: Sequence[KeeperInventory]) -> Recovery:
            return recovery_of(inventories, checkpoint, commits)

        patience_s = self._config.snapshot.patience_s
        return decide(self.keepers.inventories(patience_s, lambda found: decide(found).step >= commits.wanted))

    def _where_without_keepers(self) -> str:
        """Where the run would go on if none held anything."""
        try:
            found = self.disk.newest()
        except OSError as error:
            log.warning("which checkpoints are on disk is not known: %s", error)
            return _NOT_GIVEN
        except LaterFormat as error:
            log.warning("%s", error)
            return _OF_LATER_VERSION
        if found is None and self.disk.withheld:
            return _NOT_GIVEN
        return _named(found[0] if found is not None else -1)

    def _refuse_to_guess(self, where: str, last_step: int) -> None:
        """Raises StopRun where a keeper that lives has not answered: going on from `where` would drop what it may hold,
        so a person decides."""
        if not self._silent:
            return
        names, patience = ", ".join(self._silent), self._config.snapshot.patience_s
        reason = (
            f"{names} may hold the newest state and has not answered for {patience:g} s (snapshot.patience_s). Nothing "
            f"was dropped. Continue with --resume when it answers; if it is ended first, the run continues from {where}"
        )
        self._tell(KeepersSilent(silent=self._silent, seconds=patience))
        raise StopRun(Outcome(code=Exit.RESUMABLE, reason=reason, last_step=last_step))

    def recover(self, commits: CommitLog) -> Recovery:
        """The newest whole state for a generation, of keepers or on disk."""
        if self._first is not None:
            return Recovery(origin=self._first)
        recovery = self._find(commits, until=commits.newest)
        if recovery.lost_steps:
            self._refuse_to_guess(_named(recovery.step), commits.committed)
            where = recovery.origin.checkpoint if recovery.origin is not None else "the start"
            self._tell(StepsLost(to_step=recovery.step, lost_steps=recovery.lost_steps))
            log.warning(
                "no snapshot is whole: %s to compute again from %s", counted(recovery.lost_steps, "step"), where
            )
        self._silent = ()
        return recovery

    def take_over(self, world: Sequence[Seat], step: int) -> list[Ref[bool]]:
        """Have keepers hold the state after `step` as these workers have it between two steps. Waits for them, but not
        for long: returns what resolves when those hold it that have not said so by then."""
        held = self.keepers.hold(handed_over(world, step))
        late = wait(held, num_returns=len(held), timeout=_HELD_S)[1] if held else []
        if late:
            log.warning("not all keepers hold the state after step %d, after %.0f s", step, _HELD_S)
        return late

    def forget_first(self) -> None:
        """A generation goes on from a state: the next one asks the keepers again, not `first`."""
        self._first = None

    def open(self, origin: Origin | None, generation: int, infos: Sequence[WorkerInfo]) -> None:
        """Have keepers for these workers, in order of their ranks, whose generation goes on from this origin. What
        keepers hold of later steps is dropped, late messages are refused."""
        lenders: dict[str, tuple[int, ...]] = {}
        members: dict[str, tuple[Process, ...]] = {}
        for info in infos:
            lenders[info.node] = (*lenders.get(info.node, ()), info.lends)
            members[info.node] = (*members.get(info.node, ()), (info.pid, info.born))
        step = origin.step if origin is not None else -1
        self._held = ()
        if step < self._saved_leaving:
            self._saved_leaving = -1
        self._uncopied = origin is not None and origin.checkpoint is None
        self.writer.go_back(step)
        self.disk.go_back(step, self.writer.steps)
        self.keepers.prepare([info.node for info in infos], self._least_bytes(), lenders)
        self.keepers.begin(
            Base(
                generation=generation,
                step=step,
                made_in=origin.generation if origin is not None and origin.checkpoint is None else generation,
                total=self._total,
                members=members,
            )
        )

    def data_token(self, committed: int) -> Position | None:
        """Position and identity of the data at or before the committed step: the newest that keepers or a checkpoint
        have."""
        position = self.keepers.standing(_POSITION_S).position
        held = position if position is not None and position[0] <= committed else None
        while (found := self.disk.newest(committed)) is not None and (held is None or held[0] < found[0]):
            if not self.disk.is_damaged(found[1]):
                return self.disk.meta(found[1]).get("data_token")
        return held[1] if held is not None else None

    def step_on_disk(self, until: float = math.inf) -> int:
        """The step of the newest complete checkpoint up to this step; -1 without one, or while storage does not say."""
        return self.disk.newest_step(until)

    # -- during the run ------------------------------------------------------------------------------------------------

    def is_exported(self, step: int) -> bool:
        """Whether workers copy their state after this step, for keepers or for a checkpoint. Once in each generation
        that has no other copy of what it goes on from, as soon as can be: the next node may be lost."""
        is_due = self._uncopied or self.interval.is_due(step)
        return (self._config.snapshot.enabled and is_due) or self.writer.due(step)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is taken of this step."""
        return self.writer.due(step)

    def after_commit(self, done: CollectedStep, position: Position | None, relays: RelayFinder | None = None) -> None:
        """The step is safe: older ones may go. `position` is that of the data after it, with its counts: kept with
        the state, so that whoever goes on from that state has them exactly. Keepers hear of it by `relays`, while their
        generation lasts.

        Where a checkpoint is due, it begins to be written: not before, as a run that goes on from it has no other line
        of metrics of this step.
        """
        step = done.running.step
        self._repairs = 0
        if done.snapshots:  # with snapshot.every > 1 the last one that was taken must stay
            self._held, self._uncopied = done.snapshots, False
            saves = self.writer.due(step) and not self.writer.puts_off(step)
            pinned = [*self.writer.steps, *([step] if saves else [])]
            self.keepers.commit(step, position, pinned, relays)
            if saves:
                keepers = tuple(self.keepers.in_use().values())
                self._save(Origin(step=step, generation=done.running.generation, keepers=keepers))
        self._pace(done)
        self._tell_forecast()
        self.writer.poll()

    def save_leaving(self, committed: int) -> None:
        """No step runs. Nodes that Ray drains take what they hold along: where the newest state up to step `committed`
        is whole only with them, a checkpoint of it begins at once, as long as they are there; and anew when one has
        failed.

        The task that writes it needs a node that stays, as the controller's is as a rule: without any it never begins,
        and fails by its limit as one whose storage hangs.
        """
        if committed <= self._saved_leaving and self.writer.has(self._saved_leaving):
            return
        leaving, commits = self.keepers.leaving(), CommitLog(committed=committed)
        asked = committed, leaving
        if not leaving or (asked == self._leaving_asked and time.monotonic() < self._leaving_again):
            return
        self._leaving_asked = asked

        def newest(found: Sequence[KeeperInventory]) -> Origin | None:
            return recovery_of(found, None, commits).origin

        def stays(found: Sequence[KeeperInventory]) -> int:
            origin = newest([one for one in found if one.keeper not in leaving])
            return origin.step if origin is not None else -1

        found = self.keepers.inventories(_LEAVING_S, lambda found: stays(found) >= committed)
        self._leaving_again = time.monotonic() + _LEAVING_S  # after the answer, for which one may have kept us waiting
        origin = newest(found)
        if origin is None or origin.step <= stays(found):
            if self._saved_leaving not in self.writer.steps:
                self._saved_leaving = -1
            return
        self._saved_leaving = origin.step  # also of one that was due and is being written: the nodes are awaited
        if self.writer.has(origin.step):
            return
        log.warning("the nodes that hold step %d leave: a checkpoint of it begins", origin.step)
        self.keepers.pin([*self.writer.steps, origin.step])
        self._save(origin)
        self._leaving_again = time.monotonic() + _LEAVING_ANEW_S

    @property
    def writes_leaving(self) -> bool:
        """Whether a checkpoint that `save_leaving` has asked for is still being written, or has failed and begins anew
        in a moment."""
        step = self._saved_leaving
        failed = step >= 0 and not self.writer.has(step)
        return step in self.writer.steps or (failed and time.monotonic() < self._leaving_again)

    def _save(self, version: Origin) -> None:
        meta = self._meta(version.step)
        self.disk.make_way(version.step)
        self.writer.save(version, meta)

    def _pace(self, done: CollectedStep) -> None:
        """Snapshots are as frequent as what they cost in this step and the last ones allows."""
        changed = self.interval.after_commit(
            (done.running.generation, done.running.step),
            ended_at=done.collected_at,
            copy_s=max((r.snapshot_s for r in done.reports), default=0.0),
            held_s=time.monotonic() - done.collected_at if done.snapshots else None,
        )
        if changed and self._config.snapshot.enabled:
            log.info("a snapshot every %s: %s", counted(self.interval.every, "step"), self.interval.why)
            self._tell(SnapshotsSpaced(every=self.interval.every, why=self.interval.why))

    def lost_keepers(self) -> StuckCommit | None:
        """Why keepers must be repaired although no commit waits for an answer: some are gone, or a node that had no
        room for copies may have some again. None: no reason."""
        if gone := self.keepers.gone():
            return StuckCommit(why=f"{', '.join(gone)} is gone")
        rested = self.keepers.rested() if not self._repairs else []  # a repair looks at them, too
        return StuckCommit(why=f"{', '.join(rested)} may have room again", calm=True) if rested else None

    def repair_keepers(
        self, stuck: StuckCommit, world: Sequence[Seat], quiet: bool, commits: CommitLog, shards: Sequence[Snapshot]
    ) -> list[Ref[bool]] | None:
        """A keeper is gone or does not take its shard: start another where one is gone, and have the newest shards held
        once more. `shards` are those of uncommitted steps that are all there. Returns the answers to come, or None when
        nothing could be repaired now.

        Raises GenerationLost when the memory of a node went with its keeper, and StopRun when repairs do not help; not
        before the workers are `quiet`, since then their own state goes to disk. On a lost node that Ray has not noticed
        yet, every new keeper is lost at once: so each repair waits longer than the one before.
        """
        if self._repaired_lately():
            return None
        if self._repairs >= _MAX_REPAIRS:
            if quiet:
                self._give_up_snapshots(stuck, commits)
            time.sleep(_REPAIR_PAUSE_S)
            return None
        self._tell_forecast()  # it may say why
        if not stuck.calm:  # hours without a commit, while storage or data do not answer, have many of these
            self._repairs += 1
            self._repaired_at = time.monotonic()
        if self._repairs > 1:  # a single repair is usual
            log.warning("the keepers are repaired for the %d. time since the last commit: %s", self._repairs, stuck.why)
            self._tell(KeepersRepaired(repairs=self._repairs, why=stuck.why))
        # A shard that waits for too long has shown that its keeper is silent.
        give_up_s = 0.0 if stuck.overdue else self._config.snapshot.patience_s
        lost = self.keepers.repair([seat.node for seat in world], give_up_s, self._least_bytes())
        if lost:
            why = "no keeper has the memory of its node any more"
            raise GenerationLost(Failures(failed={seat.name: why for seat in world if seat.node in lost}))
        self.keepers.hold(self._held)  # no step waits for it, but a node that is lost now would take it along
        return self.keepers.hold(shards)

    def _repaired_lately(self) -> bool:
        """Waits a moment. True when the next repair has to wait longer: the controller looks around meanwhile."""
        pause = min(_LONGEST_PAUSE_S, _REPAIR_PAUSE_S * 2.0 ** max(0, self._repairs - 1))
        left = self._repaired_at + pause - time.monotonic()
        if left > 0:
            time.sleep(min(_REPAIR_PAUSE_S, left))
        return left > _REPAIR_PAUSE_S

    def _give_up_snapshots(self, stuck: StuckCommit, commits: CommitLog) -> None:
        self._tell(SnapshotsFailed(repairs=self._repairs, why=stuck.why))
        reason = (
            f"the keepers did not take the state of step {commits.committed + 1} in {self._repairs} attempts: "
            f"{stuck.why}. What the workers hold is written as a checkpoint. Add memory or nodes, lower "
            f"snapshot.copies, or set snapshot.enabled: false, and continue with --resume"
        )
        raise StopRun(Outcome(code=Exit.FAILURE, reason=reason, last_step=commits.newest))

    # -- the end -------------------------------------------------------------------------------------------------------

    def keep_last(self, world: Sequence[Seat], commits: CommitLog) -> int:
        """The run ends before its last step: the last one whose state is whole goes from memory to disk. `world` are
        workers that wait between two steps. Returns the step whose state is on disk now, -1: none.

        Finished steps up to it that no keeper has taken yet are safe, too, and counted next. A new checkpoint becomes
        complete after that, by `seal_last`: a run that went on from it would miss their metrics.
        """
        if self._silent:
            return -1
        self._counted = math.inf
        self._counted = self._counted_in_keepers(commits)
        until = self._until = self._newest_counted(commits)
        recovery = self._find(commits, until)
        if world and recovery.step < commits.newest:  # they may be slow to answer
            self.take_over(world, commits.newest)
            recovery = self._find(commits, until)
        if not self._silent:  # who has not answered holds nothing newer that counts
            self._counted = min(self._counted, commits.wanted)
        step, found = recovery.step, recovery.origin
        if found is not None and found.checkpoint is None:
            meta = self._meta(step)
            self.disk.make_way(step)
            if self.writer.save_origin(found, meta):
                return step
        self.writer.wait()
        return step if step <= self.disk.newest_step(until) else -1

    def seal_last(self) -> None:
        """What `keep_last` has put on disk becomes a checkpoint."""
        self.writer.seal_last()

    def free_memory(self, committed: int) -> bool:
        """Stop the keepers and return True. Returns False, and keeps them, if they hold or may hold the only copy of a
        committed step, even one newer than `committed`; `newest_in_memory` then gives its number."""
        if self._silent:
            log.error("the keepers stay: %s may hold the newest state", ", ".join(self._silent))
            return False
        counted = max(committed, self._counted)
        if self.disk.newest_step(counted if self._is_chosen else max(counted, self._until)) < counted:
            step = f"step {counted}" if counted < math.inf else "what they hold"
            log.error("%s is not on disk; the keepers stay, and --resume on this cluster continues from them", step)
            return False
        self.keepers.close()
        return True

    def newest_in_memory(self, committed: int) -> int:
        """After `free_memory(committed)` has said no: the newest step that counts, as far as is known."""
        return committed if self._counted == math.inf else int(max(committed, self._counted))

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _counted_in_keepers(self, commits: CommitLog) -> float:
        """The newest step that may count and that keepers hold whole, though they were not told; -1: none, inf: who
        has not answered may hold one. Storage is not asked: it may be what has ended the run."""
        if commits.recorded is None and not commits.unread:
            return -1

        def newest(inventories: Sequence[KeeperInventory]) -> int:
            found = newest_whole(held for one in inventories for held in one.shards if commits.may_count(held))
            return found[0] if found is not None else -1

        patience_s = self._config.snapshot.patience_s
        found = newest(self.keepers.inventories(patience_s, lambda found: newest(found) >= commits.wanted))
        return math.inf if self.keepers.silent and found < commits.wanted else found

    @cached_property
    def _parameters(self) -> list[ParameterMeta]:
        """Names and shapes of what is trained. Needs no worker and no memory."""
        return trained_parameters(self._model)

    def _meta(self, step: int) -> Meta:
        """What a checkpoint says about itself."""
        return {
            "step": step,
            "parameters": self._parameters,
            "config": self._config.config_yaml,
            "seed": self._config.train.seed,
            "data_token": self._position_after(step),
        }

    def _position_after(self, step: int) -> Position | None:
        """The data's position after this step: the feeder's, or else the newest one known, from which the next feeder
        goes on."""
        try:
            return self._positions.token(step + 1)
        except (DataLost, DataError, DataIOError, ray.exceptions.RayError) as error:  # it may be what ends the run
            log.info("step %d is written with an earlier position of the data: %s", step, error)
            return self.data_token(step)

    @cached_property
    def _total(self) -> int:
        """Elements of the flat vector."""
        return sum(math.prod(p["shape"]) for p in self._parameters)

    def _least_bytes(self) -> int:
        """Memory that a node without workers must offer to get a keeper: it may come to copy all of the state."""
        copies = self._config.snapshot.copies
        return keeper.forecast_bytes(self._total, weight_bytes=self._weight_bytes, copies=0, num_keepers=1) * copies

    def _bytes_kept(self, keepers: int) -> int:
        """Bytes of the state that each of `keepers` keepers holds."""
        copies = self._config.snapshot.copies if self._config.snapshot.enabled else 0
        return keeper.forecast_bytes(self._total, weight_bytes=self._weight_bytes, copies=copies, num_keepers=keepers)

    @property
    def _weight_bytes(self) -> int:
        return bytes_per_weight(self._config.train.optimizer)

    def _tell_forecast(self) -> None:
        """Say, once, what snapshots take of the nodes' memory, and where there is too little of it."""
        keepers = len(self.keepers.in_use())
        if self._forecast_told or not keepers:
            return
        self._forecast_told = True
        held, enabled = self._bytes_kept(keepers), self._config.snapshot.enabled
        self._tell(SnapshotsForecast(keepers=keepers, mib_per_keeper=round(held / 2**20, 1), enabled=enabled))
        for host, room in self.keepers.rooms(_ROOM_S):
            if room < held:
                log.warning(
                    "keepers take %.1f GiB on %s, which can spare %.1f GiB: add nodes or memory%s",
                    held / GIB,
                    host,
                    room / GIB,
                    ", lower snapshot.copies, or set snapshot.enabled: false" if enabled else "",
                )
                self._tell(MemoryShort(host=host, mib_needed=held >> 20, mib_room=room >> 20, enabled=enabled))


def _named(step: int) -> str:
    return f"step {step}" if step >= 0 else "the start"
