"""Muon: the update of a weight matrix is its momentum, made nearly orthogonal.

(Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; scaled to the size of AdamW's updates
as in Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.2, so that learning rates carry over.
The training script of HunyuanVideo-1.5 takes it by default.)

An update needs whole matrices, and the ranges of the flat vector cut some. A matrix belongs to the rank whose range has
most of it; what others have of it travels there and comes back as part of the update: of two neighbouring ranges at
most one matrix. Each is computed once, as a whole, whatever the number of workers, so plans and pools change no more of
a training than the order of the gradient's sum does.

Small matrices of one shape are computed together on a device, which would else wait for the launches of each. Which
ones, and where each lies among them, follows from the model alone (`batches_of`): zeros stand for those that another
worker has. So a matrix goes through the same kernels at the same place, and gets the same bits, whoever has the others.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.packed.uploads import upload
from ops.shards import Bounds, Slot
from ops.update.parameters import blocks_in

MOMENTUM = 0.95
_ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # steepest at 0: singular values end between 0.7 and 1.2
_LEAST_NORM = 1e-7
_LIKE_ADAMW = 0.2  # root mean square of the elements of AdamW's updates, over the learning rate
# Elements of a matrix that is computed with others, and of all of them: 64 MiB in fp32. Products of larger ones take
# longer than their launches, and zeros in their place would cost what they save.
_SMALL, _TOGETHER = 1 << 20, 1 << 24
_AT_ONCE = 64  # tensors that one kernel copies


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """Elements [lo, hi) of the flat vector that are a matrix [rows, columns]."""

    lo: int
    hi: int
    rows: int
    columns: int

    @property
    def rate(self) -> float:
        """What the learning rate is multiplied by: 0.2 sqrt(max(rows, columns)), as an orthogonal matrix has elements
        of 1 / sqrt(max(rows, columns)) (Liu et al. 2025, section 2.2)."""
        return _LIKE_ADAMW * math.sqrt(max(self.rows, self.columns))


def matrices_of(module: nn.Module, layout: Sequence[Slot]) -> list[Matrix]:
    """What Muon trains: the weights of linear layers in the blocks of a transformer, or of each of a module's, LoRA's
    factors too. All else, as embeddings, the last layer, norms and biases, is AdamW's. Raises ValueError for a module
    without any."""
    trained = dict(module.named_parameters())
    blocks = [block for one in (module, *module.children()) for block in blocks_in(one)]
    linear = {id(m.weight) for block in blocks for m in block.modules() if isinstance(m, nn.Linear)}
    found = [
        Matrix(lo=slot.lo, hi=slot.hi, rows=slot.shape[0], columns=slot.shape[1])
        for slot in layout
        if id(trained[slot.name]) in linear
    ]
    if not found:
        raise ValueError(
            "train.optimizer.kind muon trains linear layers of a transformer's blocks, and none is trained here. Set "
            "it to adamw, or train some (model.dit.train_only, model.dit.lora_targets)."
        )
    return found


def rates_in(matrices: Sequence[Matrix], lo: int, hi: int) -> Iterator[tuple[int, int, float]]:
    """[lo, hi) in pieces of one rate each, as long as can be: (begin, end, rate), with rate 0 between matrices, which
    are in order."""
    begin, last = lo, 0.0
    for start, _, rate in _each_rate(matrices, lo, hi):
        if rate != last and begin < start:
            yield begin, start, last
            begin = start
        last = rate
    if begin < hi:
        yield begin, hi, last


def _each_rate(matrices: Sequence[Matrix], lo: int, hi: int) -> Iterator[tuple[int, int, float]]:
    """[lo, hi) matrix by matrix."""
    index = bisect_right(matrices, lo, key=lambda matrix: matrix.hi)
    while lo < hi:
        coming = matrices[index] if index < len(matrices) else None
        if coming is not None and coming.lo <= lo:
            end, rate, index = min(hi, coming.hi), coming.rate, index + 1
        else:
            end, rate = hi if coming is None else min(hi, coming.lo), 0.0
        yield lo, end, rate
        lo = end


def add_to_momentum(gradient: Tensor, momentum: Tensor, factor: float) -> None:
    """Momentum [n] becomes the newest one, the gradient [n], which counts `factor` times, what is made orthogonal:
    Nesterov's look ahead."""
    gradient.mul_(factor)
    momentum.lerp_(gradient, 1.0 - MOMENTUM)
    gradient.lerp_(momentum, MOMENTUM)


def orthogonal(matrix: Tensor) -> Tensor:
    """U V^T of a matrix U S V^T [rows, columns], nearly: singular values lie between 0.7 and 1.2 where they were not
    tiny. Five steps of a Newton-Schulz iteration, in bf16 on a GPU, as published, else in the matrix' own precision.
    Or of each of several [B, rows, columns].
    """
    exact = matrix.device.type == "cpu" or matrix.dtype == torch.float64
    several = matrix.dim() > 2
    add_product = torch.baddbmm if several else torch.addmm
    norm = torch.linalg.vector_norm(matrix, dim=(1, 2), keepdim=True) if several else matrix.norm()
    x: Tensor = matrix / norm.clamp(min=_LEAST_NORM)
    x = x if exact else x.bfloat16()
    is_tall = matrix.shape[-2] > matrix.shape[-1]  # the product that is squared should be the smaller one
    x = x.mT if is_tall else x
    for _ in range(_ITERATIONS):
        gram: Tensor = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.mT if is_tall else x).to(matrix.dtype)


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Operations of `orthogonal` for a matrix [rows, columns]: three products in each step."""
    few, many = sorted((rows, columns))
    return _ITERATIONS * (4 * few * few * many + 2 * few**3)


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixPiece:
    """Elements [lo, hi) of a matrix that one rank has, and the rank that it belongs to."""

    matrix: Matrix
    lo: int
    hi: int
    rank: int
    owner: int

    def __len__(self) -> int:
        return self.hi - self.lo


def pieces_of(matrix: Matrix, bounds: Bounds) -> list[MatrixPiece]:
    """The pieces of a matrix, by rank. It belongs to the first of those that have most."""
    held = [(max(lo, matrix.lo), min(hi, matrix.hi), rank) for rank, (lo, hi) in enumerate(bounds)]
    held = [one for one in held if one[0] < one[1]]
    owner = max(held, key=lambda one: one[1] - one[0])[2]
    return [MatrixPiece(matrix=matrix, lo=lo, hi=hi, rank=rank, owner=owner) for lo, hi, rank in held]


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixBatch:
    """Matrices of one shape that are computed together: a number, and how many they are on all workers."""

    number: int
    size: int


def batches_of(matrices: Sequence[Matrix], at_once: Callable[[Matrix], int]) -> dict[Matrix, tuple[MatrixBatch, int]]:
    """The batch of each matrix and its place there: `at_once` of those of one shape, in their order."""
    by_shape: dict[tuple[int, int], list[Matrix]] = {}
    for matrix in matrices:
        by_shape.setdefault((matrix.rows, matrix.columns), []).append(matrix)
    found: dict[Matrix, tuple[MatrixBatch, int]] = {}
    number = 0
    for alike in by_shape.values():
        most = at_once(alike[0])
        for start in range(0, len(alike), most):
            some = alike[start : start + most]
            found |= {matrix: (MatrixBatch(number=number, size=len(some)), place) for place, matrix in enumerate(some)}
            number += 1
    return found


def on_a_device(matrix: Matrix) -> int:
    """Matrices like this one that a device computes together."""
    elements = matrix.rows * matrix.columns
    return min(_AT_ONCE, _TOGETHER // elements) if elements <= _SMALL else 1


def alone(matrix: Matrix) -> int:
    """One: a CPU waits for no launches."""
    return 1


class MatrixUpdates:
    """Makes what the flat gradient holds of matrices orthogonal, over all workers of a generation. Not thread-safe."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        dtype: torch.dtype,
        device: torch.device,
        at_once: Callable[[Matrix], int] | None = None,
    ) -> None:
        """`dtype` of the gradient; `device`: where workers compute, and what their groups send. `at_once` matrices like
        one are computed together (None: as many as is best on this device)."""
        self.matrices = tuple(matrices)
        self._batches = batches_of(matrices, at_once or (alone if device.type == "cpu" else on_a_device))
        self._nothing = torch.empty(0, dtype=dtype, device=device)
        self.form(Group.solo(), [(0, self.matrices[-1].hi)])

    def form(self, group: Group, bounds: Bounds) -> None:
        """Begin a generation; `bounds` are the ranks' own ranges."""
        self._group = group
        pieces = [pieces_of(matrix, bounds) for matrix in self.matrices]
        self._whole = [one[0].matrix for one in pieces if len(one) == 1 and one[0].rank == group.rank]
        self._cut = [one for one in pieces if len(one) > 1]

    def run(self, part: Callable[[int, int], Tensor], trained: Sequence[tuple[int, int]]) -> None:
        """Replace the matrices that lie in `trained` by their updates. `part` gives a view of a part of the own range
        of the gradient. Collective."""
        whole = [matrix for matrix in self._whole if _lies_in(matrix, trained)]
        self._turn({matrix: [part(matrix.lo, matrix.hi)] for matrix in whole})
        if cut := [pieces for pieces in self._cut if _lies_in(pieces[0].matrix, trained)]:
            self._run_cut(part, cut)

    def _run_cut(self, part: Callable[[int, int], Tensor], cut: Sequence[Sequence[MatrixPiece]]) -> None:
        """Matrices of which several ranks have a part: pieces come in the order of ranks, then in that of matrices."""
        rank, size = self._group.rank, self._group.size
        away = [piece for pieces in cut for piece in pieces if piece.owner != piece.rank]
        sent = sorted((piece for piece in away if piece.rank == rank), key=lambda piece: piece.owner)
        come = sorted((piece for piece in away if piece.owner == rank), key=lambda piece: piece.rank)
        to = [sum(len(piece) for piece in sent if piece.owner == other) for other in range(size)]
        of = [sum(len(piece) for piece in come if piece.rank == other) for other in range(size)]
        own = [part(piece.lo, piece.hi) for piece in sent]
        leaving = torch.cat([self._nothing, *(view.to(self._nothing.device) for view in own)])
        coming = self._nothing.new_empty(sum(of))
        self._group.all_to_all(coming, leaving, of, to)
        others = dict(zip(come, coming.split([len(piece) for piece in come]), strict=True))
        self._turn(
            {
                pieces[0].matrix: [others[one] if one in others else part(one.lo, one.hi) for one in pieces]
                for pieces in cut
                if pieces[0].owner == rank
            }
        )
        self._group.all_to_all(leaving, coming, to, of)
        for view, values in zip(own, leaving.split([len(piece) for piece in sent]), strict=True):
            view.copy_(values)

    def _turn(self, views: Mapping[Matrix, Sequence[Tensor]]) -> None:
        """Matrices in parts that follow each other become their updates, in place."""
        together: dict[MatrixBatch, list[Matrix]] = {}
        for matrix in views:
            together.setdefault(self._batches[matrix][0], []).append(matrix)
        for batch, matrices in together.items():
            if batch.size == 1:
                self._turn_one(matrices[0], views[matrices[0]])
            else:
                self._turn_batch(batch, matrices, [views[matrix] for matrix in matrices])

    def _turn_one(self, matrix: Matrix, views: Sequence[Tensor]) -> None:
        there = [view.to(self._nothing.device) for view in views]
        whole = there[0] if len(there) == 1 else torch.cat(there)
        updates = orthogonal(whole.view(matrix.rows, matrix.columns)).reshape(-1)
        for view, values in zip(views, updates.split([len(view) for view in views]), strict=True):
            view.copy_(values)

    def _turn_batch(self, batch: MatrixBatch, matrices: Sequence[Matrix], views: Sequence[Sequence[Tensor]]) -> None:
        """Some matrices of a batch, each at its place in it."""
        shape, device = (matrices[0].rows, matrices[0].columns), self._nothing.device
        home = views[0][0].device  # of the gradient
        make = torch.empty if len(matrices) == batch.size else torch.zeros
        stack = make(batch.size, shape[0] * shape[1], dtype=self._nothing.dtype, device=home)
        places = [self._batches[matrix][1] for matrix in matrices]
        parts = [part for one in views for part in one]
        torch._foreach_copy_(_cut_like(stack, places, views), parts)
        there = stack if home == device else upload([stack], device)[0]
        updates = orthogonal(there.view(batch.size, *shape)).reshape(batch.size, -1).to(home)
        torch._foreach_copy_(parts, _cut_like(updates, places, views))


def _cut_like(stack: Tensor, places: Sequence[int], views: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Rows of a stack at these places, each in parts as its views are."""
    return [
        part
        for place, one in zip(places, views, strict=True)
        for part in stack[place].split([len(view) for view in one])
    ]


def _lies_in(matrix: Matrix, ranges: Sequence[tuple[int, int]]) -> bool:
    return any(lo <= matrix.lo and matrix.hi <= hi for lo, hi in ranges)
