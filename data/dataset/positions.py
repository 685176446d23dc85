"""Where the plan stood before past steps, in memory that does not grow with the run.

    positions = Positions(planner, recent=200)
    state = positions.at(41)             # a copy that stands before step 41; walks there from the nearest known one
    planner.advance(state); positions.keep(state)

The last positions are held as they are, with their queues. Of older ones tokens of a few kB are kept, one per
`spacing` steps; when there are too many of them every second one goes, so a million steps cost what a thousand do.
"""

from __future__ import annotations

from collections import OrderedDict

from data.dataset.order import SampleOrder
from data.dataset.order_state import OrderState
from data.dataset.order_token import DataToken
from data.errors import DataError

SPACING = 256  # steps between two older positions, until there are too many of them
MOST_TOKENS = 64
MOST_WAITING = 1 << 21  # rows in the queues of all recent positions together: 16 MB of references
FEWEST_RECENT = 64  # held whatever waits in them


class Positions:
    """Known positions of a plan from `first` on."""

    def __init__(self, planner: SampleOrder, state: OrderState, recent: int) -> None:
        """`recent`: positions held as they are, memory permitting."""
        self.first, self.newest = state.step, state.copy()
        self._planner, self._most = planner, max(recent, FEWEST_RECENT)
        self._recent: OrderedDict[int, OrderState] = OrderedDict({state.step: self.newest})
        self._waiting = self.newest.waiting
        self._tokens: dict[int, DataToken] = {state.step: planner.token(state)}
        self._spacing = SPACING
        self._walked: OrderState | None = None  # where the last walk ended: the next one often goes on from there

    def at(self, step: int) -> OrderState:
        """A copy of the position before a step. Raises DataError for one before `first`."""
        if step < self.first:
            raise DataError(
                f"step {step} lies before step {self.first}, where this run was resumed. "
                f"Resume from an earlier token to go back."
            )
        if step in self._recent:
            return self._recent[step].copy()
        state = self._nearest(step)
        while state.step < step:
            self._planner.advance(state)
            self.keep(state)
        self._walked = state.copy()
        return state

    def keep(self, state: OrderState) -> None:
        """Hold a copy of a position, if it is newer than all others."""
        if state.step <= self.newest.step:
            return
        self.newest = self._recent[state.step] = state.copy()
        self._waiting += state.waiting
        while len(self._recent) > self._most or (self._waiting > MOST_WAITING and len(self._recent) > FEWEST_RECENT):
            step, oldest = self._recent.popitem(last=False)
            self._waiting -= oldest.waiting
            if step % self._spacing == 0:
                self._keep_token(step, oldest)

    def forget_after(self, step: int) -> None:
        """What comes from this step on is planned anew; the position before it stays."""
        if step < self.first:
            return
        if self.newest.step > step:
            self._recent[step] = self.at(step)
            for later in [held for held in self._recent if held > step]:
                del self._recent[later]
            self._recent = OrderedDict(sorted(self._recent.items()))
            self._tokens = {held: token for held, token in self._tokens.items() if held <= step}
            self.newest = self._recent[step]
            self._waiting = sum(state.waiting for state in self._recent.values())
        if self._walked is not None and self._walked.step > step:
            self._walked = None

    def _keep_token(self, step: int, state: OrderState) -> None:
        self._tokens[step] = self._planner.token(state)
        if len(self._tokens) > MOST_TOKENS:
            self._spacing *= 2
            self._tokens = {
                held: token for held, token in self._tokens.items() if held == self.first or held % self._spacing == 0
            }

    def _nearest(self, step: int) -> OrderState:
        """A copy of the last known position at or before a step."""
        recent = max((held for held in self._recent if held <= step), default=-1)
        walked = self._walked.step if self._walked is not None and self._walked.step <= step else -1
        token = max(held for held in self._tokens if held <= step)
        if recent >= max(walked, token):
            return self._recent[recent].copy()
        if self._walked is not None and walked >= token:
            return self._walked.copy()
        return self._planner.restore(self._tokens[token])
