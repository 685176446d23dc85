"""Where a worker's trained parameters lie, and how new values reach all: one protocol, two ways.

`ReplicatedParameters` (ops.update.sync): every worker has all of them in one flat vector on its device.
`NodeParameters` (ops.update.node_parameters): the workers of a node have one such vector in host memory, from where the
blocks of a transformer are fetched when they run.

A cycle per generation: `form`, the owner writes `own`, `changed`, `gather`; then per step: passes, `settle`, new values
in `own`, `changed`, `gather`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.shards import Bounds

# replicated: all of them on each worker's device. node: once in host memory of each node.
ParameterMemory = Literal["replicated", "node"]
PARAMETER_MEMORIES: tuple[ParameterMemory, ...] = get_args(ParameterMemory)  # the latter takes less of a device

Received = Callable[[int, Tensor], None]
"""Called with a parameter's place in the layout and its gradient of the running backward, which is not in `.grad`."""


@runtime_checkable
class BlockModule(Protocol):
    """A module most of whose weights are in blocks that run one after the other (`PackedTransformer`)."""

    # what runs a block in its place (Any: and returns what it does); None: the block itself
    fetched: Callable[[nn.Module], Callable[..., Any]] | None

    def all_blocks(self) -> list[nn.Module]: ...


def blocks_in(module: nn.Module) -> list[nn.Module]:
    """The blocks that a module runs, if it is a `BlockModule`; else none."""
    return module.all_blocks() if isinstance(module, BlockModule) else []


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
