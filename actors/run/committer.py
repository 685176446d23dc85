"""How far the run is: finished steps on their way to being committed, and what happens when one is.

A step is committed once every shard of the state after it is held outside its worker: its metrics are written, the
keepers let older states go, the feeder lets its pixels go. Once per step and in order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from actors.feed.step_source import StepSource
from actors.outcome import Events, Listener, Outcome
from actors.records.events import FeederLost
from actors.run.step_metrics import StepAccount
from actors.state.commit_log import CommitLog
from actors.state.recovery import Recovery
from actors.state.run_state import RunState
from actors.step import CollectedStep, GenerationLost, Seat

log = logging.getLogger(__name__)

_SETTLE_S = 0.2  # at a time; in between keepers that are gone or silent are replaced


@dataclass(kw_only=True)
class Committer:
    """Commits the steps of one run.

    committer.add(done)                         # all workers have finished it
    committer.settle(world, quiet=False)        # commits what is held by now
    committer.go_on_from(recovery)              # a generation is about to start from this state
    """

    log: CommitLog
    state: RunState
    account: StepAccount
    listener: Listener
    events: Events
    source: StepSource

    @property
    def committed(self) -> int:
        """The newest committed step, -1 before the first."""
        return self.log.committed

    @property
    def num_open(self) -> int:
        """Steps that are finished and not committed yet."""
        return len(self.log)

    def add(self, done: CollectedStep) -> None:
        """All workers have finished this step."""
        self.log.add(done)
        self.state.finished(done)

    def settle(self, world: Sequence[Seat], quiet: bool, timeout_s: float = 0.0) -> None:
        """Commit what is held by now; where keepers are gone or silent, have others hold it. Waits at most `timeout_s`
        for each step. `world` are the workers, `quiet` while no step runs on them. Raises GenerationLost and StopRun.
        """
        for done in self.log.settle(timeout_s):
            self.commit(done)
        if self.log.stuck is not None and world:
            held = self.state.repair_keepers(self.log.stuck, world, quiet)
            if held is not None:
                self.log.replace_acknowledgements(held)

    def settle_all(self, world: Sequence[Seat], timeout_s: float) -> None:
        """Wait for the commits of a clean boundary, so that the next generation starts from the last finished step."""
        deadline = time.monotonic() + timeout_s
        try:
            while self.num_open and time.monotonic() < deadline:
                self.settle(world, quiet=True, timeout_s=_SETTLE_S)
        except GenerationLost as lost:
            log.warning("uncommitted steps are left to what others hold: %s", lost)

    def commit(self, done: CollectedStep) -> None:
        """The oldest finished step is safe: it counts once its metrics are written."""
        step = done.running.step
        metrics, timeline = self.account.records(done)
        try:
            self.listener.on_step(metrics, timeline, done.running.assignment)
        except Exception:
            self.log.restart(step - 1)  # without its line it is computed again; keepers hold that one
            raise
        self.log.commit(step)
        self.state.committed(done, self.source.release(step))

    def go_on_from(self, recovery: Recovery) -> None:
        """A generation starts from this state: what it makes safe is committed, later steps are computed again."""
        before = self.committed
        for done in recovery.newly_safe:
            self.commit(done)
        self.log.restart(recovery.step)
        self.state.begin(recovery)
        if self.committed < before:
            self.source.open(self.committed + 1, self.state.data_token())

    def commit_until(self, saved: int) -> None:
        """The state after step `saved` is on disk, where no keeper is needed: all steps up to it count."""
        for done in self.log.finished_until(saved):
            self.commit(done)
        if saved > self.committed:
            self.log.restart(saved)

    def reopen_data(self, why: str) -> None:
        """What is not committed is decoded again, by a new feeder."""
        self.events.tell(FeederLost(why=why))
        self.source.open(self.committed + 1, self.state.data_token())

    def outcome(self, code: int, reason: str) -> Outcome:
        """The run ends here."""
        return Outcome(code=code, reason=reason, last_step=self.committed)
