"""A gradient per worker, summed in buckets that start as soon as they are complete, while slower workers compute.

A bucket is the range of some neighbouring parameters in the flat gradient. All workers sum the buckets in one order,
from the end of the vector, where backward begins, to its front. A worker starts a bucket when it will add nothing more
to it: during its last backward of the step (`watch`, by hooks), or after it (`start`); one that computes no gradient in
the step starts them at once (not on CUDA, where waiting kernels hold SMs). `finish` waits for what is left. On Gloo a
worker takes memory for all parts of what it owns until it can add them, so it starts no bucket while those on their way
take `ahead_bytes`: all buckets at once would take as much as the whole gradient.

Order of launches. A worker starts buckets only when it will run no further collective of a bag before the end of the
step (actors.run.dispatch decides it). So on every device all bag collectives of a step precede all buckets, which
precede those of the next step: kernels of several NCCL communicators never wait for each other in a circle.

On NCCL the whole vector is one bucket: its reduce-scatter takes ranges of one length, which the ranks' parts of a
smaller bucket never have, and needs no memory then. What could be hidden in the last backward, 0.1 s for 1.3B
parameters over a network of 50 GB/s, would take SMs from it.

A sum of a range is made in rank order by its owner (Gloo), so cutting and starting change no bit of the result.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.shards import Bounds, Slot, padding
from ops.update.gathered_gradients import GatheredGradients
from ops.waiting import PendingCollective

_AHEAD_BYTES = 64 << 20  # of parts that are not added yet; what is started last may go beyond it


@dataclass(frozen=True, kw_only=True, slots=True)
class ReduceBucket:
    """Parameters [first, last) of the layout and their range of the flat vector."""

    first: int
    last: int
    lo: int
    hi: int


def cut_buckets(layout: Sequence[Slot], elements: int) -> list[ReduceBucket]:
    """Whole parameters from the last to the first; a bucket is closed when it holds `elements` or more."""
    buckets: list[ReduceBucket] = []
    last = len(layout)
    for first in reversed(range(len(layout))):
        lo, hi = layout[first].lo, layout[last - 1].hi
        if hi - lo >= elements or first == 0:
            buckets.append(ReduceBucket(first=first, last=last, lo=lo, hi=hi))
            last = first
    return buckets


class OwnGradients:
    """The `Gradients` of a worker that has a whole gradient of its own.

    On a CPU parameters of its precision have parts of it as `.grad`; all else that backward leaves is added to it, on a
    device small gradients together. After `finish` the own range of the bounds is the sum over the group. A backward
    pass calls `received` while its caller waits for it.
    """

    place = "memory of each worker"
    _pending: deque[tuple[PendingCollective, int]]  # collectives, and bytes that each takes
    _missing: list[int]  # per bucket, parameters that wait for their last gradient; empty: not watching

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Sequence[Slot],
        dtype: torch.dtype,
        sum_elements: int,
        *,
        ahead_bytes: int = _AHEAD_BYTES,
        gathers: bool | None = None,
    ) -> None:
        """`sum_elements` of the gradient are summed together on the CPU; a sum starts while the parts of those before
        it that are not added yet take less than `ahead_bytes`. `gathers`: small gradients are added together (None: on
        a device, whose host has other things to do)."""
        self._parameters, self._layout, self._dtype, self._sum_elements = parameters, layout, dtype, sum_elements
        self._ahead_bytes = ahead_bytes
        gathers = parameters[0].device.type != "cpu" if gathers is None else gathers
        self._gathered = GatheredGradients([slot.name for slot in layout], self._counted()) if gathers else None
        self._in_place = parameters[0].dtype == dtype and not gathers  # backward adds by itself
        self._allocate()
        self._cut(Group.solo(), [(0, layout[-1].hi)])

    @property
    def started(self) -> int:
        """Buckets of this step whose sum has begun."""
        return self._next

    def part(self, lo: int, hi: int) -> Tensor:
        """As `Gradients.part`."""
        return self.flat[lo:hi]

    def form(self, group: Group, bounds: Bounds) -> None:
        """As `Gradients.form`."""
        if self._group.abandoned and not self._group.on_device:
            # A collective of the dead generation may still be writing into the old memory, which it holds itself. On a
            # GPU its abort has ended all writers.
            self._drop()
            self._allocate()
        self._cut(group, bounds)

    def leave(self) -> None:
        """Nothing: no other worker has it."""

    def release(self) -> None:
        """Nothing: all of it is PyTorch's."""

    def begin_step(self) -> None:
        """Zero the gradient."""
        self.flat.zero_()
        if self._gathered is not None:
            self._gathered.drop()
        if self._in_place:
            for parameter, view in zip(self._parameters, self._views, strict=True):
                if parameter.device == view.device:  # others come by `add`
                    parameter.grad = view

    def received(self, index: int) -> None:
        """Add what lies beside the sum. Raises RuntimeError after the sum of the bucket has begun."""
        if self._in_place:
            self._count(index)
            return
        parameter = self._parameters[index]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, "backward has just made it"
        self.add(index, gradient)

    def add(self, index: int, gradient: Tensor) -> None:
        """As `Gradients.add`. Raises RuntimeError after the sum of the bucket has begun."""
        if self._gathered is None or not self._gathered.take(index, gradient, self._flat_views):
            self._views[index].add_(gradient)
            self._count(index)

    def watch(self) -> None:
        """Start buckets of the sum inside the next backward, as they become final."""
        self._missing = [bucket.last - bucket.first for bucket in self._buckets]

    def start(self) -> None:
        """Nothing more is added in this step: start the sum of every bucket that there is memory for."""
        self._closed, self._missing = True, []
        while self._next < len(self._buckets) and self._has_room():
            self._start_next()

    def finish(self) -> None:
        """Wait for the whole sum. The next step may begin."""
        self.start()
        while self._pending:
            self._pending.popleft()[0].wait()
            self.start()
        self._next, self._closed = 0, False

    def _has_room(self) -> bool:
        """Whether another bucket may start. What has come is added."""
        while self._pending and self._pending[0][0].done:
            self._pending.popleft()[0].wait()
        return sum(taken for _, taken in self._pending) < self._ahead_bytes

    def used(self, lo: int, hi: int) -> None:
        """Nothing: `begin_step` zeroes."""

    def drop(self) -> None:
        """Nothing, see `used`."""

    def _counted(self) -> Callable[[int], None]:
        """`_count`, without a reference to this object: it and its `GatheredGradients` would hold each other, and with
        them a whole gradient on the device, until the garbage collector comes."""
        own = weakref.ref(self)

        def count(index: int) -> None:
            if (here := own()) is not None:
                here._count(index)

        return count

    def _count(self, index: int) -> None:
        """Parameter `index` has its gradient of the running backward pass."""
        number = self._bucket_of[index]
        if (number < self._next or self._closed) and self._group.size > 1:
            raise RuntimeError(
                f"{self._layout[index].name} received a gradient after the sum of its bucket had begun. The sum may "
                f"only start during or after the last backward pass of a step."
            )
        if self._missing:
            self._missing[number] -= 1
            while self._next < len(self._buckets) and self._missing[self._next] <= 0 and self._has_room():
                self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        pieces = [(min(max(lo, bucket.lo), bucket.hi), min(max(hi, bucket.lo), bucket.hi)) for lo, hi in self._bounds]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces)), "shards lie one after the other"
        taken = self._group.received_elements(pieces) * self._memory.element_size()
        self._pending += [(one, taken) for one in self._group.reduce_scatter_ranges_async(self._memory, pieces)]

    def _cut(self, group: Group, bounds: Bounds) -> None:
        """The buckets of a generation, before any is started."""
        self._group, self._bounds = group, bounds
        even = group.even_ranges(self._memory, self._layout[-1].hi)
        if even is None:
            self._buckets = cut_buckets(self._layout, self._sum_elements)
        else:
            self._bounds = even
            self._buckets = [ReduceBucket(first=0, last=len(self._layout), lo=0, hi=even[-1][1])]
        self._bucket_of = {i: n for n, bucket in enumerate(self._buckets) for i in range(bucket.first, bucket.last)}
        self._next = 0  # buckets before this one have been started
        self._closed = False  # nothing more is added in this step
        self._pending, self._missing = deque(), []

    def _allocate(self) -> None:
        total = self._layout[-1].hi
        self._memory = torch.zeros(total + padding(total), dtype=self._dtype, device=self._parameters[0].device)
        self.flat = self._memory[:total]
        # its memory under a tensor's own name: torch.compile gives sizes of a base to a gradient that is a view, and
        # guards on them that no input of the code has
        self._views = [self.flat[slot.lo : slot.hi].view(slot.shape).data for slot in self._layout]
        self._flat_views = [self.flat[slot.lo : slot.hi] for slot in self._layout]
        for parameter in self._parameters:
            parameter.grad = None

    def _drop(self) -> None:
        """Let the memory go, and all that refers to it."""
        self._pending.clear()
        self._views.clear()
        self._flat_views.clear()
        for parameter in self._parameters:
            parameter.grad = None
        if self._gathered is not None:
            self._gathered.drop()
        self.flat = self._memory = torch.empty(0, dtype=self._dtype)
