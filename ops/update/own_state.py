"""Optimizer state of one worker's range: where it lies, and how one version of it follows another.

On a device, or in host memory of the worker's own, it is updated in place, and others get copies. In the memory of its
node (`ShardBanks`) it is itself what others count on: the next version is then written beside it, piece by piece,
each brought there right before it is updated, while it is in the cache. So there is a whole version at every moment,
whoever dies, and nothing is copied for a snapshot.

    state.form(banks)                           # a generation; None: there is no memory of a node
    state.take(shard)                           # or `begin`, without one
    state.open(check)                           # an update: waits until the last version is safe
    arrays = state.bring(slice(0, 1000))        # of the version that is coming, with the values of the one before it
    ...
    state.close()                               # it is the newest one
    export = state.export(step, shard_of, check)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from ops.shards import ShardState
from ops.update.shard_export import CopyArrays, CopyAtOnce, ShardExport, copies_of
from ops.update.state_memory import StateMemory
from ops.waiting import GroupError

_PAUSES_S = (2e-4, 1e-2)  # between two looks whether the version is committed: the first and the longest

Check = Callable[[], None]
ShardOf = Callable[[Mapping[str, Tensor]], ShardState]
"""A shard of these arrays in host memory, with the counts that the state has now."""


class ShardBanks:
    """Which bank of a node's memory has the newest version of a worker's range in a generation, and which one the next.
    Not thread-safe.

    The next version goes into another bank than the one that holds what others count on; that bank is free once the
    version before it is committed, and is waited for. A version that no other process counts on yet is updated where it
    is.

    banks = ShardBanks(memory, generation)      # the bank that is held has the worker's range of the version
    target = banks.target(check)                # where the next version goes: another bank, or the current one
    ...                                         # all of the range is written there
    banks.written(target)
    banks.seal(step)                            # others count on it from now on
    """

    def __init__(self, memory: StateMemory, generation: int) -> None:
        """The generation has begun: `memory.order` is that of this generation."""
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

    def target(self, check: Check) -> int:
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


class OwnState:
    """The state of one worker's range. Not thread-safe; `copy_arrays` may copy beside it."""

    def __init__(self, device: torch.device, dtype: torch.dtype, names: Sequence[str]) -> None:
        """`names` of its arrays; those that a state lacks at first are made (`take`)."""
        self.device, self.dtype, self.names = device, dtype, tuple(names)
        self.copy_arrays: CopyArrays | None = copies_of(device)
        self.arrays: dict[str, Tensor] = {}  # of the newest version, of the own range
        self._coming: dict[str, Tensor] = {}  # of the one that is being written; the same where it replaces the newest
        self._target = 0  # the bank that it goes into
        self._banks: ShardBanks | None = None
        self._lo = self._hi = 0
        self._export: ShardExport | None = None  # whose copy may still be reading the state
        self.held_up_s = 0.0  # longer updates and exports, as others count on the state; its reader sets it to 0

    @property
    def in_banks(self) -> bool:
        """Whether the state lies in the memory of its node."""
        return self._banks is not None and self.copy_arrays is None

    def form(self, banks: ShardBanks | None) -> None:
        """Begin a generation. The state of the last one is let go; `take` or `begin` come next."""
        self.settle()
        if self.copy_arrays is not None:
            self.copy_arrays.release()
        self._banks, self.arrays, self._coming = banks, {}, {}

    def begin(self, master: Tensor) -> None:
        """Begin with these weights, before any update; the tensor becomes part of the state."""
        self.arrays = {"master": master, "exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
        self._complete(())

    def take(self, shard: ShardState) -> None:
        """Go on from this shard, which with banks is what lies in the current one."""
        self._lo, self._hi = shard.lo, shard.hi
        if self.in_banks:
            assert self._banks is not None
            self.arrays = self._banks.tensors(self._banks.current, shard.lo, shard.hi, self.names)
        else:
            self.arrays = {
                name: torch.from_numpy(array).to(self.device, self.dtype, copy=self._banks is not None)
                for name, array in shard.arrays.items()
                if name in self.names
            }
        self._complete(shard.arrays)

    def _complete(self, there: Collection[str]) -> None:
        """Make arrays that are not `there`, before the first update or because they were off until now: the average and
        Prodigy's start `p0` begin with the weights, Prodigy's sum `s` with 0."""
        master = self.arrays["master"]
        for name in self.names:
            if name in ("ema", "s", "p0") and name not in there:
                array = self.arrays.setdefault(name, torch.empty_like(master))
                array.zero_() if name == "s" else array.copy_(master)

    def leave(self) -> None:
        """The generation has ended: nothing is written into banks any more. Any number of times."""
        self.settle()
        if self._banks is not None:
            self._banks, self.arrays, self._coming = None, {}, {}

    def settle(self) -> None:
        """Before the state changes or is copied again: returns when the copy that was begun has read all of it."""
        export, self._export = self._export, None
        if export is not None:
            began = time.perf_counter()
            export.wait()
            self.held_up_s += time.perf_counter() - began

    # -- an update -----------------------------------------------------------------------------------------------------

    def open(self, check: Check) -> None:
        """The next version is about to be written. Waits for a copy that reads this one, and until nothing needs what
        is in the bank that it goes into; `check` is called meanwhile, and may raise."""
        self.settle()
        self._coming = self.arrays
        if self.in_banks:
            assert self._banks is not None
            began = time.perf_counter()
            self._target = self._banks.target(check)
            self.held_up_s += time.perf_counter() - began
            if self._target != self._banks.current:
                self._coming = self._banks.tensors(self._target, self._lo, self._hi, self.names)

    def bring(self, own: slice) -> dict[str, Tensor]:
        """A part of the version that is coming, with the values that it has in this one."""
        parts = self.brought(own)
        if self._coming is not self.arrays:
            began = time.perf_counter()
            for name, part in parts.items():
                part.copy_(self.arrays[name][own])
            self.held_up_s += time.perf_counter() - began
        return parts

    def brought(self, own: slice) -> dict[str, Tensor]:
        """A part that `bring` has brought, as it is now."""
        return {name: array[own] for name, array in self._coming.items()}

    def close(self) -> None:
        """All parts have been brought, and written: it is the newest version."""
        if self.in_banks:
            assert self._banks is not None
            self._banks.written(self._target)
        self.arrays = self._coming

    # -- others --------------------------------------------------------------------------------------------------------

    def export(self, step: int, shard_of: ShardOf, check: Check) -> ShardExport:
        """The newest version as that after `step`, which others count on from now on. On a device, or without banks, a
        copy that may still be made beside what comes, until the next `open`."""
        self.settle()
        if self.in_banks:
            assert self._banks is not None
            if self._banks.is_sealed and not self._banks.holds(step):  # a step that changed nothing has a version too
                self.open(check)
                self.bring(slice(None))
                self.close()
            self._banks.seal(step)
            return ShardExport(shard=shard_of(self.arrays), bank=self._banks.current)
        self._export = copied(self._banks, step, self.arrays, shard_of, self.copy_arrays or CopyAtOnce(), check)
        return self._export


def copied(
    banks: ShardBanks | None,
    step: int,
    arrays: Mapping[str, Tensor],
    shard_of: ShardOf,
    copy: CopyArrays,
    check: Check,
) -> ShardExport:
    """A copy of a state that lies elsewhere, as the version after `step`: in the next bank, or in memory of its own.
    Waits until nothing needs what is in that bank."""
    if banks is None:
        into = {name: torch.empty_like(array, device="cpu") for name, array in arrays.items()}
        return ShardExport(shard=shard_of(into), wait=copy(arrays, into))
    target = banks.target(check)
    range_of = shard_of({})
    into = banks.tensors(target, range_of.lo, range_of.hi, tuple(arrays))
    wait = copy(arrays, into)
    banks.written(target)
    banks.seal(step)
    return ShardExport(shard=shard_of(into), bank=target, wait=wait)
