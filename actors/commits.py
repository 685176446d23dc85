"""Finished steps on their way to being committed: in order, each once all its shards are held."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.snapshots import Snapshot
from actors.steps import CollectedStep

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Uncommitted:
    """A finished step and the acknowledgements it still waits for."""

    collected: CollectedStep
    waiting: list[Any]
    since: float  # monotonic seconds; when these acknowledgements were asked for


@dataclass(kw_only=True)
class CommitLog:
    """`commit` is called once per step, in step order."""

    commit: Callable[[CollectedStep], None]
    committed: int
    patience_s: float = 60.0  # a keeper that is silent for longer counts as gone
    _queue: deque[Uncommitted] = field(default_factory=deque)

    def add(self, collected: CollectedStep) -> None:
        acknowledgements = [a for snapshot in collected.snapshots for a in snapshot.acknowledgements]
        self._queue.append(Uncommitted(collected=collected, waiting=acknowledgements, since=time.monotonic()))

    def settle(self, timeout_s: float = 0.0) -> bool:
        """Commit what has become safe. Returns False when a keeper or worker is gone or silent: until the shards are
        given to others (`replace_acknowledgements`) the step is not held."""
        while self._queue:
            first = self._queue[0]
            if first.waiting:
                done, late = ray.wait(first.waiting, num_returns=len(first.waiting), timeout=timeout_s)
                failed = [reference for reference in done if not _succeeded(reference)]
                first.waiting = [*failed, *late]
                if failed or (late and time.monotonic() - first.since > self.patience_s):
                    return False
            if first.waiting:
                break
            self._queue.popleft()
            self.committed = first.collected.running.step
            self.commit(first.collected)
        return True

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
        """The newest step whose reports are known. A later state may be held, too, but its step has no metrics."""
        return self._queue[-1].collected.running.step if self._queue else self.committed

    def __len__(self) -> int:
        return len(self._queue)


def _succeeded(reference: Any) -> bool:
    try:
        held: bool = ray.get(reference, timeout=30)  # it has resolved; what is waited for is its error, if any
    except ray.exceptions.RayError as error:
        log.warning("a snapshot was not acknowledged: %s", error)
        return False
    return held
