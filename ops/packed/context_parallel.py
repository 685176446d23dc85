"""Context parallelism for the heads that ranks share, Ulysses for the others: a bag of any degree.

n rows of this rank, H heads, k ranks (the degree), d head size. `ops.packed.head_shares` deals queries evenly, also
parts of a head; keys and values of a head go to every rank that has queries of it (as in Llama 3, sec. 3.3.2, which
gathers all of them). So each query meets all its keys in one call of any attention backend, without merging softmaxes,
and dK and dV are summed in rank order.

Why not a ring, or Ulysses over gcd(H, k) ranks with one beside it (USP: Fang and Zhao 2024): at degree 8 of 12 heads
this sends 1.17 times what Ulysses would (`degrees.exchanged`), USP with gathered K and V 1.43 times, a ring 4 times at
least. It needs no log-sum-exp, which not every backend gives, and no groups inside the bag. A layer costs a few index
kernels and one all-to-all each way, as in Ulysses, which this is where the degree divides the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ops.attention.table import AttentionSetting
from ops.attention.varlen import attention
from ops.comm.collectives import Group
from ops.kernels.base.autograd import Context, InputGradients
from ops.packed.head_shares import HeadShares, Splits
from ops.packed.packing import Exchange

_HALF = (torch.bfloat16, torch.float16)


def shared_heads_attention(
    q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, group: Group, backend: AttentionSetting
) -> Tensor:
    """Self-attention of packed sequences: q, k, v [n, H, d] -> [n, H, d], for any degree and number of heads.

    Collective: all ranks of the group call it in the same order, also with n = 0, forward and backward.
    """
    shares = exchange.shared(q.shape[1])
    parts = _RowsToShares.apply(shares, group, q, k.to(q.dtype), v.to(q.dtype))
    outputs = [
        attention(*triple, piece.lengths, exchange.lengths, backend)
        for triple, piece in zip(zip(parts[::3], parts[1::3], parts[2::3]), shares.pieces, strict=True)
    ]
    rows: tuple[Tensor] = _SharesToRows.apply(shares, group, *outputs)
    return rows[0]


def _exchange(sent: Tensor, splits: Splits, group: Group, back: bool = False) -> Tensor:
    """Units [sum(splits.sent), d] to their ranks: [sum(splits.received), d]; `back`: the other way."""
    into, out = (splits.sent, splits.received) if back else (splits.received, splits.sent)
    if group.size == 1:
        return sent
    received = sent.new_empty(sum(into), sent.shape[1])
    group.all_to_all(received, sent, into, out)
    return received


def _queries_out(rows: Tensor, shares: HeadShares, group: Group) -> list[Tensor]:
    """[n, H, d] to the queries' part of every share: [its rows, its heads, d]."""
    units = rows.reshape(-1, rows.shape[-1])
    received = _exchange(torch.empty_like(units).index_copy_(0, shares.q_alone, units), shares.alone, group)
    return [_picked(received, piece.q_alone, piece.heads) for piece in shares.pieces]


def _queries_back(parts: Sequence[Tensor], shares: HeadShares, group: Group) -> Tensor:
    """The inverse: [n, H, d]."""
    size = parts[0].shape[-1]
    sent = parts[0].new_empty(sum(shares.alone.received), size)
    for piece, part in zip(shares.pieces, parts, strict=True):
        sent.index_copy_(0, piece.q_alone, part.reshape(-1, size))
    arrived = _exchange(sent, shares.alone, group, back=True)
    return _picked(arrived, shares.q_alone, len(shares.copies[0].heads))


def _all_out(q: Tensor, k: Tensor, v: Tensor, shares: HeadShares, group: Group) -> list[Tensor]:
    """q, k, v [n, H, d] to those of every share, one share after the other."""
    size = q.shape[-1]
    sent = q.new_empty(sum(shares.together.sent), size)
    sent.index_copy_(0, shares.q, q.reshape(-1, size))
    for turn, copies in enumerate(shares.copies):
        for rows, places in ((k, copies.k), (v, copies.v)):
            chosen = rows.index_select(1, copies.heads) if turn else rows
            sent.index_copy_(0, places, chosen.reshape(-1, size))
    received = _exchange(sent, shares.together, group)
    return [_picked(received, places, piece.heads) for piece in shares.pieces for places in (piece.q, piece.k, piece.v)]


def _all_back(parts: Sequence[Tensor], shares: HeadShares, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what `_all_out` gave, in its order, to those of q, k and v [n, H, d]: copies are added up in rank
    order, half precision in fp32."""
    size, heads = parts[0].shape[-1], len(shares.copies[0].heads)
    sent = parts[0].new_empty(sum(shares.together.received), size)
    places = [one for piece in shares.pieces for one in (piece.q, piece.k, piece.v)]
    for place, part in zip(places, parts, strict=True):
        sent.index_copy_(0, place, part.reshape(-1, size))
    arrived = _exchange(sent, shares.together, group, back=True)

    def total(copies: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        found = _picked(arrived, copies[0][1], heads)
        wide = found.float() if found.dtype in _HALF else found
        for these, places in copies[1:]:  # no head twice: the sum has an order also on CUDA
            wide.index_add_(1, these, _picked(arrived, places, len(these)).to(wide.dtype))
        return wide.to(found.dtype)

    keys, values = ([(one.heads, getattr(one, name)) for one in shares.copies] for name in ("k", "v"))
    return _picked(arrived, shares.q, heads), total(keys), total(values)


def _picked(units: Tensor, places: Tensor, heads: int) -> Tensor:
    """Units [U, d] at `places`, row by row: [rows, heads, d]."""
    return units.index_select(0, places).view(-1, heads, units.shape[-1])


class _SharingContext(Context, Protocol):
    """What backward needs: between which ranks heads were shared, and how."""

    shares: HeadShares
    group: Group


class _RowsToShares(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _SharingContext, shares: HeadShares, group: Group, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.shares, ctx.group = shares, group
        return tuple(_all_out(q, k, v, shares, group))

    @staticmethod
    def backward(ctx: _SharingContext, *grads: Tensor) -> InputGradients:
        return None, None, *_all_back(grads, ctx.shares, ctx.group)


class _SharesToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _SharingContext, shares: HeadShares, group: Group, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.shares, ctx.group = shares, group
        return (_queries_back(parts, shares, group),)

    @staticmethod
    def backward(ctx: _SharingContext, *grads: Tensor) -> InputGradients:
        return None, None, *_queries_out(grads[0], ctx.shares, ctx.group)
