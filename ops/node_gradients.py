"""One gradient per node: its workers add into memory that they share, each pass as backward makes it.

A worker takes the lock of a parameter's range, adds, and lets go. It waits for no other worker's computation: a range
that is locked is tried again with the next parameter. At the end of a step all workers of a node read what they own
from the same memory, so inside a node nothing is sent; between nodes each range goes once to its owner, which adds in
the order of nodes. The fp32 gradient is held once per node in place of once per worker.

Additions come in the order of arrival: another order of the same fp32 sum, so two runs of one plan differ by rounding.
The parameters stay equal on all workers: each element is computed once.

The memory is new in each generation, so a worker that died in the middle of an addition leaves nothing that is read
again, and one that was stopped and goes on later writes into memory that nobody has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ops.comm import Group
from ops.gradient_sum import Bounds
from ops.lending import Lender, borrow
from ops.node_memory import NodeMemory, RangeLock
from ops.shards import Slot

_WAITING_BYTES = 64 << 20  # of gradients that wait for the lock of their range; more are waited for
_EXCHANGE = 1 << 21  # elements of a range that go between nodes at a time


class NodeGradients:
    """The `Gradients` of a worker on a CPU."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Sequence[Slot], dtype: torch.dtype) -> None:
        device = parameters[0].device
        if device.type != "cpu":
            raise ValueError(
                f"train.memory.gradients node adds in memory that CPU workers share, and this worker is on {device}. "
                f"Set train.memory.gradients: own, or auto."
            )
        self._parameters, self._layout, self._dtype = parameters, layout, dtype
        self._group = Group.solo()
        self._bounds: Bounds = [(0, layout[-1].hi)]
        self._flat = torch.empty(0, dtype=dtype)
        self._lock: RangeLock | None = None  # on the memory of `_flat`; None before the first generation
        self._waiting: deque[tuple[int, Tensor]] = deque()  # parameters whose range another worker had locked

    def form(self, group: Group, bounds: Bounds) -> None:
        """As `Gradients.form`. Raises MemoryError where the node has no room for the gradient."""
        self._leave()
        if group.size > 1:
            group.barrier()  # all have let go of the last memory: the node need not have room for both
        self._group, self._bounds = group, bounds
        memory = share(group, "gradients", self._layout[-1].hi * self._dtype.itemsize)
        self._lock = RangeLock(memory)
        self._flat = torch.frombuffer(memory.buffer, dtype=self._dtype)
        memory.close()
        self._sends = routes(group.nodes)

    @property
    def flat(self) -> Tensor:
        """[total], of this node."""
        return self._flat

    def begin_step(self) -> None:
        """Nothing of this worker is left over; the node's memory is zero since its last use."""
        self._waiting.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def received(self, index: int) -> None:
        """Add the parameter's gradient, and those before it whose range was locked, as far as locks are free now."""
        parameter = self._parameters[index]
        assert parameter.grad is not None, "backward has just made it"
        if parameter.grad.numel():
            self._waiting.append((index, parameter.grad))
        parameter.grad = None
        for _ in range(len(self._waiting)):
            index, gradient = self._waiting.popleft()
            if not self._added(index, gradient):
                self._waiting.append((index, gradient))
        while sum(gradient.nbytes for _, gradient in self._waiting) > _WAITING_BYTES:
            self._add_oldest()

    def watch(self) -> None:
        """Nothing: there is no sum to start."""

    def start(self) -> None:
        """Nothing, see `watch`."""

    def finish(self) -> None:
        """Add what waits, wait until all workers have, and exchange between nodes."""
        self.add_waiting()
        if self._group.size > 1:
            self._group.barrier()
        if len(set(self._group.nodes)) > 1:
            longest = max(hi - lo for lo, hi in self._bounds)
            for start in range(0, longest, _EXCHANGE):
                self._exchange([(min(hi, lo + start), min(hi, lo + start + _EXCHANGE)) for lo, hi in self._bounds])

    def add_waiting(self) -> None:
        """Returns when all that was received here is added."""
        while self._waiting:
            self._add_oldest()

    def used(self, lo: int, hi: int) -> None:
        """Zero it for the next step, which nobody begins before all parameters have come."""
        self._flat[lo:hi].zero_()

    def drop(self) -> None:
        """Zero the own range; returns when all have."""
        self.used(*self._bounds[self._group.rank])
        if self._group.size > 1:
            self._group.barrier()

    # -- additions -----------------------------------------------------------------------------------------------------

    def _added(self, index: int, gradient: Tensor) -> bool:
        """Add unless another worker is at the same parameter."""
        lock, (lo, hi) = self._formed(), self._bytes_of(index)
        if not lock.try_acquire(lo, hi):
            return False
        self._add(index, gradient)
        lock.release(lo, hi)
        return True

    def _add_oldest(self) -> None:
        index, gradient = self._waiting.popleft()
        lock, (lo, hi) = self._formed(), self._bytes_of(index)
        lock.acquire(lo, hi, self._check)
        self._add(index, gradient)
        lock.release(lo, hi)

    def _add(self, index: int, gradient: Tensor) -> None:
        slot = self._layout[index]
        self._flat[slot.lo : slot.hi].view(slot.shape).add_(gradient)

    def _bytes_of(self, index: int) -> tuple[int, int]:
        slot = self._layout[index]
        return slot.lo * self._dtype.itemsize, slot.hi * self._dtype.itemsize

    def _formed(self) -> RangeLock:
        assert self._lock is not None, "form comes before the first backward"
        return self._lock

    def _check(self) -> None:
        self._group.check("adding a gradient in the node's memory")

    # -- between nodes -------------------------------------------------------------------------------------------------

    def _exchange(self, pieces: Bounds) -> None:
        """Send this node's sum of other nodes' pieces, and add theirs of mine, in the order of their ranks."""
        rank, size = self._group.rank, self._group.size
        lengths = [hi - lo for lo, hi in pieces]
        mine = self._flat[slice(*pieces[rank])]
        parts = [self._flat[slice(*pieces[target])] for target in self._sends[rank]]
        sent = torch.cat(parts) if parts else mine[:0]
        senders = [other for other in range(size) if rank in self._sends[other]]
        received = mine.new_empty(len(senders) * lengths[rank])
        self._group.all_to_all(
            received,
            sent,
            [lengths[rank] if other in senders else 0 for other in range(size)],
            [lengths[other] if other in self._sends[rank] else 0 for other in range(size)],
        )
        for part in received.view(len(senders), lengths[rank]):
            mine.add_(part)
        for (
            part
        ) in parts:  # sent, so used; everybody waits for the all-reduce of norm and loss before the next addition
            part.zero_()

    def _leave(self) -> None:
        """Let the memory of the last generation go."""
        self._waiting.clear()
        if self._lock is not None:
            self._lock.close()
        self._lock, self._flat = None, torch.empty(0, dtype=self._dtype)


def share(group: Group, name: str, num_bytes: int) -> NodeMemory:
    """New memory of my node, zero: made by its first rank, mapped by its others when this returns. Collective.

    Raises MemoryError, ConnectionError.
    """
    fellows = [rank for rank in range(group.size) if group.nodes[rank] == group.nodes[group.rank]]
    numbers = torch.zeros(group.size, dtype=torch.int64)
    memory: NodeMemory | None = None
    lender: Lender | None = None
    if group.rank == fellows[0]:
        memory = NodeMemory.create(name, num_bytes)
        if len(fellows) > 1:
            lender = Lender(memory)
            numbers[group.rank] = lender.number
    try:
        group.all_reduce(numbers)
        if memory is None:
            memory = borrow(int(numbers[fellows[0]]))
        if group.size > 1:
            group.barrier()
    finally:
        if lender is not None:
            lender.close()
    return memory


def routes(nodes: Sequence[int]) -> list[tuple[int, ...]]:
    """To which ranks each rank sends its node's part of their ranges, given the node of every rank: each rank hears
    from one rank of every other node, and the ranks of a node share the work.

    >>> routes([0, 0, 0, 1])
    [(3,), (), (), (0, 1, 2)]
    """
    sends: list[tuple[int, ...]] = [()] * len(nodes)
    for node in set(nodes):
        here = [rank for rank, home in enumerate(nodes) if home == node]
        away = [rank for rank, home in enumerate(nodes) if home != node]
        for number, rank in enumerate(here):
            first, last = (len(away) * end // len(here) for end in (number, number + 1))
            sends[rank] = tuple(away[first:last])
    return sends
