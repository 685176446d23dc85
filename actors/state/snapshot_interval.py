"""How many steps lie between two snapshots: as few as cost little of the steps' time. Pure.

A snapshot holds a step up twice: workers write their part beside the last version or copy it there (between two steps
or beside the next one's cascades, whose update then waits for the copy), and no more than two steps may wait to be
committed, so keepers that take long hold up the third. How often one is taken changes what is computed again after a
loss, never what is trained.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from ops.counted import counted

SHARE = 0.02  # of the steps' time that snapshots may take
_ENOUGH = 3  # measured steps and snapshots before the interval changes
_KEPT = 9  # of the last ones, whose median counts: a first step compiles
_STEPS_AHEAD = 2  # that may be finished and not committed
_OFF = 1.25  # an interval that is off by less stays
_NEWS = 2.0  # one that is off by less from the last one in an event is no news


@dataclass(kw_only=True)
class SnapshotInterval:
    """`setting` is `snapshot.every`; with auto it is `every` that counts, which begins with 1.

    interval.is_due(step)                                                   # as steps are dispatched
    if interval.after_commit((generation, step), ended_at, copy_s, held_s):    # in their order; worth telling
        tell(interval.every, interval.why)
    """

    setting: int | Literal["auto"]
    most: int  # steps that may be lost
    every: int = 1
    why: str = ""
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _copies_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _held_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _told: int = 1  # the interval of the last event
    _last: tuple[tuple[int, int], float] | None = None  # generation and step, and seconds of its end

    def __post_init__(self) -> None:
        if self.setting != "auto":
            self.every = self.setting

    def is_due(self, step: int) -> bool:
        """Whether keepers get the state after this step."""
        return step % self.every == 0

    def after_commit(self, step: tuple[int, int], ended_at: float, copy_s: float, held_s: float | None) -> bool:
        """Learn from a committed step (its generation and number), and say whether `every` is news: another than
        the last one in an event by a factor of two or more.

        It ended at `ended_at` (monotonic) on its workers, `copy_s` seconds of which went into copies: of its own
        snapshot or, where it has none, of the last one, for which its update had to wait. A snapshot of it was held
        `held_s` later; None: it has none. A step that a generation began with has not taken what lies between two ends.
        """
        generation, number = step
        if self._last is not None and self._last[0] == (generation, number - 1):
            self._steps_s.append(max(ended_at - self._last[1] - copy_s, 1e-6))
        self._last = step, ended_at
        if held_s is None:
            if self._copies_s:
                self._copies_s[-1] += copy_s
            return False
        self._copies_s.append(copy_s)
        self._held_s.append(held_s)
        if self.setting == "auto" and min(len(self._steps_s), len(self._copies_s), len(self._held_s)) >= _ENOUGH:
            self._choose()
        if 1 / _NEWS < self.every / self._told < _NEWS or self.setting != "auto":
            return False
        self._told = self.every
        return True

    def _choose(self) -> None:
        """Follow what was measured."""
        step_s, copy_s, held_s = (statistics.median(of) for of in (self._steps_s, self._copies_s, self._held_s))
        cost_s = copy_s + max(0.0, held_s - _STEPS_AHEAD * step_s)
        wanted = max(1, min(self.most, math.ceil(cost_s / (SHARE * step_s))))
        if 1 / _OFF < wanted / self.every < _OFF:
            return
        self.every = wanted
        self.why = (
            f"a snapshot costs {cost_s:.2f} s, a step takes {step_s:.2f} s, and {SHARE:.0%} of the steps' time may go "
            f"into snapshots"
            + (f"; no more than {counted(self.most, 'step')} may be lost" if wanted == self.most else "")
        )
