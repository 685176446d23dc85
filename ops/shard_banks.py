"""The versions of one worker's range in the memory of its node (ops.state_memory), as that worker writes them.

A worker writes the next version into another bank than the one that holds what others count on, and waits for that bank
to be free: until the version before it is committed. A version that no other process counts on yet is updated where it
is.

    banks = ShardBanks(memory, generation)      # the bank that is held has the worker's range of the version
    target = banks.target(check)                # where the next version goes: another bank, or the current one
    ...                                         # all of the range is written there
    banks.written(target)
    banks.seal(step)                            # others count on it from now on
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ops.state_memory import StateMemory
from ops.waiting import GroupError

_PAUSES_S = (2e-4, 1e-2)  # between two looks whether the version is committed: the first and the longest


class ShardBanks:
    """Which bank has the newest version of a worker in a generation, and which one the next. Not thread-safe."""

    def __init__(self, memory: StateMemory, generation: int) -> None:
        """The generation has begun: `memory.order` is its."""
        order = memory.order
        assert order.generation == generation, f"the memory is in generation {order.generation}, not {generation}"
        self.memory = memory
        self.current = order.held
        self._generation = generation
        self._sealed: int | None = order.step  # step of the current version; None: no other process counts on it

    @property
    def is_sealed(self) -> bool:
        """Whether others count on the current version."""
        return self._sealed is not None

    def holds(self, step: int) -> bool:
        """Whether the current version is that after this step, as others know it."""
        return self._sealed == step

    def target(self, check: Callable[[], None]) -> int:
        """The bank for the next version. Waits while the current one is not safe elsewhere, which a commit says;
        `check` is called meanwhile, and may raise. Raises GroupError when another generation has begun."""
        if self._sealed is None:
            return self.current
        pause = _PAUSES_S[0]
        while True:
            order = self.memory.order
            if order.generation != self._generation:
                raise GroupError(f"generation {self._generation} has ended: the state is that of {order.generation}")
            if order.step >= self._sealed:
                return order.next
            check()
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])

    def written(self, bank: int) -> None:
        """A version that no other process counts on yet is in this bank, whole, or will be before it is sealed for
        others."""
        self.current, self._sealed = bank, None

    def seal(self, step: int) -> None:
        """The current version is that after `step`, and others count on it."""
        self._sealed = step

    def tensors(self, bank: int, lo: int, hi: int, names: Sequence[str]) -> dict[str, Tensor]:
        """[hi - lo] of these arrays of a bank, in place."""
        return {name: torch.from_numpy(a) for name, a in self.memory.arrays(bank, lo, hi, tuple(names)).items()}
