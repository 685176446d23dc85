"""Which steps count: a finished step is committed once every shard of the state after it is held outside its worker.

Then its metrics are written, the keepers let older states go, the feeder lets its pixels go. Once per step and in
order; what fails before that is computed again.

Where the run's files take nothing for a while, as on a full disk, a step stays finished and is recorded later.
Meanwhile no step is begun beside those under way, and a new generation goes on from the last step that counts.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import ray

from actors.feed.step_source import StepSource
from actors.held_state import Origin, Snapshot
from actors.letters import Failures, RelayFinder
from actors.outcome import Events, Listener, NotRecorded, Outcome
from actors.ray_calls import GONE, get, get_all, wait
from actors.records.events import CommitSlow, FeederLost, StorageAwaited, StorageBack
from actors.records.metrics_line import StepMetrics
from actors.records.span_record import SpanRecord
from actors.refs import Ref
from actors.run.step_metrics import StepAccount
from actors.state.recovery import CommitLog, Recovery
from actors.state.run_state import RunState, StuckCommit
from actors.step import CollectedStep, GenerationLost, Seat
from data.errors import DataUnreachable

log = logging.getLogger(__name__)

_SETTLE_S = 0.2  # at a time; in between keepers that are gone or silent are replaced
_SLOW_S = 30.0  # a keeper that takes longer is reported
_ANSWER_S = 30.0  # to read an answer that has come
_RECORD_S = 1.0  # between two tries to record a step
_TOLD_S = 600.0  # between two events that say so: an alert on an event lasts an hour, on W&B 15 minutes
_LONGEST_S = 12 * 3600.0  # a night, in which somebody makes room; workers that wait for longer serve nobody


@dataclass(kw_only=True, slots=True)
class UncommittedStep:
    """A finished step and what it still waits for: until its state is copied from devices, then for keepers."""

    collected: CollectedStep
    copying: dict[Ref[None], str]  # with the worker that copies
    waiting: list[Ref[bool]]
    since: float  # monotonic seconds; when these answers were asked for
    records: tuple[StepMetrics, list[SpanRecord]] | None = None  # once it is held; those of a step are made once

    @property
    def step(self) -> int:
        return self.collected.running.step


@dataclass(kw_only=True, slots=True)
class StorageWait:
    """The run's files take nothing. All in monotonic seconds."""

    since: float
    tried: float = 0.0
    told: float = -_TOLD_S


@dataclass(kw_only=True)
class Committer:
    """Commits the steps of one run.

    committer.add(done)                         # all workers have finished it
    committer.settle(world, quiet=False)        # commits what is held by now
    committer.go_on_from(recovery)              # a generation is about to start from this state
    """

    state: RunState
    account: StepAccount
    listener: Listener
    events: Events
    source: StepSource
    relays: RelayFinder | None = None  # by which keepers are called; None: each by itself
    patience_s: float = 60.0  # a keeper that has not taken a shard for longer, or a worker not copied it, is replaced
    say: Callable[[str], object] = lambda trouble: None  # shows people what the run waits for; "": nothing
    committed: int = -1  # the newest committed step, -1 before the first
    # finished and not committed yet, oldest first
    _open: deque[UncommittedStep] = field(default_factory=deque, init=False)
    _slow: int = field(default=-1, init=False)  # the newest step of which an event said that its keepers are slow
    _storage: StorageWait | None = field(default=None, init=False)
    # (step, generation) of the newest line of metrics, until it is known where this controller goes on
    _recorded: tuple[int, int] | None = field(default=None, init=False)
    _unread: bool = field(default=False, init=False)  # that line could not be read

    @property
    def awaits_storage(self) -> bool:
        """Whether a step is held and cannot be recorded now."""
        return self._storage is not None

    @property
    def log(self) -> CommitLog:
        """How far the run is by now. Steps that cannot be recorded count no more than those that were never run."""
        if self.awaits_storage:
            return CommitLog(committed=self.committed)
        finished = tuple(one.collected for one in self._open)
        return CommitLog(committed=self.committed, finished=finished, recorded=self._recorded, unread=self._unread)

    @property
    def num_open(self) -> int:
        """Steps that are finished and not committed yet."""
        return len(self._open)

    def first(self) -> Origin | None:
        """The state that this controller goes on from; None: a new run. If an error comes before it is known, `log`
        still covers every step that may count. With `snapshot.every` above 1, keepers may hold a counted step newer
        than the last commit that they heard of."""
        self.restart(self.state.standing.committed)
        self._unread = True
        self._recorded = self.listener.newest_line()
        self._unread = False
        origin = self.state.first(self._recorded)
        self.restart(origin.step if origin is not None else -1)
        return origin

    def add(self, done: CollectedStep) -> None:
        """All workers have finished this step."""
        copying = {s.copied: done.reports[s.rank].worker for s in done.snapshots if s.copied is not None}
        waiting = [] if copying else self.state.keepers.hold(done.snapshots, self.relays)
        self._open.append(UncommittedStep(collected=done, copying=copying, waiting=waiting, since=time.monotonic()))

    def settle(self, world: Sequence[Seat], quiet: bool, timeout_s: float = 0.0) -> None:
        """Commit what is held by now; where keepers are gone or silent, have others hold it. Waits at most `timeout_s`
        for each step. `world` are the workers, `quiet` while no step runs on them. Raises GenerationLost and StopRun.
        """
        stuck: StuckCommit | None = None
        while self._open:
            oldest = self._open[0]
            stuck = self._look(oldest, timeout_s)
            if oldest.copying or oldest.waiting or self._rests(timeout_s):
                break
            try:
                self._commit(oldest.collected, None if quiet else self.relays)
            except NotRecorded:
                break
        stuck = stuck or self.state.lost_keepers()
        if stuck is not None and world:
            held = self.state.repair_keepers(stuck, world, quiet, self.log, self._shards())
            if held is not None:
                self._await_instead(held)

    def settle_all(self, world: Sequence[Seat], timeout_s: float) -> None:
        """Wait for the commits of a clean boundary, so that the next generation starts from the last finished step."""
        deadline = time.monotonic() + timeout_s
        try:
            while self.num_open and time.monotonic() < deadline:
                self.settle(world, quiet=True, timeout_s=_SETTLE_S)
        except GenerationLost as lost:
            log.warning("uncommitted steps are left to what others hold: %s", lost)

    def go_on_from(self, recovery: Recovery, apart: tuple[str, ...] = ()) -> Recovery:
        """Commit the steps that `recovery` makes safe, and drop later ones: they are computed again. Returns the state
        that the generation starts from: an earlier one if the metrics of a safe step cannot be recorded now.

        Nothing is decoded on nodes that are `apart` from those of the generation: the pixels could not be fetched from
        there, and Ray would not say so.
        """
        elsewhere = apart != self.source.avoid
        self.source.avoid = apart
        try:
            for done in recovery.newly_safe:
                self._commit(done)
        except NotRecorded:
            recovery = self.state.recover(self.log)
        released = recovery.step < self.committed  # the data of steps that count goes with them
        self.restart(recovery.step)
        self.state.forget_first()
        if released or elsewhere:
            self._open_data()
        return recovery

    def commit_until(self, saved: int) -> None:
        """The state after step `saved` is on disk, where no keeper is needed: all steps up to it count."""
        for done in self.log.until(saved):
            self._commit(done)
        if saved > self.committed:
            self.restart(saved)

    def restart(self, step: int) -> None:
        """Training goes on after `step`; finished steps after it are computed again.

        Every finished step up to `step` must be committed already, or it would be missing from the metrics unnoticed.
        """
        left = [done.running.step for done in self.log.until(step)]
        assert not left, f"training cannot go on after step {step}: steps {left} are finished but not committed"
        self._open.clear()
        self.committed, self._recorded, self._unread = step, None, False

    def reopen_data(self, why: str) -> None:
        """What is not committed is decoded again, by a new feeder."""
        self.events.tell(FeederLost(why=why))
        self.try_data()

    def try_data(self) -> None:
        """Open the data anew from the step after the last commit; whether it can be read, `source.has` says."""
        self._open_data()

    def outcome(self, code: int, reason: str) -> Outcome:
        """The run ends here."""
        return Outcome(code=code, reason=reason, last_step=self.committed)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _look(self, step: UncommittedStep, timeout_s: float) -> StuckCommit | None:
        """Take in the keepers' answers about a step's shards, waiting at most `timeout_s` for them. Returns why the
        shards must be given to other keepers; None: they need not. Raises GenerationLost where a worker could not copy
        its state, or has not for too long."""
        if step.copying:
            for reference in wait(list(step.copying), num_returns=len(step.copying), timeout=timeout_s)[0]:
                _check_copied(reference, step.copying.pop(reference))
            if step.copying:
                _check_copying(step, self.patience_s)
                return None
            step.waiting, step.since = self.state.keepers.hold(step.collected.snapshots, self.relays), time.monotonic()
        if not step.waiting:
            return None
        done, late = wait(step.waiting, num_returns=len(step.waiting), timeout=timeout_s)
        asked = [] if _all_held(done) else done
        failures = {reference: why for reference in asked if (why := _failure(reference))}
        step.waiting = [*failures, *late]
        waited_s = time.monotonic() - step.since
        overdue = bool(late) and waited_s > self.patience_s
        if failures or overdue:
            return StuckCommit(why=next(iter(failures.values()), f"no answer in {waited_s:.0f} s"), overdue=overdue)
        if late and waited_s > _SLOW_S and step.step > self._slow:
            self._slow = step.step
            log.warning("step %d has waited for %.0f s to be held by keepers, which live", step.step, waited_s)
            self.events.tell(CommitSlow(step=step.step, seconds=round(waited_s, 1)))
        return None

    def _commit(self, done: CollectedStep, relays: RelayFinder | None = None) -> None:
        """The oldest finished step is safe: it counts once its metrics are written. Keepers learn of it through
        `relays`, unless the generation may end next: they refuse what arrives after the next one has begun. Raises
        NotRecorded if the metrics cannot be written now but may be later. Any other listener error is raised as it is,
        and so is the underlying storage error once `_LONGEST_S` has passed."""
        step, oldest = done.running.step, self._open[0]
        assert step == oldest.step, f"step {step} is committed before step {oldest.step}"
        oldest.records = oldest.records or self.account.records(done)
        try:
            self.listener.on_step(*oldest.records, done.running.assignment)
        except NotRecorded as error:
            self._await_storage(step, error)
            raise
        except Exception:
            self.restart(step - 1)  # without its line the step is computed again, from a state that keepers hold
            raise
        self._has_storage()
        self._open.popleft()
        self.committed = step
        self.state.after_commit(done, self.source.release(step), relays)

    def _rests(self, timeout_s: float) -> bool:
        """Whether it is too early for another try to record a step; waits for that, at most `timeout_s`."""
        if self._storage is None:
            return False
        left = self._storage.tried + _RECORD_S - time.monotonic()
        if left > 0:
            time.sleep(min(left, timeout_s))
        return left > timeout_s

    def _await_storage(self, step: int, error: NotRecorded) -> None:
        """This step is held, and the run's files do not take its line. Raises what they raise when that has lasted too
        long."""
        now = time.monotonic()
        wait = self._storage = self._storage or StorageWait(since=now)
        wait.tried = now
        if now - wait.since > _LONGEST_S:
            self.restart(step - 1)
            assert error.__cause__ is not None, "NotRecorded says what has failed"
            raise error.__cause__
        if now - wait.told >= _TOLD_S:
            wait.told = now
            waited_s = round(now - wait.since, 1)
            awaited = StorageAwaited(step=step, why=str(error), seconds=waited_s, longest_s=_LONGEST_S)
            log.warning("%s", awaited.describe())
            self.events.tell(awaited)
            self.say(awaited.describe())

    def _has_storage(self) -> None:
        """A step was recorded."""
        if self._storage is not None:
            seconds, self._storage = time.monotonic() - self._storage.since, None
            self.events.tell(StorageBack(seconds=round(seconds, 1)))
            self.say("")

    def _shards(self) -> list[Snapshot]:
        """Snapshots of steps whose state is all there: a keeper takes one that a device still copies for whole."""
        return [snapshot for one in self._open if not one.copying for snapshot in one.collected.snapshots]

    def _await_instead(self, held: Sequence[Ref[bool]]) -> None:
        """Keepers were given the newest shards: every open step is safe as soon as those are held."""
        for one in self._open:
            one.waiting, one.since = [] if one.copying else list(held), time.monotonic()

    def _open_data(self) -> None:
        with suppress(DataUnreachable):  # the next step asks for its data, and waits
            self.source.open(self.committed + 1, self.state.data_token(self.committed))


def _check_copied(reference: Ref[None], worker: str) -> None:
    """Raises GenerationLost where a copy has failed, or its worker is gone."""
    try:
        get(reference, timeout=_ANSWER_S)
    except GONE:
        raise GenerationLost(Failures(dead=[worker])) from None
    except ray.exceptions.RayTaskError as error:
        why = f"its state was not copied: {error.cause}"
        raise GenerationLost(Failures(failed={worker: why})) from None


def _check_copying(step: UncommittedStep, patience_s: float) -> None:
    """Raises GenerationLost where copies take too long. The update of a step that runs waits for them, and has its
    limit; after the last step, and at a boundary, nothing else would notice."""
    waited_s = time.monotonic() - step.since
    if waited_s > patience_s:
        why = f"its state has not been copied in {waited_s:.0f} s"
        raise GenerationLost(Failures(failed=dict.fromkeys(step.copying.values(), why)))


def _all_held(references: Sequence[Ref[bool]]) -> bool:
    """Whether keepers hold all these shards, by answers that have come."""
    try:
        return not references or all(get_all(references, timeout=_ANSWER_S))
    except ray.exceptions.RayError:
        return False


def _failure(reference: Ref[bool]) -> str:
    """Why a shard is not held; empty when it is. The reference has resolved, so this does not wait."""
    try:
        held = get(reference, timeout=_ANSWER_S)
    except ray.exceptions.RayTaskError as error:
        log.warning("a snapshot was not taken: %s", error.cause)
        return f"{type(error.cause).__name__}: {error.cause}"
    except ray.exceptions.RayError as error:
        log.warning("a snapshot was not acknowledged: %s", error)
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "" if held else "a keeper has left this generation behind"
