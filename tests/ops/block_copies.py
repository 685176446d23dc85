"""A GPU for tests whose memory is the host's: copies of blocks into its buffers, as late as a stream may make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ops.shards import Slot
from ops.update.node_parameters import NodeParameters
from ops.update.parameter_places import BlockBuffers
from ops.update.parameters import Received


@dataclass
class LateCopies:
    """`BlockCopies`: a copy is made when its result is waited for, and its buffer holds NaN until then."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pinned: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)  # the buffer of each copy
    waiting: dict[int, tuple[Sequence[Tensor], Sequence[Tensor]]] = field(default_factory=dict)

    def pin(self, memory: Tensor) -> None:
        self.pinned.append(memory.data_ptr())

    def unpin(self, memory: Tensor) -> None:
        self.pinned.remove(memory.data_ptr())

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], turn: int) -> None:
        for target in targets:
            target.fill_(torch.nan)
        self.begun.append(turn)
        self.waiting[turn] = targets, sources

    def arrived(self, turn: int) -> None:
        if turn in self.waiting:
            self._make(turn)

    def wait(self) -> None:
        for turn in list(self.waiting):
            self._make(turn)

    def _make(self, turn: int) -> None:
        targets, sources = self.waiting.pop(turn)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def in_buffers(
    module: nn.Module, named: Sequence[tuple[str, nn.Parameter]], layout: Sequence[Slot], received: Received
) -> NodeParameters:
    """Parameters as a GPU has them: those outside of blocks copied, blocks in two buffers."""
    return NodeParameters(module, named, layout, BlockBuffers(LateCopies()), received)
