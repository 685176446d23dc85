"""A worker's part of the training state in the memory of its node, from the moment when it enters a generation.

The node's keeper lends the memory. What the keeper holds of the version to go on from is there already, also what it
had copied for another node; the rest comes from other keepers, from a checkpoint or, at the start of a run, from the
first weights. The worker lends the memory in its turn: to a keeper that takes the place of one that has died.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.held_state import JoinAnswer, Origin
from actors.messages import FormTask
from actors.ray_calls import GONE
from actors.state.checkpoint_files import load
from actors.state.pulling import PIECE, Counts, pull, value
from ops.memory.lending import Lender, borrow, new_number
from ops.shards import ShardState, cut, missing
from ops.update.own_state import ShardBanks
from ops.update.state_memory import StateMemory
from ops.waiting import first_line

_AT_ONCE = 1 << 26  # elements that are read from a checkpoint, or drawn, at a time
_PAUSE_S = 0.02  # before a keeper is asked again whether the generation has begun on its node

FirstShard = Callable[[int, int], ShardState]
"""State of [lo, hi) of the flat vector before the first update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A worker's range of the version that a generation begins with, in place."""

    banks: ShardBanks
    shard: ShardState  # views of the bank that is held
    made_in: int  # the generation that has computed the version


class HomeMemory:
    """One per worker. Not thread-safe."""

    def __init__(self, *, made_elements: int = _AT_ONCE, pulled_elements: int = PIECE) -> None:
        """`made_elements` are read from a checkpoint, or drawn, at a time; `pulled_elements` come from a keeper."""
        self._made_elements, self._pulled_elements = made_elements, pulled_elements
        self.lends = new_number()  # the number by which this worker lends the memory, once it has it
        self._memory: StateMemory | None = None
        self._number = 0  # of the keeper's lender
        self._lender: Lender | None = None
        self._seat: int | None = None  # on the node; None outside of generations

    def enter(
        self, task: FormTask, lo: int, hi: int, names: Sequence[str], first: FirstShard, go_on: Callable[[], None]
    ) -> Entry:
        """Have [lo, hi) of the state that the generation begins with in the bank that is held, with pages for the next
        version beside it. `names` of the arrays that will be trained. `go_on` is called while something is awaited, and
        may raise. Raises MemoryError without room, ConnectionError where the memory cannot be borrowed."""
        joined = self._joined(task, lo, hi, go_on)
        if joined.number != self._number:
            self._take_up(StateMemory(borrow(joined.number)), joined.number)
        memory = self._memory
        assert memory is not None
        self._seat = joined.seat
        banks = ShardBanks(memory, task.generation)
        wanted = tuple(dict.fromkeys((*joined.names, *names)))
        for bank in {banks.current, memory.order.next}:
            memory.take(bank, lo, hi, wanted)
        counts = Counts(
            names=joined.names,
            updates=joined.updates,
            part_updates=joined.part_updates,
            distances=joined.distances,
        )
        into = memory.arrays(banks.current, lo, hi)
        for a, b in missing(joined.ranges, lo, hi):
            gap = {name: array[a - lo : b - lo] for name, array in into.items()}
            counts = self._filled(task.origin, a, b, gap, first, go_on)
        shard = ShardState(
            updates=counts.updates,
            lo=lo,
            hi=hi,
            total=memory.total,
            arrays={name: into[name] for name in counts.names},
            part_updates=counts.part_updates,
            distances=counts.distances,
        )
        return Entry(banks=banks, shard=shard, made_in=joined.made_in)

    def leave(self) -> None:
        """Say that this worker writes into the node's memory no more; a worker that has not said so is ended before
        another writes there. May be called any number of times."""
        if self._memory is not None and self._seat is not None:
            self._memory.present[self._seat] = 0
        self._seat = None

    def _joined(self, task: FormTask, lo: int, hi: int, go_on: Callable[[], None]) -> JoinAnswer:
        while (joined := value(task.home.join.remote(task.generation, os.getpid(), lo, hi), go_on)) is None:
            go_on()
            time.sleep(_PAUSE_S)
        return joined

    def _take_up(self, memory: StateMemory, number: int) -> None:
        if self._lender is not None:
            self._lender.close()
        self._memory, self._number = memory, number
        self._lender = Lender(memory.memory, self.lends)

    def _filled(
        self,
        origin: Origin | None,
        lo: int,
        hi: int,
        into: Mapping[str, np.ndarray],
        first: FirstShard,
        go_on: Callable[[], None],
    ) -> Counts:
        """Bring what no process of this node has."""
        if origin is not None and origin.checkpoint is None:
            return pulled(origin, lo, hi, into, go_on, self._pulled_elements)
        whole = load(Path(origin.checkpoint))[1] if origin is not None and origin.checkpoint is not None else None
        counts: Counts | None = None
        for a in range(lo, hi, self._made_elements):
            b = min(hi, a + self._made_elements)
            shard = first(a, b) if whole is None else cut(whole, a, b)
            for name, array in shard.arrays.items():
                into[name][a - lo : b - lo] = array
            counts = Counts.of(shard)
            go_on()
        assert counts is not None, "a gap is not empty"
        return counts


def pulled(
    origin: Origin, lo: int, hi: int, into: Mapping[str, np.ndarray], go_on: Callable[[], None], piece: int
) -> Counts:
    """[lo, hi) of the origin's version from the keepers that hold it, `piece` elements at a time. One that has died, or
    lies beyond a network that fails, is passed over: another may hold the same. Raises RuntimeError where none does."""
    version = (origin.step, origin.generation)
    counts: Counts | None = None
    here: list[tuple[int, int]] = []
    gone = ""
    for keeper in origin.keepers:
        try:
            for held in value(keeper.held.remote(*version), go_on):
                for c, d in missing(here, max(held.lo, lo), min(held.hi, hi)):
                    part = {name: array[c - lo : d - lo] for name, array in into.items()}
                    if (found := pull(keeper, version, c, d, part, go_on, piece_elements=piece)) is not None:
                        counts = found
                        here.append((c, d))
        except GONE as error:
            gone = f" ({first_line(error)})"
    if counts is None or missing(here, lo, hi):
        raise RuntimeError(
            f"{missing(here, lo, hi)} of the state after step {origin.step} is held by nobody any more{gone}: the "
            f"generation begins again from what is."
        )
    return counts
