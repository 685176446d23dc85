"""Where the gradients of a step add up, and how they become one sum over all workers: one protocol, two ways.

`OwnGradients` (ops.update.own_gradients): every worker has a whole fp32 gradient of its own, summed over all workers in
buckets. `NodeGradients` (ops.update.node_gradients): the workers of a node add into one sum, in host memory or in that
of their GPUs.

A cycle per step: `begin_step`, then for every backward `received` per parameter, then `finish`, `used` and the next.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ops.comm.collectives import Group
from ops.shards import Bounds


class Gradients(Protocol):
    """The gradient of one worker's step, in fp32 (fp64 for an fp64 model). Not thread-safe."""

    @property
    def place(self) -> str:
        """Where they lie, for a person."""
        ...

    @property
    def flat(self) -> Tensor:
        """The gradient as added up so far: [total], or the parts that this worker holds for its node."""
        ...

    def part(self, lo: int, hi: int) -> Tensor:
        """[hi - lo], a view of a part of the own range of the bounds: after `finish` the sum over all workers."""
        ...

    def form(self, group: Group, bounds: Bounds) -> None:
        """Begin a generation, with nothing left of the last one; `bounds` are the ranks' own ranges. Collective."""
        ...

    def leave(self) -> None:
        """The generation has ended: write into no other worker's memory any more. Any number of times."""
        ...

    def release(self) -> None:
        """Let go of memory that PyTorch does not free by itself. All workers that go on have left."""
        ...

    def begin_step(self) -> None:
        """Any number of backward passes may follow."""
        ...

    def received(self, index: int) -> None:
        """Parameter `index` has its gradient of the running backward pass. Waits for no other worker's computation."""
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
        """No worker needs [lo, hi), a part of the own range, in this step any more. Comes before this worker shares the
        parameters of that range: a worker that has all parameters knows that all of the gradient was used."""
        ...

    def drop(self) -> None:
        """The sum is not used: the step changes nothing. Collective, in place of `used`."""
        ...
