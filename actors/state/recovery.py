"""Where a generation starts, decided from what keepers, workers and disk hold. Pure; the controller acts on it:

recovery = state.recover(generation, world)     # asks who holds what, decides
for step in recovery.newly_safe:                # finished steps whose state has survived
    commit(step)
commits.restart(recovery.step)                  # later ones are computed again
state.begin(recovery)                           # keepers drop what is later
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.messages import Origin
from actors.step import CollectedStep


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """The state a generation starts from, and what follows for steps that are finished or committed."""

    generation: int
    origin: Origin | None  # None: the model's first weights
    newly_safe: tuple[CollectedStep, ...] = ()  # finished, not committed yet, and held: to be committed now, in order
    lost_steps: int = 0  # committed, but held nowhere any more: computed again
    resumed: bool = False  # what this controller began from: nobody has anything later

    @property
    def step(self) -> int:
        """Training goes on after this step; -1: from the start."""
        return self.origin.step if self.origin is not None else -1


def recovery_from(
    origin: Origin | None, generation: int, committed: int, finished: Sequence[CollectedStep]
) -> Recovery:
    """`origin` is the newest state that is held, `finished` are the steps of the commit log, oldest first."""
    step = origin.step if origin is not None else -1
    return Recovery(
        generation=generation,
        origin=origin,
        newly_safe=tuple(done for done in finished if done.running.step <= step),
        lost_steps=max(0, committed - step),
    )
