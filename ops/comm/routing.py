"""KnapFormer as a library: packed sequences leave their home ranks for balanced compute bags and come back.

Every rank brings packed sequences of any lengths (none is fine). `plan` assigns each sequence to a bag of ranks so that
the load per rank is even; `route` moves tokens and features there in one all-to-all, each rank of a bag receiving its
contiguous chunk; `unroute` brings results home. Both are differentiable, keep every dtype (integers too) and are
inverses bit for bit. Rows whose new rank is their home are copied locally and never sent; if no row moves, no
collective runs.

From any torchrun script, without Ray:

    dist.init_process_group("nccl")
    bags = parse_topology("g1n4+g2n2")                         # 4 single ranks, 2 pairs: 8 ranks
    groups = {bag: dist.new_group(bag) for bag in bags}        # torch's rule: every rank makes every group
    world = Group.wrap(dist.group.WORLD)
    for tokens, lengths, ids in loader:                        # tokens [sum(lengths), D] of this rank, ids [L]
        routing = plan(lengths, bags, world, width=3072, gamma=0.42)
        x, ids = route([tokens, ids], routing, world)          # [sum(routing.chunk_lengths), ...]
        y = model(x, ids, bag=Group.wrap(groups[routing.bag])) # sequences routing.held, cut into chunks over the bag
        (y,) = unroute([y], routing, world)                    # [sum(lengths), D] in the old order
        loss(y).backward()                                     # parameter gradients are partial: sum over all ranks

docs/libraries.md has it as a script that runs. torch.compile leaves the functions that move rows out of its graphs.

(Zhang et al., KnapFormer, 2025. Unlike there: a sequence is judged by what it adds to a bag, home is preferred, an
empty bag or rank is no error, and per-sequence vectors are sent to their bag instead of gathered everywhere.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ops.chunks import chunk_bounds
from ops.comm.collectives import Group
from ops.degrees import BagRanks, bags_of
from ops.kernels.base.autograd import Context, InputGradients

_NOT_INDEXED = {
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
}


class Transfer(NamedTuple):
    """A run of rows that goes from one rank to another (or stays)."""

    source: int
    source_row: int
    target: int
    target_row: int
    rows: int


class _Stop(NamedTuple):
    """A sequence, its rows at home, and its bag, in which it is sequence number `turn`."""

    home: int
    start: int
    length: int
    bag: BagRanks
    turn: int


@dataclass(frozen=True, slots=True)
class Move:
    """Rows that change rank, as one rank sees them. Rows go out by destination rank and come in by source rank."""

    rows_in: int  # rows of the tensor before
    rows_out: int  # rows of the tensor after
    send: Tensor  # int64: rows before, in the order they are sent
    send_splits: list[int]
    receive: Tensor  # int64: rows after, in the order they arrive
    receive_splits: list[int]
    keep_from: Tensor  # int64: rows before that stay on this rank
    keep_to: Tensor  # int64: their rows after
    idle: bool  # no row of any rank moves: all ranks skip the collective
    repeats: bool  # a row may go to several ranks; the way back adds them up


@dataclass(frozen=True, slots=True)
class Routing:
    """Where all sequences go; sequences are numbered rank by rank in their home order. The same on every rank except
    `rank` and the index tensors."""

    rank: int
    lengths: tuple[tuple[int, ...], ...]  # of each home rank
    bags: tuple[BagRanks, ...]
    assignment: tuple[int, ...]  # bag of each sequence
    tokens: Move

    @property
    def bag(self) -> BagRanks:
        """The bag of this rank."""
        return next(bag for bag in self.bags if self.rank in bag)

    @property
    def held(self) -> tuple[int, ...]:
        """The sequences of this rank's bag, in the order of its packed rows."""
        return _held(self.assignment, self.bags.index(self.bag))

    @property
    def chunk_lengths(self) -> tuple[int, ...]:
        """Rows that this rank has of each held sequence. Equal to a `Layout` of the held sequences."""
        flat, bag = [length for home in self.lengths for length in home], self.bag
        bounds = [
            chunk_bounds(flat[index], len(bag), bag.index(self.rank), turn) for turn, index in enumerate(self.held)
        ]
        return tuple(stop - start for start, stop in bounds)


def parse_topology(text: str) -> tuple[BagRanks, ...]:
    """Bags of "g1n4+g2n2": four bags of one rank, then two of two; ranks are dealt in order of bag size.

    Raises ValueError for anything else, a size given twice and zero counts.
    """
    bags: list[BagRanks] = []
    start = 0
    for size, count in sorted(bags_of(text).items()):
        for _ in range(count):
            bags.append(tuple(range(start, start + size)))
            start += size
    return tuple(bags)


def workload(length: int, width: int, gamma: float = 1.0) -> float:
    """Relative cost of one sequence: linear layers plus gamma times attention (KnapFormer, equation 2)."""
    return 24.0 * length * width**2 + gamma * 4.0 * length**2 * width


def assign(
    lengths: Sequence[Sequence[int]], bags: Sequence[BagRanks], width: int, gamma: float = 1.0, slack: float = 0.02
) -> tuple[int, ...]:
    """The bag of each sequence. Pure and deterministic, so every rank computes the same.

    Longest first, to the bag that would finish first; a sequence stays in the bag of its home rank while that bag
    keeps within `slack` of the mean load. Bags may stay empty.
    """
    home_bag = {rank: index for index, bag in enumerate(bags) for rank in bag}
    costs = [workload(length, width, gamma) for home in lengths for length in home]
    homes = [home_bag[rank] for rank, home in enumerate(lengths) for _ in home]
    sizes = np.array([len(bag) for bag in bags], dtype=np.float64)
    load = np.zeros(len(bags))
    fair = (1 + slack) * sum(costs) / sizes.sum()
    assignment = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        finish = (load + costs[index]) / sizes
        best = int(finish.argmin())
        home = homes[index]
        chosen = home if finish[home] <= max(fair, finish[best]) else best
        assignment[index] = chosen
        load[chosen] += costs[index]
    return tuple(assignment)


def plan(
    lengths: Sequence[int],
    bags: Sequence[BagRanks],
    group: Group,
    *,
    width: int,
    gamma: float = 1.0,
    device: torch.device | str | None = None,
) -> Routing:
    """Collective over `group`: every rank brings its own sequence lengths [tokens] and gets the common plan.

    bags partition the ranks of the group, counted in it from 0; `width` is the model's and `gamma` the time of an
    attention FLOP over one of a linear layer, both for the workload (`workload`) and equal on all ranks. The index
    tensors and the small metadata collective live on `device`, where the rows to be routed are; by default the current
    GPU for a group of NCCL, else the CPU. A group that has both is given the device.

    Raises ValueError for bags that do not partition the group, lengths below 1, and a width or gamma below its least.
    """
    _check_bags(bags, group.size)
    if width < 1 or not 0 <= gamma < math.inf:
        raise ValueError(f"width {width} and gamma {gamma}: the workload needs a width of at least 1, a gamma from 0.")
    device = ("cuda" if group.on_device else "cpu") if device is None else device
    everyone = gather_lengths(lengths, group, device)
    return make_routing(everyone, bags, assign(everyone, bags, width, gamma), group.rank, device)


def make_routing(
    lengths: Sequence[Sequence[int]],
    bags: Sequence[BagRanks],
    assignment: Sequence[int],
    rank: int,
    device: torch.device | str = "cpu",
) -> Routing:
    """The routing of `rank` for a given assignment (`assign`'s or one's own). Pure."""
    next_row = [0] * sum(len(bag) for bag in bags)
    transfers = []
    for stop in _walk(lengths, bags, assignment):
        for place, target in enumerate(stop.bag):
            low, high = chunk_bounds(stop.length, len(stop.bag), place, stop.turn)
            transfers.append(Transfer(stop.home, stop.start + low, target, next_row[target], high - low))
            next_row[target] += high - low
    totals = [sum(own) for own in lengths]
    return Routing(
        rank,
        tuple(tuple(own) for own in lengths),
        tuple(tuple(bag) for bag in bags),
        tuple(assignment),
        _move(transfers, totals, rank, device, repeats=False),
    )


def route(tensors: Sequence[Tensor], routing: Routing, group: Group) -> list[Tensor]:
    """Home rows [n_home, ...] to bag rows [n_bag, ...] for tokens and features at once: one all-to-all. Collective,
    also for ranks without rows, and so is its backward.

    Differentiable in floating-point and complex tensors, also twice: where one of them requires gradients, on all ranks
    or on none, all results of these dtypes do, so that the ranks exchange the same. Detach what takes none.

    Raises ValueError for tensors that are not on the routing's device or have other rows than this rank.
    """
    return _apply(tensors, routing.tokens, group, back=False)


def unroute(tensors: Sequence[Tensor], routing: Routing, group: Group) -> list[Tensor]:
    """Bag rows [n_bag, ...] to home rows [n_home, ...] in their old order: the inverse of `route`.

    Results require gradients wherever these are enabled: a rank whose bag has no sequence has called no model, and
    takes part in the backward of the others, which may well be that of its own sequences.
    """
    if torch.is_grad_enabled():
        tensors = [tensor.detach().requires_grad_() if _lacks_gradient(tensor) else tensor for tensor in tensors]
    return _apply(tensors, routing.tokens, group, back=True)


def replicate(tensors: Sequence[Tensor], counts: Sequence[int], routing: Routing, group: Group) -> list[Tensor]:
    """Per-sequence rows (timesteps, pooled vectors, text tokens) from home to every rank of the sequence's bag, in the
    order of `routing.held`. counts[i] are the rows of sequence i, of the sequences of all ranks: ones for vectors.
    Gradients of all receivers are added up at home. Raises ValueError as `route` does."""
    known = len(routing.assignment)
    if len(counts) != known or any(count < 0 for count in counts):
        raise ValueError(
            f"counts {list(counts)}: give the rows of each of the {known} sequences of all ranks, 0 or more, in the "
            "order of routing.lengths."
        )
    ends = np.cumsum([0, *map(len, routing.lengths)])
    per_home = [list(counts[low:high]) for low, high in pairwise(ends)]
    next_row = [0] * len(routing.lengths)
    transfers = []
    for stop in _walk(per_home, routing.bags, routing.assignment):
        for target in stop.bag:
            transfers.append(Transfer(stop.home, stop.start, target, next_row[target], stop.length))
            next_row[target] += stop.length
    device = routing.tokens.send.device
    move = _move(transfers, [sum(own) for own in per_home], routing.rank, device, repeats=True)
    return _apply(tensors, move, group, back=False)


def gather_lengths(lengths: Sequence[int], group: Group, device: torch.device | str = "cpu") -> list[list[int]]:
    """Sequence lengths of every rank. Two small sums and two reads on the host."""
    if any(length < 1 for length in lengths):
        raise ValueError(f"sequence lengths {list(lengths)}: leave empty sequences out; a rank may bring none at all.")
    counts = torch.zeros(group.size, dtype=torch.int64, device=device)
    counts[group.rank] = len(lengths)
    group.all_reduce(counts)
    ends = np.cumsum([0, *counts.tolist()])
    everything = torch.zeros(int(ends[-1]), dtype=torch.int64, device=device)
    everything[ends[group.rank] : ends[group.rank + 1]] = torch.tensor(list(lengths), dtype=torch.int64)
    group.all_reduce(everything)
    flat = everything.tolist()
    return [flat[low:high] for low, high in pairwise(ends)]


def _check_bags(bags: Sequence[BagRanks], size: int) -> None:
    ranks = sorted(rank for bag in bags for rank in bag)
    if ranks != list(range(size)):
        raise ValueError(f"bags {list(bags)} must hold each rank 0..{size - 1} of the group exactly once.")


def _held(assignment: Sequence[int], bag: int) -> tuple[int, ...]:
    return tuple(index for index, chosen in enumerate(assignment) if chosen == bag)


def _walk(lengths: Sequence[Sequence[int]], bags: Sequence[BagRanks], assignment: Sequence[int]) -> Iterator[_Stop]:
    """All sequences in order."""
    turns = [0] * len(bags)
    chosen = iter(assignment)
    for home, own in enumerate(lengths):
        start = 0
        for length in own:
            bag = next(chosen)
            yield _Stop(home, start, length, bags[bag], turns[bag])
            start, turns[bag] = start + length, turns[bag] + 1


def _move(
    transfers: list[Transfer], totals: Sequence[int], rank: int, device: torch.device | str, repeats: bool
) -> Move:
    """Index tensors of `rank` from the transfers of all ranks; sorting is stable, so sequences keep their order."""
    out = sorted((t for t in transfers if t.source == rank != t.target), key=lambda t: t.target)
    into = sorted((t for t in transfers if t.target == rank != t.source), key=lambda t: t.source)
    stay = [t for t in transfers if t.source == rank == t.target]
    ranks = range(len(totals))

    def rows(ranges: Iterator[tuple[int, int]]) -> Tensor:
        runs = [np.arange(start, start + count) for start, count in ranges]
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *runs])).to(device)

    return Move(
        rows_in=totals[rank],
        rows_out=sum(t.rows for t in transfers if t.target == rank),
        send=rows((t.source_row, t.rows) for t in out),
        send_splits=[sum(t.rows for t in out if t.target == r) for r in ranks],
        receive=rows((t.target_row, t.rows) for t in into),
        receive_splits=[sum(t.rows for t in into if t.source == r) for r in ranks],
        keep_from=rows((t.source_row, t.rows) for t in stay),
        keep_to=rows((t.target_row, t.rows) for t in stay),
        idle=all(t.source == t.target or not t.rows for t in transfers),
        repeats=repeats,
    )


@_disable_dynamo  # a process group is nothing that a graph holds
def _apply(tensors: Sequence[Tensor], move: Move, group: Group, back: bool) -> list[Tensor]:
    wanted, device = move.rows_out if back else move.rows_in, move.send.device
    for tensor in tensors:
        if tensor.ndim == 0 or tensor.shape[0] != wanted:
            rows = tensor.shape[0] if tensor.ndim else "no"
            raise ValueError(
                f"a tensor of {rows} rows where the routing has {wanted} on this rank; give the rows of the sequences "
                "that this rank has, one after the other."
            )
        if tensor.device != device:
            raise ValueError(
                f"a tensor on {tensor.device} where the routing is on {device}; move it, or give plan device="
                f'"{tensor.device.type}".'
            )
    return list(_Route.apply(move, group, back, back and move.repeats, *tensors)) if tensors else []


class _RoutingContext(Context, Protocol):
    """Where the rows went, and which of the tensors have gradients."""

    move: Move
    group: Group
    back: bool
    add: bool
    differentiable: list[bool]


class _Route(torch.autograd.Function):
    """Rows there or `back`; with `add` rows that meet are added up. Its derivative is the other direction, by itself:
    what was copied is added, and what was added is copied."""

    @staticmethod
    def forward(
        ctx: _RoutingContext, move: Move, group: Group, back: bool, add: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.move, ctx.group, ctx.back, ctx.add = move, group, back, add
        ctx.differentiable = [_is_differentiable(tensor) for tensor in tensors]
        outputs = _exchange(tensors, move, group, back, add)
        ctx.mark_non_differentiable(*(out for out, moves in zip(outputs, ctx.differentiable) if not moves))
        return outputs

    @staticmethod
    def backward(ctx: _RoutingContext, *grads: Tensor) -> InputGradients:
        used = [grad for grad, moves in zip(grads, ctx.differentiable) if moves]
        add = ctx.move.repeats and not ctx.add
        moved = iter(_Route.apply(ctx.move, ctx.group, not ctx.back, add, *used))
        return None, None, None, None, *(next(moved) if moves else None for moves in ctx.differentiable)


def _exchange(tensors: Sequence[Tensor], move: Move, group: Group, back: bool, add: bool) -> tuple[Tensor, ...]:
    """Rows of all tensors travel as bytes of one buffer, so no dtype is promoted and nothing is rounded."""
    send, receive, keep_from, keep_to = move.send, move.receive, move.keep_from, move.keep_to
    send_splits, receive_splits, rows = move.send_splits, move.receive_splits, move.rows_out
    if back:
        send, receive, keep_from, keep_to = receive, send, keep_to, keep_from
        send_splits, receive_splits, rows = receive_splits, send_splits, move.rows_in
    dtypes = [tensor.dtype for tensor in tensors]
    tensors = [tensor if add else tensor.view(_moved_as(tensor.dtype)) for tensor in tensors]
    arrived = [tensor[:0] for tensor in tensors]
    if not move.idle:
        sent = torch.cat([_bytes(tensor.index_select(0, send)) for tensor in tensors], dim=1)
        buffer = sent.new_empty(len(receive), sent.shape[1])
        group.all_to_all(buffer, sent, receive_splits, send_splits)
        widths = [_row_bytes(tensor) for tensor in tensors]
        arrived = [_from_bytes(part, tensor) for part, tensor in zip(buffer.split(widths, dim=1), tensors)]
    outputs = []
    for tensor, part, dtype in zip(tensors, arrived, dtypes):
        kept = tensor.index_select(0, keep_from)
        if add:
            out = tensor.new_zeros(rows, *tensor.shape[1:])
            out.index_add_(0, keep_to, kept).index_add_(0, receive, part)
        else:
            out = tensor.new_empty(rows, *tensor.shape[1:])
            out.index_copy_(0, keep_to, kept).index_copy_(0, receive, part)
        outputs.append(out.view(dtype))
    return tuple(outputs)


def _moved_as(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same size that PyTorch indexes: it does not index float8, nor integers that are unsigned and
    wide."""
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return signed[dtype.itemsize] if dtype in _NOT_INDEXED else dtype


def _lacks_gradient(tensor: Tensor) -> bool:
    return _is_differentiable(tensor) and not (tensor.requires_grad or tensor.is_inference())


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _row_bytes(tensor: Tensor) -> int:
    return tensor.element_size() * math.prod(tensor.shape[1:])


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(-1).view(torch.uint8).view(rows.shape[0], _row_bytes(rows))


def _from_bytes(rows: Tensor, like: Tensor) -> Tensor:
    out = like.new_empty(rows.shape[0], *like.shape[1:])  # aligned for its dtype, which a slice of bytes need not be
    _bytes(out).copy_(rows)
    return out
