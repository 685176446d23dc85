"""The clock by which silent workers are judged: it stands still while the controller itself is blocked."""

from __future__ import annotations

import time

_UNWATCHED_S = 5.0  # a longer time without a look is not held against those who were not looked at


class PatientClock:
    """A monotonic clock that leaves out the time in which the controller itself was blocked, such as by data that is
    being opened: answers that come meanwhile are read late, and workers would time out because nobody read them."""

    def __init__(self) -> None:
        self._watched_at = time.monotonic()
        self._unwatched_s = 0.0

    def now(self) -> float:
        """Seconds; to be asked at every look."""
        now = time.monotonic()
        self._unwatched_s += max(0.0, now - self._watched_at - _UNWATCHED_S)
        self._watched_at = now
        return now - self._unwatched_s
