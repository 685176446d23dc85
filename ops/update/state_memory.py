"""Versions of the training state in memory of a node, which its keeper makes and its workers map. NumPy only, no torch.

The file has addresses for the whole flat vector three times over, and pages for what lies on this node alone: a *bank*
has the arrays of a state, and element i of an array is at the same place in it on every node. So ranges of workers
may change, and a range that was a copy for another node may become a worker's own, without a byte being moved.

A version of the state is written into a bank that holds nothing still needed, in place of being copied afterwards: the
bank of the committed version is not written to before the next version is committed. Two banks take turns; a third one
is used while a checkpoint is written of a version, where the node has room for it.

    memory = StateMemory.reserve(total)                  # the keeper; others: StateMemory(borrow(number))
    memory.take(bank, lo, hi)                            # pages
    memory.arrays(bank, lo, hi)["master"][:] = ...
    memory.order = BankOrder(generation=3, step=7, held=1, next=0)

Before the banks lies what workers look at while they train (`order`), which of them may be writing (`present`), and, in
two places that are written in turn, what the keeper has to know (`index`): whoever has the memory has all of it, so a
keeper that dies is replaced by one that knows as much.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from ops.memory.node_memory import PAGE_BYTES, NodeMemory
from ops.shards import ARRAYS

BANKS = 3
TURNS = 2  # banks that take turns; the others are spare
_ITEM_BYTES = 4  # fp32, as all state of a run
SEATS = 1024  # of workers on a node
_TOTAL_AT, _SEATS_AT = 8, 64
_INDEX_AT, _INDEX_BYTES = PAGE_BYTES, 1 << 20
_HEADER_BYTES = _INDEX_AT + 2 * _INDEX_BYTES
_INDEX = struct.Struct("<QII")  # number of this writing, bytes, checksum
_GENERATIONS, _STEPS = 1 << 24, 1 << 32


@dataclass(frozen=True, kw_only=True, slots=True)
class BankOrder:
    """What workers of `generation` may count on: the version after `step` is safe, in the bank `held`, and the version
    after it goes into the bank `next`. Where the two are one bank, nothing but a checkpoint that is being written holds
    a version, and the state is updated in place."""

    generation: int
    step: int  # -1: before the first
    held: int
    next: int

    def pack(self) -> int:
        """One number of 64 bits, which a processor writes and reads as a whole."""
        assert 0 <= self.generation < _GENERATIONS and -1 <= self.step < _STEPS - 1
        return self.generation << 40 | self.step + 1 << 8 | self.held << 4 | self.next

    @classmethod
    def unpack(cls, packed: int) -> BankOrder:
        """The order that `pack` gave."""
        return cls(generation=packed >> 40, step=(packed >> 8) % _STEPS - 1, held=packed >> 4 & 0xF, next=packed & 0xF)


class StateMemory:
    """Banks of one node. A bank's pages may be taken and given back by range; every process sees the same ones."""

    def __init__(self, memory: NodeMemory) -> None:
        """Opens memory that `reserve` has made, here or in another process."""
        self.memory = memory
        self._order = np.frombuffer(memory.buffer, np.uint64, 1)
        # by seat: 1 while that worker may write
        self.present = np.frombuffer(memory.buffer, np.uint8, SEATS, _SEATS_AT)
        (self.total,) = (int(n) for n in np.frombuffer(memory.buffer, np.uint64, 1, _TOTAL_AT))

    @classmethod
    def reserve(cls, total: int) -> StateMemory:
        """New, for a flat vector of `total` elements; takes no room."""
        memory = NodeMemory.reserve("state", _HEADER_BYTES + BANKS * len(ARRAYS) * _array_bytes(total))
        np.frombuffer(memory.buffer, np.uint64, 1, _TOTAL_AT)[0] = total
        return cls(memory)

    def arrays(self, bank: int, lo: int, hi: int, names: tuple[str, ...] = ARRAYS) -> dict[str, np.ndarray]:
        """[hi - lo] of each array of a bank: views; touching one takes the pages that are not there yet."""
        return {
            name: np.frombuffer(self.memory.buffer, np.float32, hi - lo, self._offset(bank, ARRAYS.index(name), lo))
            for name in names
        }

    def take(self, bank: int, lo: int, hi: int, names: tuple[str, ...] = ARRAYS) -> None:
        """Have pages for a range of a bank. What is there stays as it is. Raises MemoryError without room."""
        for name in names if lo < hi else ():
            at = self._offset(bank, ARRAYS.index(name), lo)
            self.memory.take("state", at, at + (hi - lo) * _ITEM_BYTES)

    def give(self, bank: int, lo: int, hi: int) -> None:
        """Let go of a range of a bank, but for pages that hold a part of something else."""
        for number in range(len(ARRAYS)):
            at = self._offset(bank, number, lo)
            self.memory.give(at, at + (hi - lo) * _ITEM_BYTES)

    @property
    def taken_bytes(self) -> int:
        """Pages that are there, of all banks."""
        return self.memory.taken_bytes

    # -- what is known of it -------------------------------------------------------------------------------------------

    @property
    def order(self) -> BankOrder:
        """As the keeper has set it last."""
        return BankOrder.unpack(int(self._order[0]))

    @order.setter
    def order(self, order: BankOrder) -> None:
        self._order[0] = order.pack()

    @property
    def index(self) -> bytes:
        """What was written last, whole; b"" before that."""
        return max(self._indices(), default=(0, b""))[1]

    @index.setter
    def index(self, content: bytes) -> None:
        """A process that dies in the middle leaves what was written before."""
        if len(content) > _INDEX_BYTES - _INDEX.size:
            raise ValueError(f"an index of {len(content)} bytes is too long for {_INDEX_BYTES}.")
        number = max(self._indices(), default=(0, b""))[0] + 1
        at = _INDEX_AT + number % 2 * _INDEX_BYTES
        self.memory.buffer[at + _INDEX.size : at + _INDEX.size + len(content)] = content
        _INDEX.pack_into(self.memory.buffer, at, number, len(content), zlib.crc32(content, number))

    def _indices(self) -> list[tuple[int, bytes]]:
        """(number, content) of those that are whole."""
        found = []
        for at in (_INDEX_AT, _INDEX_AT + _INDEX_BYTES):
            number, length, checksum = _INDEX.unpack_from(self.memory.buffer, at)
            content = self.memory.buffer[at + _INDEX.size : at + _INDEX.size + min(length, _INDEX_BYTES)]
            if number and zlib.crc32(content, number) == checksum:
                found.append((number, content))
        return found

    def _offset(self, bank: int, array: int, element: int) -> int:
        assert 0 <= bank < BANKS and 0 <= element <= self.total
        return _HEADER_BYTES + (bank * len(ARRAYS) + array) * _array_bytes(self.total) + element * _ITEM_BYTES


def _array_bytes(total: int) -> int:
    """Bytes from one array to the next, each on pages of its own."""
    return -(-total * _ITEM_BYTES // PAGE_BYTES) * PAGE_BYTES
