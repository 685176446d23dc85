"""Finished steps on their way to being committed: in order, each once all its shards are held. Calls nobody.

log.add(collected)
for step in log.settle():                   # held by now, oldest first
    write_metrics(step)
    log.commit(step.running.step)           # only now it counts: what fails before this is computed again
if log.stuck is not None:                   # a keeper or worker is gone or silent
    log.replace_acknowledgements(given_to_others)
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import ray

from actors.messages import Snapshot
from actors.outcome import Tell, silent
from actors.ray_calls import get, get_all, wait
from actors.records.events import CommitSlow
from actors.refs import Ref
from actors.step import CollectedStep

log = logging.getLogger(__name__)

_SLOW_S = 30.0  # a keeper that takes longer is reported


@dataclass(kw_only=True, slots=True)
class UncommittedStep:
    """A finished step and the acknowledgements it still waits for."""

    collected: CollectedStep
    waiting: list[Ref[bool]]
    since: float  # monotonic seconds; when these acknowledgements were asked for

    @property
    def step(self) -> int:
        return self.collected.running.step


@dataclass(frozen=True, kw_only=True, slots=True)
class Stuck:
    """Why the oldest finished step cannot be committed until its shards are given to others."""

    why: str
    overdue: bool = False  # nobody has answered


@dataclass(kw_only=True)
class CommitLog:
    """`committed` is the newest committed step, -1 before the first."""

    committed: int
    patience_s: float = 60.0  # a keeper that has not taken a shard for longer is replaced
    tell: Tell = silent  # is told once of a step that waits for its keepers
    stuck: Stuck | None = None  # as the last `settle` found it
    _told: int = -1
    _queue: deque[UncommittedStep] = field(default_factory=deque)

    def add(self, collected: CollectedStep) -> None:
        """All workers have finished this step."""
        acknowledgements = [a for snapshot in collected.snapshots for a in snapshot.acknowledgements]
        self._queue.append(UncommittedStep(collected=collected, waiting=acknowledgements, since=time.monotonic()))

    def settle(self, timeout_s: float = 0.0) -> list[CollectedStep]:
        """The finished steps that are held by now, oldest first. Waits at most `timeout_s` for each."""
        self.stuck = None
        held: list[CollectedStep] = []
        for waiting in self._queue:
            if not self._is_held(waiting, timeout_s):
                break
            held.append(waiting.collected)
        return held

    def commit(self, step: int) -> None:
        """The oldest finished step, `step`, is committed."""
        oldest = self._queue.popleft()
        assert oldest.step == step, f"step {step} is committed before step {oldest.step}"
        self.committed = step

    @property
    def finished(self) -> list[CollectedStep]:
        """Steps that are finished and not committed yet, oldest first."""
        return [waiting.collected for waiting in self._queue]

    def finished_until(self, step: int) -> list[CollectedStep]:
        """Finished steps up to `step`, oldest first: safe as soon as the state after `step` is."""
        return [waiting.collected for waiting in self._queue if waiting.step <= step]

    def restart(self, step: int) -> None:
        """Training goes on after `step`, up to which everything is committed; later finished steps are computed again.

        A finished step up to `step` must have been committed: training from another state would go unnoticed.
        """
        left = [waiting.step for waiting in self._queue if waiting.step <= step]
        assert not left, f"training cannot go on after step {step}: steps {left} are finished but not committed"
        self._queue.clear()
        self.committed = step

    def replace_acknowledgements(self, snapshots: Sequence[Snapshot]) -> None:
        """New keepers were given the newest shards: every open step is safe as soon as those are held."""
        fresh = [a for snapshot in snapshots for a in snapshot.acknowledgements]
        for open_step in self._queue:
            open_step.waiting, open_step.since = list(fresh), time.monotonic()

    @property
    def newest(self) -> int:
        """The newest step up to which all reports are known. A later state may be held, but its step has no metrics."""
        steps = [waiting.step for waiting in self._queue]
        return steps[-1] if steps and steps[0] == self.committed + 1 else self.committed

    def __len__(self) -> int:
        return len(self._queue)

    def _is_held(self, step: UncommittedStep, timeout_s: float) -> bool:
        if not step.waiting:
            return True
        done, late = wait(step.waiting, num_returns=len(step.waiting), timeout=timeout_s)
        asked = [] if _all_held(done) else done
        failures = {reference: why for reference in asked if (why := _failure(reference))}
        step.waiting = [*failures, *late]
        waited_s = time.monotonic() - step.since
        overdue = bool(late) and waited_s > self.patience_s
        if failures or overdue:
            why = next(iter(failures.values()), f"no answer in {waited_s:.0f} s")
            self.stuck = Stuck(why=why, overdue=overdue)
        elif late and waited_s > _SLOW_S:
            self._tell_slow(step.step, waited_s)
        return not step.waiting

    def _tell_slow(self, step: int, waited_s: float) -> None:
        if step > self._told:
            self._told = step
            log.warning("step %d has waited for %.0f s to be held by keepers, which live", step, waited_s)
            self.tell(CommitSlow(step=step, seconds=round(waited_s, 1)))


def _all_held(references: Sequence[Ref[bool]]) -> bool:
    """Whether keepers have said so of all these, which have resolved."""
    try:
        return not references or all(get_all(references, timeout=30))
    except ray.exceptions.RayError:
        return False


def _failure(reference: Ref[bool]) -> str:
    """Why a shard is not held; empty when it is. The reference has resolved, so this does not wait."""
    try:
        held = get(reference, timeout=30)
    except ray.exceptions.RayTaskError as error:
        log.warning("a snapshot was not taken: %s", error.cause)
        return f"{type(error.cause).__name__}: {error.cause}"
    except ray.exceptions.RayError as error:
        log.warning("a snapshot was not acknowledged: %s", error)
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "" if held else "a keeper has left this generation behind"
