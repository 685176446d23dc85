"""Where the gradients of a step add up, and how they become one sum over all workers: one protocol, two ways.

`OwnGradients` (here): every worker has a whole fp32 gradient of its own, summed over all workers in buckets.
`NodeGradients` (ops.node_gradients): the workers of a node add into one sum, in host memory or in that of their GPUs.

A cycle per step: `begin_step`, then for every backward `received` per parameter, then `finish`, `used` and the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ops.comm import Group
from ops.gradient_sum import Bounds, GradientSum
from ops.shards import Slot, padding


class Gradients(Protocol):
    """The gradient of one worker's step, in fp32 (fp64 for an fp64 model). Not thread-safe."""

    @property
    def place(self) -> str:
        """Where they lie, for a person."""
        ...

    @property
    def flat(self) -> Tensor:
        """What of it lies here: all of it, [total], or the parts that this worker holds for its node; as much as has
        been added so far."""
        ...

    def part(self, lo: int, hi: int) -> Tensor:
        """[hi - lo], a view of a part of the own range of the bounds: behind `finish` the sum over all workers."""
        ...

    def form(self, group: Group, bounds: Bounds) -> None:
        """Begin a generation, with nothing left of the last one; `bounds` are the ranks' own ranges. Collective."""
        ...

    def leave(self) -> None:
        """The generation has ended: write into nobody's memory any more. Any number of times."""
        ...

    def release(self) -> None:
        """Let go of memory that PyTorch does not free by itself. All workers that go on have left."""
        ...

    def begin_step(self) -> None:
        """Any number of backward passes may follow."""
        ...

    def received(self, index: int) -> None:
        """Parameter `index` has its gradient of the running backward pass. Waits for nobody's computation."""
        ...

    def add(self, index: int, gradient: Tensor) -> None:
        """As `received`, of a gradient that backward has left elsewhere than in the parameter's `.grad`."""
        ...

    def watch(self) -> None:
        """The coming backward pass is this worker's last of the step, and gives each parameter one gradient."""
        ...

    def start(self) -> None:
        """This worker adds nothing more in this step, and joins no bag before its end."""
        ...

    def finish(self) -> None:
        """Returns when `part` of the own range is the sum. Collective."""
        ...

    def used(self, lo: int, hi: int) -> None:
        """Nobody needs [lo, hi), a part of the own range, in this step any more. Comes before this worker shares the
        parameters of that range: who has all parameters knows that all of the gradient was used."""
        ...

    def drop(self) -> None:
        """The sum is not used: the step changes nothing. Collective, in place of `used`."""
        ...


class OwnGradients:
    """A gradient of the worker's own. Parameters of its precision have views of it as `.grad`; what backward leaves of
    lower precision is added to it."""

    place = "memory of each worker"

    def __init__(
        self, parameters: Sequence[nn.Parameter], layout: Sequence[Slot], dtype: torch.dtype, sum_elements: int
    ) -> None:
        """`sum_elements` of the gradient are summed together on the CPU (see ops.gradient_sum)."""
        self._parameters, self._layout, self._dtype, self._sum_elements = parameters, layout, dtype, sum_elements
        self._in_place = parameters[0].dtype == dtype  # backward adds by itself
        self._group = Group.solo()
        self._allocate()
        self.sum = GradientSum(self._memory, layout, self._group, [(0, layout[-1].hi)], sum_elements)

    def part(self, lo: int, hi: int) -> Tensor:
        """As `Gradients.part`."""
        return self.flat[lo:hi]

    def form(self, group: Group, bounds: Bounds) -> None:
        """As `Gradients.form`."""
        if self._group.abandoned:  # a collective of the dead generation may still be writing into the old memory
            self._allocate()
        self._group = group
        self.sum = GradientSum(self._memory, self._layout, group, bounds, self._sum_elements)

    def leave(self) -> None:
        """Nothing: nobody else has it."""

    def release(self) -> None:
        """Nothing: all of it is PyTorch's."""

    def begin_step(self) -> None:
        """Zero the gradient."""
        self.flat.zero_()
        if self._in_place:
            for parameter, view in zip(self._parameters, self._views, strict=True):
                if parameter.device == view.device:  # others come by `add`
                    parameter.grad = view

    def received(self, index: int) -> None:
        """Add what lies beside the sum. Raises RuntimeError after the sum of the bucket has begun."""
        if not self._in_place:
            parameter = self._parameters[index]
            assert parameter.grad is not None, "backward has just made it"
            self._views[index].add_(parameter.grad)
            parameter.grad = None
        self.sum.received(index)

    def add(self, index: int, gradient: Tensor) -> None:
        """As `Gradients.add`. Raises RuntimeError after the sum of the bucket has begun."""
        self._views[index].add_(gradient)
        self.sum.received(index)

    def watch(self) -> None:
        """Start buckets of the sum inside the next backward, as they become final."""
        self.sum.watch()

    def start(self) -> None:
        """Start the sum of what has not started yet."""
        self.sum.start()

    def finish(self) -> None:
        """Wait for the whole sum."""
        self.sum.finish()

    def used(self, lo: int, hi: int) -> None:
        """Nothing: `begin_step` zeroes."""

    def drop(self) -> None:
        """Nothing, see `used`."""

    def _allocate(self) -> None:
        total = self._layout[-1].hi
        self._memory = torch.zeros(total + padding(total), dtype=self._dtype, device=self._parameters[0].device)
        self.flat = self._memory[:total]
        self._views = [self.flat[slot.lo : slot.hi].view(slot.shape) for slot in self._layout]
        for parameter in self._parameters:
            parameter.grad = None
