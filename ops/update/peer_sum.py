"""The sum of a node's gradients in the memory of its GPUs: each holds some ranges of it, and the others add to them.

`add` copies a gradient to one of two staging buffers, after which backward may reuse its memory. From there kernels
(the pushes) add it to each range that it overlaps, on this GPU or another one. They run beside the backward pass and in
any order, and the worker whose GPU holds the range does nothing for them.

A GPU's memory may be freed only when no other process has it open. So every worker gives out the handle of its part
through a `Lender`, which knows the processes that have it, and sees when one dies. A worker that leaves closes what it
has opened; one that does not, because it hangs or is in no generation any more, is ended before the memory is freed.

What a device does is `PeerMemory`, a thin shell (ops.memory.cuda_memory). All decisions are here, tested without a GPU.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ops.comm.collectives import Group
from ops.kernels.push.reference import ALIGN, ALIGN_BYTES
from ops.memory.lending import BorrowedMemory, Lender, borrow
from ops.memory.node_memory import NodeMemory
from ops.shards import STAGE, Bounds, Slot
from ops.update.node_sum import Unreachable, exchange, fellows_of

log = logging.getLogger(__name__)

_PAGE = struct.Struct("q1024s")  # length of a handle, and the handle
_NO_ROOM = -1  # in place of the number by which a part is borrowed
_GRACE_S = 10.0  # for a worker that is in no generation any more to give back; one that goes on has given back already


class PeerMemory(Protocol):
    """What a GPU does for `PeerSum`. `turn` (0 or 1) names a staging buffer."""

    @property
    def device(self) -> torch.device: ...

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Memory [elements] of zeros that other processes can open. Raises RuntimeError where this device cannot do
        that, MemoryError where it has no room."""
        ...

    def free(self, memory: Tensor) -> None: ...

    def lend(self, memory: Tensor) -> bytes:
        """The handle by which other processes of the node `borrow` it. Raises RuntimeError where this device cannot."""
        ...

    def borrow(self, handle: bytes) -> int:
        """Open another process's memory. Returns its address in this one. Raises RuntimeError where this device cannot
        reach it, or where some of the additions that several devices make at a time would be lost, OSError where no
        library can say that."""
        ...

    def give_back(self, address: int) -> None:
        """Close what `borrow` has opened."""
        ...

    def stage(self, turn: int) -> None:
        """What is launched next may write into the staging buffer: it runs after the last push from there."""
        ...

    def push(self, staged: Tensor, address: int, turn: int) -> None:
        """Launch the addition of staged [n] to n elements at the address. It runs after what was launched before it,
        and beside what is launched next."""
        ...

    def pushed(self) -> None:
        """Returns when all pushes have ended, whatever else runs on the device, as an encode beside the end of a step
        does."""
        ...

    def wait(self) -> None:
        """Returns when nothing that was launched here runs any more."""
        ...


class PeerSum:
    """The sum of a node's gradients, with a part of it on each GPU of the node."""

    name = "the memory of the node's GPUs"

    def __init__(
        self, total: int, dtype: torch.dtype, staged_dtype: torch.dtype, peers: PeerMemory, stage: int = STAGE
    ) -> None:
        """The sum, in `dtype`, of a flat vector [total] of gradients. They are pushed in `staged_dtype`, in pieces of
        at most `stage` elements."""
        self._total, self._dtype, self._peers = total, dtype, peers
        self._stage, self._staged_dtype = stage, staged_dtype
        self.buffers: list[Tensor] = []
        self._turn = 0
        self._held: dict[tuple[int, int], int] = {}  # this rank's ranges, and where each begins in `memory`
        self._targets: list[tuple[int, int, int]] = []  # (lo, hi) of all ranges in their order, and the address of lo
        self._loans: list[tuple[int, BorrowedMemory]] = []  # address of each open part, and its handle's page
        self._lender: Lender | None = None
        self.memory = torch.empty(0, dtype=dtype, device=peers.device)

    def form(self, group: Group, bounds: Bounds, sends: Sequence[tuple[int, ...]]) -> None:
        """As `NodeSum.form`. Every worker opens the parts of all others of its node and adds a number to each, so that
        all find out together whether this works."""
        held = {rank: [rank, *sends[rank]] for rank in fellows_of(group)}
        starts = {rank: _starts([bounds[one] for one in held[rank]]) for rank in held}
        number, failure = 0, ""
        try:
            self.reserve(group.rank, bounds, sends)
            number = self._lend()
        except MemoryError as error:
            number, failure = _NO_ROOM, str(error)
        except (RuntimeError, OSError) as error:
            failure = str(error)
        numbers = exchange(group, number, self._peers.device)
        _agree(failure, min(numbers) > 0, no_room=_NO_ROOM in numbers)
        bases = {}
        try:
            for rank in held:
                bases[rank] = self.memory.data_ptr() if rank == group.rank else self._borrow(numbers[rank])
        except (RuntimeError, OSError) as error:
            failure = str(error)
        _agree(failure, min(exchange(group, int(not failure), self._peers.device)) > 0)
        self._targets = sorted(
            (*bounds[one], bases[rank] + start * self._dtype.itemsize)
            for rank in held
            for one, start in zip(held[rank], starts[rank][:-1], strict=True)
        )
        self._try_all(group, [bases[rank] + starts[rank][-1] * self._dtype.itemsize for rank in held])

    def reserve(self, rank: int, bounds: Bounds, sends: Sequence[tuple[int, ...]]) -> None:
        """Allocate this rank's part of the sum, zeros, and the staging buffers."""
        ranges = [bounds[one] for one in (rank, *sends[rank])]
        *starts, end = _starts(ranges)
        if not self.buffers:
            size = self._stage + 2 * ALIGN
            self.buffers = [torch.empty(size, dtype=self._staged_dtype, device=self._peers.device) for _ in range(2)]
        # the last block of a push may reach beyond what is held: zeros
        self.memory = self._peers.allocate(end + ALIGN, self._dtype)
        self._held = dict(zip(ranges, starts, strict=True))

    def add(self, slot: Slot, gradient: Tensor) -> None:
        """Push the gradient to every range of the node that it overlaps, piece by piece."""
        flat = gradient.reshape(-1)
        for lo, hi, address in self._targets:
            first, last = max(lo, slot.lo), min(hi, slot.hi)
            for start in range(first, last, self._stage):
                end = min(last, start + self._stage)
                self._push(flat[start - slot.lo : end - slot.lo], address + (start - lo) * self._dtype.itemsize)

    def flush(self) -> None:
        """As `NodeSum.flush`. It blocks the host until the pushes have ended, so that workers may synchronize there as
        well as on their devices."""
        self._peers.pushed()

    def part(self, lo: int, hi: int) -> Tensor:
        """As `NodeSum.part`."""
        if lo == hi:
            return self.memory[:0]
        (start,) = [at + lo - first for (first, last), at in self._held.items() if first <= lo and hi <= last]
        return self.memory[start : start + hi - lo]

    def leave(self) -> None:
        """Close the parts of other workers, after the pushes to them."""
        self._targets = []
        if self._loans:
            self._peers.wait()
        while self._loans:
            address, page = self._loans.pop()
            self._peers.give_back(address)
            page.close()  # the owner counts this process no more

    def release(self) -> None:
        """Free this rank's part and the staging buffers. A process that has the part open gets a few seconds to close
        it, and is ended then. Raises TimeoutError when it can do neither."""
        if self._lender is not None:
            self._lender.fence(keep={os.getpid()}, grace_s=_GRACE_S)
            self._lender.close()
            self._lender = None
        if self.memory.numel():
            self._peers.wait()
            memory, self.memory = self.memory, self.memory[:0].clone()
            self._held = {}
            self._peers.free(memory)
        self.buffers = []

    # -- memory --------------------------------------------------------------------------------------------------------

    def _lend(self) -> int:
        handle = self._peers.lend(self.memory)
        page = NodeMemory.create("handle", _PAGE.size)
        page.buffer[:] = _PAGE.pack(len(handle), handle)
        self._lender = Lender(page)
        return self._lender.number

    def _borrow(self, number: int) -> int:
        page = borrow(number)
        length, handle = _PAGE.unpack(page.buffer[:])
        try:
            address = self._peers.borrow(handle[:length])
        except BaseException:
            page.close()
            raise
        self._loans.append((address, page))
        return address

    def _try_all(self, group: Group, ends: Sequence[int]) -> None:
        """Add a one at the spare end of every worker's part, `ends`, and look whether as many as there are workers on
        the node have arrived at this one's."""
        failure = ""
        try:
            one = torch.zeros(ALIGN, dtype=self._staged_dtype)
            one[0] = 1
            for end in ends:
                self._push(one.to(self._peers.device), end)
            self._peers.pushed()
        except RuntimeError as error:
            failure = str(error)
        _agree(failure, min(exchange(group, int(not failure), self._peers.device)) > 0)
        behind = self.memory[-ALIGN:]
        if (came := float(behind[0])) != len(ends):
            failure = f"of {len(ends)} workers of a node {came:g} could write into memory of one"
        behind.zero_()
        self._peers.wait()
        _agree(failure, min(exchange(group, int(not failure), self._peers.device)) > 0)

    # -- additions -----------------------------------------------------------------------------------------------------

    def _push(self, part: Tensor, address: int) -> None:
        """Add part [n] to n elements at the address. A push takes whole blocks at an aligned address, so the part is
        staged with zeros before and after it, which change nothing where they are added."""
        lead = address % ALIGN_BYTES // self._dtype.itemsize
        end = lead + part.numel()
        self._turn = 1 - self._turn
        staged = self.buffers[self._turn][: -(-end // ALIGN) * ALIGN]
        self._peers.stage(self._turn)
        staged[:lead].zero_()
        staged[lead:end].copy_(part)
        staged[end:].zero_()
        self._peers.push(staged, address - lead * self._dtype.itemsize, self._turn)


def _starts(ranges: Bounds) -> list[int]:
    """Where each range begins in a part's memory, and where the last one ends; all are multiples of ALIGN."""
    starts = [0]
    for lo, hi in ranges:
        starts.append(starts[-1] + -(-(hi - lo) // ALIGN) * ALIGN)
    return starts


def _agree(failure: str, all_could: bool, no_room: bool = False) -> None:
    """Raise Unreachable where this worker or another one could not."""
    if failure or not all_could:
        raise Unreachable(failure or "another worker of this generation could not", no_room)
