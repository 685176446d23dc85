"""Finished steps on their way to being committed: in order, each once all its shards are held."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.messages import Snapshot
from actors.step import CollectedStep

log = logging.getLogger(__name__)

_SLOW_S = 30.0  # a keeper that takes longer is worth a word


@dataclass(kw_only=True, slots=True)
class UncommittedStep:
    """A finished step and the acknowledgements it still waits for."""

    collected: CollectedStep
    waiting: list[Any]
    since: float  # monotonic seconds; when these acknowledgements were asked for


@dataclass(kw_only=True)
class CommitLog:
    """`commit` is called once per step, in step order."""

    commit: Callable[[CollectedStep], None]
    committed: int
    patience_s: float = 60.0  # a keeper that has not taken a shard for longer is replaced
    slow: Callable[[int, float], None] = lambda step, seconds: None  # told once of a step that waits for its keepers
    failure: str = ""  # why the last `settle` was in vain
    overdue: bool = False  # that was because nobody answered
    _told: int = -1
    _queue: deque[UncommittedStep] = field(default_factory=deque)

    def add(self, collected: CollectedStep) -> None:
        acknowledgements = [a for snapshot in collected.snapshots for a in snapshot.acknowledgements]
        self._queue.append(UncommittedStep(collected=collected, waiting=acknowledgements, since=time.monotonic()))

    def settle(self, timeout_s: float = 0.0) -> bool:
        """Commit what has become safe. Returns False when a keeper or worker is gone or silent: until the shards are
        given to others (`replace_acknowledgements`) the step is not held."""
        self.overdue = False
        while self._queue:
            first = self._queue[0]
            if first.waiting:
                done, late = ray.wait(first.waiting, num_returns=len(first.waiting), timeout=timeout_s)
                failures = {reference: why for reference in done if (why := _failure(reference))}
                first.waiting = [*failures, *late]
                waited_s = time.monotonic() - first.since
                self.overdue = bool(late) and waited_s > self.patience_s
                if failures or self.overdue:
                    self.failure = next(iter(failures.values()), f"no answer in {waited_s:.0f} s")
                    return False
                if late and waited_s > _SLOW_S:
                    self._tell_slow(first.collected.running.step, waited_s)
            if first.waiting:
                break
            self._queue.popleft()
            self.committed = first.collected.running.step
            self.commit(first.collected)
        return True

    def _tell_slow(self, step: int, waited_s: float) -> None:
        if step > self._told:
            self._told = step
            log.warning("step %d has waited for %.0f s to be held by keepers, which live", step, waited_s)
            self.slow(step, waited_s)

    def replace_acknowledgements(self, snapshots: list[Snapshot]) -> None:
        """New keepers were given the newest shards: every open step is safe as soon as those are held."""
        fresh = [a for snapshot in snapshots for a in snapshot.acknowledgements]
        for open_step in self._queue:
            open_step.waiting, open_step.since = list(fresh), time.monotonic()

    def keep_until(self, step: int) -> None:
        """State up to `step` survived: those steps are committed; later ones will be computed again."""
        while self._queue:
            first = self._queue.popleft()
            if first.collected.running.step <= step:
                self.committed = first.collected.running.step
                self.commit(first.collected)
        self.committed = step

    @property
    def newest(self) -> int:
        """The newest step up to which all reports are known. A later state may be held, but its step has no metrics."""
        steps = [waiting.collected.running.step for waiting in self._queue]
        return steps[-1] if steps and steps[0] == self.committed + 1 else self.committed

    def __len__(self) -> int:
        return len(self._queue)


def _failure(reference: Any) -> str:
    """Why a shard is not held; empty when it is. The reference has resolved, so this does not wait."""
    try:
        held: bool = ray.get(reference, timeout=30)
    except ray.exceptions.RayTaskError as error:
        log.warning("a snapshot was not taken: %s", error.cause)
        return f"{type(error.cause).__name__}: {error.cause}"
    except ray.exceptions.RayError as error:
        log.warning("a snapshot was not acknowledged: %s", error)
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "" if held else "a keeper has left this generation behind"
