"""The sum of the gradients of a node's workers: where it lies, and how each worker adds to it. One protocol, `NodeSum`,
and three ways:

    SharedSum  here           CPU workers map one piece of host memory, and add to it under locks on its ranges
    HostSum    ops.update.host_sum   the same memory; GPU workers copy their gradients to the host, whose CPU adds them
    PeerSum    ops.update.peer_sum   every GPU holds a part of the sum in its own memory, and the others add to it there

Every generation gets new memory. So where a worker dies in the middle of an addition, what it has left is never read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ops.comm.collectives import Group
from ops.memory.lending import Lender, borrow
from ops.memory.node_memory import NodeMemory, RangeLock
from ops.shards import Bounds, Slot

_WAITING_BYTES = 64 << 20  # of gradients that wait for the lock of their range; more are waited for


class Unreachable(RuntimeError):
    """The workers of a node cannot add to each other's memory in this way. All workers of the generation raise it, or
    none does. `no_room`, alike on all of them: it was for want of memory."""

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
        """The elements of the sum that this worker can read, as one flat tensor: all of them where it lies in host
        memory, this GPU's part where it lies in several GPUs."""
        ...

    def form(self, group: Group, bounds: Bounds, sends: Sequence[tuple[int, ...]]) -> None:
        """Begin a generation with a sum of zero.

        `bounds[r]` is the range [lo, hi) of the flat vector whose state rank r owns, `sends[r]` the ranks of other
        nodes to which it sends the node's sum of their ranges at the end of a step (`ops.update.node_routes`). So of
        its node's sum, rank r holds the ranges of itself and of these. Collective. Raises Unreachable on all workers,
        MemoryError without room."""
        ...

    def add(self, slot: Slot, gradient: Tensor) -> None:
        """Add the gradient of one parameter, of the slot's shape, to elements [slot.lo, slot.hi). It may wait for an
        addition of another worker, never for its forward or backward."""
        ...

    def flush(self) -> None:
        """Finish what `add` has begun: a worker that synchronizes with this one afterwards reads a sum that has it (on
        a GPU: in the order of streams)."""
        ...

    def part(self, lo: int, hi: int) -> Tensor:
        """The sum of elements [lo, hi) of the flat vector, a view [hi - lo]; they lie in one of the ranges that this
        rank holds."""
        ...

    def leave(self) -> None:
        """This worker writes into no other worker's memory any more. May be called any number of times."""
        ...

    def release(self) -> None:
        """Free this worker's memory, once all workers that go on have called `leave`. A process that could still write
        into it is ended first. May be called any number of times."""
        ...


class SharedSum:
    """The whole sum in host memory that the node's processes map. A gradient whose range another worker has locked
    waits in a queue, and is tried again when the next one is added."""

    name = "memory that the workers of a node share"
    _device: torch.device | None = None  # of the group's collectives; None: the host

    def __init__(self, total: int, dtype: torch.dtype, *, waiting_bytes: int = _WAITING_BYTES) -> None:
        """The sum of a flat vector [total] of gradients. With more than `waiting_bytes` of them in the queue `add`
        blocks."""
        self._total, self._dtype, self._waiting_bytes = total, dtype, waiting_bytes
        self.memory = torch.empty(0, dtype=dtype)
        self._group = Group.solo()
        self._lock: RangeLock | None = None  # on `memory`; None outside of a generation
        self._waiting: deque[tuple[Slot, Tensor]] = deque()  # gradients whose range another worker had locked

    def form(self, group: Group, bounds: Bounds, sends: Sequence[tuple[int, ...]]) -> None:
        """As `NodeSum.form`."""
        self._group = group
        memory = share(group, "gradients", self._total * self._dtype.itemsize, self._device)
        self._lock = RangeLock(memory)
        self.memory = torch.frombuffer(memory.buffer, dtype=self._dtype)
        memory.close()

    def add(self, slot: Slot, gradient: Tensor) -> None:
        """Add this gradient, and those in the queue, where their ranges are not locked now; keep the others in the
        queue."""
        self._waiting.append((slot, gradient))
        for _ in range(len(self._waiting)):
            slot, gradient = self._waiting.popleft()
            if not self._added(slot, gradient):
                self._waiting.append((slot, gradient))
        while sum(gradient.nbytes for _, gradient in self._waiting) > self._waiting_bytes:
            self._add_oldest()

    def flush(self) -> None:
        """Returns when the queue is empty, all of it added."""
        while self._waiting:
            self._add_oldest()

    def part(self, lo: int, hi: int) -> Tensor:
        """As `NodeSum.part`."""
        return self.memory[lo:hi]

    def leave(self) -> None:
        """Unmap the memory. It is freed when the last process has done so, or has died."""
        self._waiting.clear()
        if self._lock is not None:
            self._lock.close()
        self._lock, self.memory = None, torch.empty(0, dtype=self._dtype)

    def release(self) -> None:
        """Nothing to do: the memory belongs to no worker alone."""

    def _added(self, slot: Slot, gradient: Tensor) -> bool:
        """Add unless another worker has a lock on the range. Returns whether it was added."""
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
    """New memory of zeros that all ranks of this node map: the first of them makes it, the others have mapped it when
    this returns. Collective over all nodes, each of which gets its own; `device` is that of the group's collectives.

    Raises MemoryError on all workers when a node has no room, ConnectionError where that of the first cannot be mapped.
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
        meet(group, device)
    finally:
        if lender is not None:
            lender.close()
    return memory


def fellows_of(group: Group) -> list[int]:
    """The ranks of this node, this one included."""
    return [rank for rank in range(group.size) if group.nodes[rank] == group.nodes[group.rank]]


def exchange(group: Group, number: int, device: torch.device | None = None) -> list[int]:
    """The numbers that all ranks have passed, by rank. Collective; they go through memory of `device` where the group's
    collectives need it."""
    numbers = torch.zeros(group.size, dtype=torch.int64, device=device if group.on_device else None)
    numbers[group.rank] = number
    group.all_reduce(numbers)
    found = [int(one) for one in numbers.tolist()]
    group.check("meeting")  # on NCCL an aborted collective returns without an error
    return found


def meet(group: Group, device: torch.device | None = None) -> None:
    """A barrier of hosts: returns when every rank has called it. On NCCL a usual barrier only orders streams."""
    if group.size > 1:
        exchange(group, 0, device)
