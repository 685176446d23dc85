"""The unix time of a run: that of its monitor, whatever a worker's own host says.

Times of several hosts are compared: when each worker came to the gradient sum (`wait_sync_s`), how long a published
result took to another node (handoffs, whose costs plans learn), the spans of a step on one timeline. A host whose clock
is 5 s ahead made the others wait 5 s in each step, and each of its handoffs 5 s long.

A heartbeat's answer says when the monitor gave it. It was given between the call and its return, so that the shortest
of the last calls tells the difference of the two clocks best, to half of its length. Clocks that agree as far as that
is known are left alone, and a clock that somebody sets meanwhile changes nothing: time goes on by the monotonic clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_NEWEST = 20  # calls among which the shortest counts: ten seconds of heartbeats
_AGREE_S = 0.02  # clocks that are kept by NTP differ by less, and a correction would only add the noise of calls


class RunClock:
    """Seconds since 1970 as the monitor's host counts them. Any thread may ask; one tells it of calls."""

    def __init__(self, unix: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.monotonic = monotonic
        self._base_s = unix() - monotonic()
        self._shift_s = 0.0
        self._calls: deque[tuple[float, float]] = deque(maxlen=_NEWEST)  # (half of its seconds, monitor - own clock)

    def now(self) -> float:
        return self._base_s + self.monotonic() + self._shift_s

    def of_perf_counter(self, mark: float) -> float:
        """The time of a moment that `time.perf_counter` gave."""
        return self.now() - (time.perf_counter() - mark)

    def heard(self, began: float, told: float, ended: float) -> None:
        """A call that lasted from `began` to `ended` (`monotonic`) brought the monitor's time, `told`."""
        half = (ended - began) / 2
        self._calls.append((half, told - self._base_s - (began + half)))
        error_s, ahead_s = min(self._calls)
        if abs(ahead_s - self._shift_s) > error_s + _AGREE_S:
            self._shift_s = ahead_s if abs(ahead_s) > error_s + _AGREE_S else 0.0


own_clock = RunClock()
"""The clock of this process, which is a worker; its heartbeat corrects it."""
