"""Where the gradient of a node lies, and how each of its workers adds to it: one protocol, three ways.

`SharedSum` (here): host memory that CPU workers of a node map, with locks on its ranges. `HostSum` (ops.host_sum): the
same memory for GPU workers, whose gradients are copied there. `PeerSum` (ops.peer_sum): each GPU holds a part in its
own memory, and the others write into it.

Memory is new in each generation, so a worker that died in the middle of an addition leaves nothing that is read again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ops.comm import Group
from ops.lending import Lender, borrow
from ops.node_memory import NodeMemory, RangeLock
from ops.shards import Bounds, Slot

_WAITING_BYTES = 64 << 20  # of gradients that wait for the lock of their range; more are waited for


class Unreachable(RuntimeError):
    """The workers of a node cannot reach each other's memory in this way. Raised on all workers or on none, and all
    know whether it was for want of memory (`no_room`)."""

    def __init__(self, why: str, no_room: bool = False) -> None:
        super().__init__(why)
        self.no_room = no_room


class NodeSum(Protocol):
    """The sum of one node's gradients, as one of its workers sees it. Not thread-safe."""

    @property
    def name(self) -> str:
        """Where it lies, for a person."""
        ...

    @property
    def memory(self) -> Tensor:
        """What of the sum lies here, as one tensor: all of it, or this worker's part."""
        ...

    def form(self, group: Group, bounds: Bounds, sends: Sequence[tuple[int, ...]]) -> None:
        """Begin a generation with a sum of zero. Rank r holds, for its node, the ranges `bounds` of itself and of the
        ranks `sends[r]` of other nodes. Collective. Raises Unreachable on all workers, MemoryError without room."""
        ...

    def add(self, slot: Slot, gradient: Tensor) -> None:
        """Add a parameter's gradient, of the slot's shape. Waits for no other worker's computation."""
        ...

    def flush(self) -> None:
        """All that was added here is in the sum for a worker that has met this one since (on a GPU: in the stream)."""
        ...

    def part(self, lo: int, hi: int) -> Tensor:
        """[hi - lo] of the flat vector, within one of the ranges that this rank holds: a view."""
        ...

    def leave(self) -> None:
        """This worker writes into no other worker's memory any more. Any number of times."""
        ...

    def release(self) -> None:
        """All workers that go on have left: the memory may go. Whoever still writes into it is ended. Any number of
        times."""
        ...


class SharedSum:
    """All of it in memory that the node's processes map. A range that is locked is tried again with the next one."""

    name = "memory that the workers of a node share"

    def __init__(self, total: int, dtype: torch.dtype, *, waiting_bytes: int = _WAITING_BYTES) -> None:
        """The sum of a flat vector [total] of gradients. Up to `waiting_bytes` of them wait for a lock meanwhile."""
        self._total, self._dtype, self._waiting_bytes = total, dtype, waiting_bytes
        self.memory = torch.empty(0, dtype=dtype)
        self._group = Group.solo()
        self._lock: RangeLock | None = None  # on `memory`; None outside of a generation
        self._waiting: deque[tuple[Slot, Tensor]] = deque()  # gradients whose range another worker had locked

    def form(self, group: Group, bounds: Bounds, sends: Sequence[tuple[int, ...]]) -> None:
        """As `NodeSum.form`."""
        self._group = group
        memory = share(group, "gradients", self._total * self._dtype.itemsize)
        self._lock = RangeLock(memory)
        self.memory = torch.frombuffer(memory.buffer, dtype=self._dtype)
        memory.close()

    def add(self, slot: Slot, gradient: Tensor) -> None:
        """Add it, and those before it whose range was locked, as far as locks are free now."""
        self._waiting.append((slot, gradient))
        for _ in range(len(self._waiting)):
            slot, gradient = self._waiting.popleft()
            if not self._added(slot, gradient):
                self._waiting.append((slot, gradient))
        while sum(gradient.nbytes for _, gradient in self._waiting) > self._waiting_bytes:
            self._add_oldest()

    def flush(self) -> None:
        """Returns when all that was given here is added."""
        while self._waiting:
            self._add_oldest()

    def part(self, lo: int, hi: int) -> Tensor:
        """As `NodeSum.part`."""
        return self.memory[lo:hi]

    def leave(self) -> None:
        """Let the memory go: it lives until no process has it."""
        self._waiting.clear()
        if self._lock is not None:
            self._lock.close()
        self._lock, self.memory = None, torch.empty(0, dtype=self._dtype)

    def release(self) -> None:
        """Nothing: memory of the last generation belongs to no worker."""

    def _added(self, slot: Slot, gradient: Tensor) -> bool:
        """Add unless another worker is at the same parameter."""
        lock, (lo, hi) = self._formed(), self._bytes_of(slot)
        if not lock.try_acquire(lo, hi):
            return False
        self._add(slot, gradient)
        lock.release(lo, hi)
        return True

    def _add_oldest(self) -> None:
        slot, gradient = self._waiting.popleft()
        lock, (lo, hi) = self._formed(), self._bytes_of(slot)
        lock.acquire(lo, hi, self._check)
        self._add(slot, gradient)
        lock.release(lo, hi)

    def _add(self, slot: Slot, gradient: Tensor) -> None:
        self.memory[slot.lo : slot.hi].view(slot.shape).add_(gradient)

    def _bytes_of(self, slot: Slot) -> tuple[int, int]:
        return slot.lo * self._dtype.itemsize, slot.hi * self._dtype.itemsize

    def _formed(self) -> RangeLock:
        assert self._lock is not None, "form comes before the first backward"
        return self._lock

    def _check(self) -> None:
        self._group.check("adding a gradient in the node's memory")


def share(group: Group, name: str, num_bytes: int, device: torch.device | None = None) -> NodeMemory:
    """New memory of this node, zero: made by its first rank, mapped by its others when this returns. Collective;
    `device` is that of the group's collectives.

    Raises MemoryError on all workers when a node has no room, ConnectionError.
    """
    fellows = fellows_of(group)
    memory: NodeMemory | None = None
    lender: Lender | None = None
    failed: MemoryError | None = None
    if group.rank == fellows[0]:
        try:
            memory = NodeMemory.create(name, num_bytes)
        except MemoryError as error:
            failed = error
        if memory is not None and len(fellows) > 1:
            lender = Lender(memory)
    try:
        numbers = exchange(group, lender.number if lender is not None else -1 if failed is not None else 0, device)
        if failed is not None:
            raise failed
        if min(numbers) < 0:
            raise MemoryError(f"another node has no room for {num_bytes / 2**20:,.0f} MiB of shared memory ({name}).")
        if memory is None:
            memory = borrow(numbers[fellows[0]])
        meet(group, device or torch.device("cpu"))
    finally:
        if lender is not None:
            lender.close()
    return memory


def fellows_of(group: Group) -> list[int]:
    """The ranks of this node, this one included."""
    return [rank for rank in range(group.size) if group.nodes[rank] == group.nodes[group.rank]]


def exchange(group: Group, number: int, device: torch.device | None = None) -> list[int]:
    """The number of every rank, over the `device` where the group needs one. Collective."""
    numbers = torch.zeros(group.size, dtype=torch.int64)
    numbers[group.rank] = number
    if group.on_device and device is not None:
        numbers = numbers.to(device)
    group.all_reduce(numbers)
    found = [int(one) for one in numbers.tolist()]
    group.check("meeting")  # on NCCL an aborted collective returns without an error
    return found


def meet(group: Group, device: torch.device) -> None:
    """Returns when every rank has called it: on NCCL, too, where a barrier only orders streams."""
    if group.size > 1:
        exchange(group, 0, device)
