"""Storage of the data does not answer: what is reported, when it is tried again, and how long a run waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from actors.outcome import Tell
from actors.records.events import DataAwaited, DataBack
from data.errors import DataUnreachable

log = logging.getLogger(__name__)

_TOLD_S = 600.0  # between two events that say so: an alert on an event lasts an hour, on W&B 15 minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPace:
    """Seconds between tries, each of which starts a feeder that looks at every shard, and of the whole wait."""

    try_s: float = 5.0  # to the first
    longest_try_s: float = 60.0  # between later ones, at most
    longest_s: float = 12 * 3600.0  # as for the run's own files (`actors.run.committer`)


class DataWait:
    """What becomes of a run whose next step cannot be read. All times are monotonic seconds of the caller's clock.

    wait.failed(7, error, now)      # no step is begun while `wait.closed`
    if wait.is_due(now):            # once nothing runs: the feeder is opened anew
        wait.tried()
    wait.came(7, now)               # the step is there
    """

    def __init__(self, tell: Tell, say: Callable[[str], object], pace: DataPace = DataPace()) -> None:
        """`say` shows people what the run waits for; "" if for nothing."""
        self._tell, self._say, self._pace = tell, say, pace
        self._since: float | None = None
        self._step = -1  # that is waited for
        self._told = self._next = 0.0
        self._pause_s = pace.try_s
        self.closed = False  # True: nothing comes from the feeder that there is

    def failed(self, step: int, error: DataUnreachable, now: float) -> None:
        """This step cannot be read. Raises the error when that has lasted for too long."""
        if self._since is None:
            self._since, self._told, self._pause_s = now, now - _TOLD_S, self._pace.try_s
        if now - self._since > self._pace.longest_s:
            raise error
        self._step, self.closed, self._next = max(step, self._step), True, now + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._pace.longest_try_s)
        if now - self._told >= _TOLD_S:
            self._told = now
            waited_s = round(now - self._since, 1)
            awaited = DataAwaited(step=step, why=str(error), seconds=waited_s, longest_s=self._pace.longest_s)
            log.warning("%s", awaited.describe())
            self._tell(awaited)
            self._say(awaited.describe())

    def is_due(self, now: float) -> bool:
        """Whether the feeder shall be opened anew."""
        return self.closed and now >= self._next

    def tried(self) -> None:
        """The feeder is opened anew, and was asked for nothing yet."""
        self.closed = False

    def came(self, step: int, now: float) -> bool:
        """This step was read. Returns whether it was waited for: one before it may be computed again meanwhile."""
        if self._since is None or step < self._step:
            return False
        seconds, self._since, self._step = now - self._since, None, -1
        self._tell(DataBack(seconds=round(seconds, 1)))
        self._say("")
        return True
