"""What an op is checked and measured by: its inputs, what it means, and what else computes it.

`MEASURED` of an op's folder has its cases, which `python -m app.bench.gpu` checks on a GPU, and its contests, which
`heddle bench ops` times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ops.kernels.base.segments import Segments

EPS = 1e-6
HEAD_DIM = 128  # width of a head, where inputs have any
# tokens and stream (the residual one, which may be wider): [N, D]; table: [runs, D]; vector [D], head [HEAD_DIM]; cos
# and sin: [N, HEAD_DIM / 2], which get no gradient
InputKind = Literal["tokens", "stream", "table", "vector", "head", "cos", "sin"]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCase:
    """One use of an op: differentiable functions of its inputs by name, ours and the plain one that is right."""

    name: str
    inputs: Mapping[str, InputKind]
    ours: Callable[[Tensors, Segments], Outputs]
    meaning: Callable[[Tensors, Tensor], Outputs]  # the last argument: the table row of each token

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The inputs that get a gradient."""
        return tuple(name for name, kind in self.inputs.items() if kind not in ("cos", "sin"))


# another way to compute a case; the last argument is the table row of each token
OpVariant = Callable[[Tensors, RowLayout, Segments, Tensor], Outputs]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """A case that is timed: its least traffic in units of T = 2 N D bytes, and `others`, the eager baseline first.

    Contests are measured in the order of `turn`, and a budget of time may cut the last ones.
    """

    name: str
    case: OpCase
    turn: int = 9
    forward_T: int
    backward_T: int
    others: Mapping[str, OpVariant]

    @property
    def variants(self) -> dict[str, OpVariant]:
        """Ours, then the others."""
        return {"fused": lambda tensors, layout, segments, rows: self.case.ours(tensors, segments), **self.others}


def no_contest(liger: bool) -> tuple[Contest, ...]:
    """No contest: `heddle bench ops` times nothing of the op."""
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredOp:
    """Cases and contests of one op. `contests(liger)` adds what the package Liger has of it."""

    cases: tuple[OpCase, ...] = ()
    contests: Callable[[bool], tuple[Contest, ...]] = no_contest


def modulation(table: Tensor, layout: RowLayout, rows: Tensor) -> Tensor:
    """The table as eager code expands it: a broadcast view where runs are equal, a gather to [N, D] where not."""
    return table[:, None] if layout.uniform else table[rows]


def samples(x: Tensor, layout: RowLayout) -> Tensor:
    """Tokens [N, D] as [runs, N / runs, D] where runs are equal."""
    return x.view(len(layout.lengths), -1, x.shape[-1]) if layout.uniform else x
