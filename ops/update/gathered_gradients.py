"""Gradients of small parameters on their way into the sum of a step: those of a block are added together.

On a GPU every addition is a launch, and a block of a transformer has 27 parameters or more, most of them vectors. What
a backward pass leaves of these is held until all of its block has come, until it is some megabytes, or until the pass
ends; then three launches add all of it. The sums are the same, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable

_SMALL = 1 << 20  # elements of a gradient: to copy a larger one takes a GPU longer than a launch takes the host
_MOST = 4 << 20  # elements that are held


class GatheredGradients:
    """Gradients of the running backward pass that are not in the sum yet. Not thread-safe."""

    def __init__(
        self, names: Sequence[str], added: Callable[[int], None], small: int = _SMALL, most: int = _MOST
    ) -> None:
        """`names` of the parameters, which say what lies in one block. `added` is called with the place of each whose
        gradient is in the sum now. Gradients of at most `small` elements are held, of at most `most` together."""
        self._blocks = [_block_of(name) for name in names]
        self._sizes = Counter(self._blocks)
        self._added, self._small, self._most = added, small, most
        self._held: dict[int, Tensor] = {}  # by parameter
        self._elements = 0
        self._block, self._come = "", 0  # the block of the last gradient, and how many of its gradients have come

    def take(self, index: int, gradient: Tensor, sums: Sequence[Tensor]) -> bool:
        """Hold the gradient of parameter `index` and add it before the running backward pass returns. Returns False for
        a large one, which the caller adds. `sums`: of each parameter, flat."""
        other = self._held and next(iter(self._held.values())).dtype != gradient.dtype
        if index in self._held or other or self._blocks[index] != self._block:  # slices of a block give several
            self.add(sums)
            self._block, self._come = self._blocks[index], 0
        self._come += 1
        if small := gradient.numel() <= self._small:
            if not self._held:
                queue = Variable._execution_engine.queue_callback  # as FSDP does
                queue(lambda: self.add(sums))
            self._held[index] = gradient
            self._elements += gradient.numel()
        # A block's gradients may all be views of one tensor: held longer, it would stay beside that of the next block.
        if self._elements > self._most or self._come == self._sizes[self._block]:
            self.add(sums)
        return small

    def add(self, sums: Sequence[Tensor]) -> None:
        """Add what is held."""
        held = self._held
        if not held:
            return
        self._held, self._elements = {}, 0
        into = [sums[index] for index in held]
        # one piece of one dtype, of which the sums and what is added to them are read by one launch
        piece = torch.cat([one.reshape(-1) for one in held.values()]).to(into[0].dtype)
        torch._foreach_add_(into, piece.split([one.numel() for one in into]))
        for index in held:
            self._added(index)

    def drop(self) -> None:
        """The pass has failed: what is held is used no more."""
        self._held, self._elements, self._come = {}, 0, 0


def _block_of(name: str) -> str:
    """What the names of a block's parameters begin with: all up to their first number."""
    parts = name.split(".")
    number = next((n for n, part in enumerate(parts) if part.isdecimal()), -1)
    return ".".join(parts[: number + 1])
