"""How a block's parameters come from the node's memory to the device that computes.

On a CPU they are there. On a GPU (`BlockBuffers`) two buffers of a block's size take turns: while one block runs, the
one that came after it the last time is copied. What a device does is `BlockCopies`, a thin shell (`CudaBlockCopies`,
ops.memory.cuda_memory); all decisions are here, and tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ops.memory.cuda_memory import CudaBlockCopies
from ops.shards import Slot
from ops.update.node_parameters import BlockPlace, Held, NodeParameters, laid_out
from ops.update.parameters import Parameters, Received

ParametersOf = Callable[[nn.Module, Sequence[tuple[str, nn.Parameter]], Sequence[Slot], Received], Parameters]


class HostBlocks:
    """The device is the host's CPU: a block's parameters are those of the node."""

    computes_there = True

    def __init__(self) -> None:
        self._held: Held = lambda block: []

    def hold(self, memory: Tensor, held: Held, largest: int) -> None:
        """As `BlockPlace.hold`."""
        self._held = held

    def let_go(self) -> None: ...

    def fetch(self, block: int) -> list[Tensor]:
        """As `BlockPlace.fetch`."""
        return self._held(block)

    def settle(self) -> None: ...


class BlockCopies(Protocol):
    """What a GPU can do. `turn` (0 or 1) is a buffer."""

    @property
    def device(self) -> torch.device: ...

    def pin(self, memory: Tensor) -> None:
        """The device reads this host memory itself from now on, if it can."""
        ...

    def unpin(self, memory: Tensor) -> None: ...

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], turn: int) -> None:
        """Copy into a buffer, after what was launched so far, beside what will be."""
        ...

    def arrived(self, turn: int) -> None:
        """What is launched next comes after the last copy into this buffer."""
        ...

    def wait(self) -> None:
        """Returns when no copy runs here any more."""
        ...


@dataclass(frozen=True, slots=True)
class FetchedBlock:
    """What a buffer has. The sources are kept, so that no other tensor comes to lie at their address."""

    block: int
    sources: tuple[Tensor, ...]
    values: list[Tensor]

    def is_of(self, block: int, held: Sequence[Tensor]) -> bool:
        """Whether the buffer has this block's values, of these tensors: a sample lends a block tensors of its own."""
        return self.block == block and all(
            mine.data_ptr() == other.data_ptr() for mine, other in zip(self.sources, held, strict=True)
        )


class BlockBuffers:
    """Two buffers on a GPU for the blocks of the node's memory. Blocks run one at a time, in an order that repeats."""

    computes_there = False

    def __init__(self, copies: BlockCopies) -> None:
        self._copies = copies
        self._memory: Tensor | None = None
        self._held: Held = lambda block: []
        self.buffers: list[Tensor] = []
        self._has: list[FetchedBlock | None] = [None, None]
        self._turn = 0  # the buffer of the block that runs
        self._before: tuple[int, int] | None = None  # the two blocks that ran last
        self._follows: dict[tuple[int, int], int] = {}  # two blocks in turn -> what came then

    def hold(self, memory: Tensor, held: Held, largest: int) -> None:
        """As `BlockPlace.hold`."""
        self._copies.pin(memory)
        self._memory, self._held = memory, held
        self.buffers = [torch.empty(largest, dtype=torch.uint8, device=self._copies.device) for _ in range(2)]

    def let_go(self) -> None:
        """As `BlockPlace.let_go`."""
        self.settle()
        self.buffers = []
        if self._memory is not None:
            self._copies.unpin(self._memory)
            self._memory = None

    def fetch(self, block: int) -> list[Tensor]:
        """As `BlockPlace.fetch`. Begins to copy the block that is expected after it. Where attention is kept, the
        operators of a block's forward and of its recomputation are matched by their number: not those of copies, of
        which each has as many as the blocks before and after it make necessary."""
        with _disable_current_modes():
            return self._fetch(block)

    def _fetch(self, block: int) -> list[Tensor]:
        turn = self._turn_of(block)
        if turn is None:
            turn = 1 - self._turn
            self._load(block, turn)
        self._turn = turn
        self._copies.arrived(turn)
        coming = self._expected_after(block)
        if coming is not None and self._turn_of(coming) is None:
            self._load(coming, 1 - turn)
        found = self._has[turn]
        assert found is not None, "it was here, or was loaded"
        return found.values

    def settle(self) -> None:
        """As `Parameters.settle`."""
        if any(has is not None for has in self._has):
            self._copies.wait()
        self._has, self._before = [None, None], None

    def _turn_of(self, block: int) -> int | None:
        held = self._held(block)
        return next((turn for turn, has in enumerate(self._has) if has is not None and has.is_of(block, held)), None)

    def _load(self, block: int, turn: int) -> None:
        sources = self._held(block)
        values = laid_out(sources, self.buffers[turn])
        self._copies.copy(values, sources, turn)
        self._has[turn] = FetchedBlock(block, tuple(sources), values)

    def _expected_after(self, block: int) -> int | None:
        """The block that followed the last time this pair of blocks came: the one before `block`, and `block`. Calls of
        the same block in a row count as one. None if the pair is new."""
        if self._before is None:
            self._before = (-1, block)
        elif self._before[1] != block:
            self._follows[self._before] = block
            self._before = (self._before[1], block)
        return self._follows.get(self._before)


def node_parameters(
    module: nn.Module, named: Sequence[tuple[str, nn.Parameter]], layout: Sequence[Slot], received: Received
) -> Parameters:
    """Once per node, for the device that they are on. Raises ValueError for a module that cannot fetch its blocks."""
    return NodeParameters(module, named, layout, place_on(named[0][1].device), received)


def place_on(device: torch.device) -> BlockPlace:
    """How blocks come from host memory to a device."""
    return BlockBuffers(CudaBlockCopies(device)) if device.type == "cuda" else HostBlocks()
