"""Whether a process that should stay as it is has grown for so long that another one should take its place."""

from __future__ import annotations

from dataclasses import dataclass, field

from ops.units import GIB


@dataclass(kw_only=True, slots=True)
class Growth:
    """Memory of the process that delivers, step by step, against the most that it had in its first steps.

    growth.seen(bytes)      # with each step that this process delivers
    growth.is_over          # by more than it may, in each of the last steps
    growth.begin()          # from now on it is another one, or this one gets as much again
    """

    # 160,000 steps of 64 microbatches, of which Ray Data 2.60 leaves 0.1 KiB each, as measured of the first 6,000.
    most_bytes: int = GIB
    # Fills what a feeder keeps of recent steps and windows: of the defaults, 192 steps of 4 microbatches, 72 of 64.
    settling_steps: int = 256
    steady_steps: int = 16  # what comes and goes is no growth
    settled_bytes: int = 0  # the most that it had while it settled
    now_bytes: int = 0
    _steps: int = field(default=0, init=False)  # that were seen
    _over: int = field(default=0, init=False)  # steps in a row until now in which it was too large

    def begin(self) -> None:
        """Growth is counted from what is seen from now on."""
        self.settled_bytes = self.now_bytes = self._steps = self._over = 0

    def seen(self, now_bytes: int) -> None:
        """The process has this much memory of its own; 0: nobody knows."""
        self.now_bytes = now_bytes
        self._steps += 1
        if self._steps <= self.settling_steps:
            self.settled_bytes = max(self.settled_bytes, now_bytes)
        else:
            self._over = self._over + 1 if now_bytes - self.settled_bytes > self.most_bytes else 0

    @property
    def is_over(self) -> bool:
        """Whether the process has grown by more than it may."""
        return self._over >= self.steady_steps
