"""What `heddle bench ops` is told of an op: its variants on the same packed tokens, and how much it must move.

Every variant is a function of (tensors, layout) -> outputs, differentiable, on packed tokens [N, D].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ops.kernels.base.segments import Segments

EPS = 1e-6
Tensors = dict[str, Tensor]
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """How N tokens share modulation rows. `uniform` layouts have equal runs, which eager code reaches by a view."""

    name: str
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def uniform(self) -> bool:
        return len(set(self.lengths)) == 1


OpVariant = Callable[[Tensors, RowLayout, Segments, Tensor], Outputs]  # the last are the table rows of all tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """Traffic minimum in units of T = 2 N D bytes, the tensors that get gradients, and the variants.

    The first variant is ours, the second the eager baseline. Contests are measured in the order of `turn`, and a budget
    of time may cut the last ones.
    """

    name: str
    turn: int = 9
    forward_T: int
    backward_T: int
    inputs: tuple[str, ...]
    variants: Mapping[str, OpVariant]


def modulation(table: Tensor, layout: RowLayout, rows: Tensor) -> Tensor:
    """The table as eager code expands it: a broadcast view where runs are equal, a gather to [N, D] where not."""
    return table[:, None] if layout.uniform else table[rows]


def samples(x: Tensor, layout: RowLayout) -> Tensor:
    """Tokens [N, D] as [runs, N / runs, D] where runs are equal."""
    return x.view(len(layout.lengths), -1, x.shape[-1]) if layout.uniform else x
