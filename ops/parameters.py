"""Where a worker's trained parameters lie, and how new values reach all: one protocol, two ways.

`Replicated` (here): every worker has all of them in one flat vector on its device.
`NodeParameters` (ops.node_parameters): the workers of a node have one such vector in host memory, from where the blocks
of a transformer are fetched when they run.

A cycle per generation: `form`, the owner writes `own`, `changed`, `gather`; then per step: passes, `settle`, new values
in `own`, `changed`, `gather`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor, nn

from ops.comm import Group
from ops.gradient_sum import Bounds
from ops.shards import Slot, padding
from ops.waiting import Pending

# replicated: all of them on each worker's device. node: once in host memory of each node.
ParameterMemory = Literal["replicated", "node"]
PARAMETER_MEMORIES: tuple[ParameterMemory, ...] = get_args(ParameterMemory)  # the latter takes less of a device

Received = Callable[[int, Tensor], None]
"""Told of a parameter's gradient of the running backward, by its place in the layout, where it is not in `.grad`."""


@runtime_checkable
class RunsBlocks(Protocol):
    """A module most of whose weights are in blocks that run one after the other (`PackedTransformer`)."""

    # what runs a block in its place; None: the block itself
    fetched: Callable[[nn.Module], Callable[..., Any]] | None

    def all_blocks(self) -> list[nn.Module]: ...


def blocks_in(module: nn.Module) -> list[nn.Module]:
    """The blocks that it runs; none of another module."""
    return module.all_blocks() if isinstance(module, RunsBlocks) else []


class Parameters(Protocol):
    """The trained parameters of one worker, in the layout of the flat vector. Not thread-safe."""

    @property
    def own(self) -> Tensor:
        """[hi - lo], the own range of the bounds, of the parameters' dtype: a view that the owner alone writes, between
        `settle` or `form` and `changed`."""
        ...

    def form(self, group: Group, bounds: Bounds, current: bool) -> None:
        """Begin a generation; `bounds` are the ranks' own ranges. Collective. `current`: all have the values that rank
        0 has now; else values are undefined until each rank has written its own range and `gather` has returned.
        Raises MemoryError on all workers where a node has no room."""
        ...

    def settle(self) -> None:
        """No pass runs here any more: returns when nothing reads the values, and forgets copies of them. All workers
        have returned before any of them writes."""
        ...

    def changed(self, pieces: Bounds) -> None:
        """The rank's piece has its new values: they may be sent. All ranks say so of as many pieces, in one order."""
        ...

    def gather(self) -> None:
        """Returns when all parameters have their new values. Collective; `changed` has named all of every range."""
        ...


class Replicated:
    """All of them on the worker's device: parameters are views of one vector, gathered from their owners."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Sequence[Slot]) -> None:
        self._parameters, self._layout = parameters, layout
        self._group = Group.solo()
        self._bounds: Bounds = [(0, layout[-1].hi)]
        self._even: Bounds | None = None
        self._pending: list[Pending] = []
        self._allocate()

    @property
    def own(self) -> Tensor:
        """As `Parameters.own`."""
        return self._flat[slice(*self._bounds[self._group.rank])]

    def form(self, group: Group, bounds: Bounds, current: bool) -> None:
        """As `Parameters.form`."""
        if self._group.abandoned:
            # A collective of the dead generation may still be writing into the old memory.
            self._allocate()
        self._group, self._bounds, self._pending = group, bounds, []
        self._even = group.even_ranges(self._padded, self._layout[-1].hi)
        if current:
            group.broadcast(self._flat, source_rank=0)

    def settle(self) -> None:
        """Nothing: passes wait for their device, and so do collectives."""

    def changed(self, pieces: Bounds) -> None:
        """Send them. NCCL does at the end: it gathers ranges that lie side by side, and a device updates its range in
        less than a tenth of the time that the gather takes."""
        if self._even is None:
            self._pending += self._group.all_gather_ranges_async(self._flat, pieces)

    def gather(self) -> None:
        """As `Parameters.gather`."""
        if self._even is not None:
            self._pending = self._group.all_gather_ranges_async(self._padded, self._even)
        for one in self._pending:
            one.wait()
        self._pending = []

    def _allocate(self) -> None:
        # Views start wherever the sizes put them. All large tensors of a DiT have a multiple of 16 elements, so
        # they stay 16-byte aligned, as CUDA kernels like it, without padding that checkpoints would have to know.
        first, total = self._parameters[0], self._layout[-1].hi
        self._padded = torch.zeros(total + padding(total), dtype=first.dtype, device=first.device)
        self._flat = self._padded[:total]
        with torch.no_grad():
            for parameter, slot in zip(self._parameters, self._layout, strict=True):
                view = self._flat[slot.lo : slot.hi].view(slot.shape)
                view.copy_(parameter)
                parameter.data = view
