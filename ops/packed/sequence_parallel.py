"""Ulysses sequence parallelism over packed sequences: two all-to-alls around attention.

n local rows, N rows of the bag, H heads, h = H / k heads of one rank, d head size, k ranks (the degree).
Before attention each rank holds some rows of every sequence with all heads; the first all-to-all gives it all rows of
every sequence with its own h heads, the second one undoes that. q, k and v travel together. Row orders are fixed by
`Layout`, so a layer costs one index_select each way and no host loop.
(Ulysses: Jacobs et al. 2023; packed, uneven and without per-layer bookkeeping here.) Where the degree does not divide
the heads, ranks share some of them: `ops.packed.context_parallel`. Long sequences go in two halves of the heads, so
that attention hides the all-to-alls: `ops.packed.exchange_halves`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ops.attention.opaque import opaque
from ops.attention.table import AttentionSetting
from ops.attention.varlen import attention
from ops.comm.collectives import Group
from ops.kernels.base.autograd import Context, InputGradients
from ops.packed.context_parallel import shared_heads_attention
from ops.packed.exchange_halves import attention_in_halves, worth_halving
from ops.packed.packing import Exchange


@opaque
def sequence_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, group: Group, backend: AttentionSetting = "auto"
) -> Tensor:
    """Self-attention of packed sequences that are spread over the bag: q, k, v [n, H, d] -> [n, H, d].

    Any degree, also above the number of heads: a function of the two alone says how heads are dealt, so no plan has to.
    Only blocks of frames need a degree that divides the heads (ValueError).
    Collective: all ranks of the group call it in the same order, also with n = 0, forward and backward.
    """
    if group.size != exchange.degree or group.rank != exchange.rank:
        raise ValueError(
            f"the layout is for rank {exchange.rank} of degree {exchange.degree}, the group is rank "
            f"{group.rank} of {group.size}. Build the Layout with the bag's degree and rank."
        )
    if exchange.degree == 1 and exchange.in_order:
        return _attended(q, k, v, exchange, backend)
    if q.shape[1] % exchange.degree:
        if exchange.blocks:
            raise ValueError(
                f"attention by blocks of frames in a bag of {exchange.degree}, which does not divide the "
                f"{q.shape[1]} heads. Use a number of workers that does."
            )
        return shared_heads_attention(q, k, v, exchange, group, backend)
    if worth_halving(exchange, q.shape[1] // exchange.degree, group):
        return attention_in_halves(q, k, v, exchange, group, lambda q, k, v: _attended(q, k, v, exchange, backend))
    q, k, v = RowsToHeads.apply(exchange, group, q, k, v)
    heads = _attended(q, k, v, exchange, backend)
    outputs: tuple[Tensor] = HeadsToRows.apply(exchange, group, heads)
    return outputs[0]


def _attended(q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, backend: AttentionSetting) -> Tensor:
    """Attention of whole sequences, [N, h, d]: a sequence sees all of itself, or its blocks see those before them."""
    if not exchange.blocks:
        return attention(q, k, v, exchange.lengths, exchange.lengths, backend)
    # a call for each block: keys and values of those before it lie together already
    parts = [attention(q[b.queries], k[b.keys], v[b.keys], *b.lengths, backend) for b in exchange.blocks]
    return torch.cat(parts)


def rows_to_heads(tensors: Sequence[Tensor], exchange: Exchange, group: Group) -> tuple[Tensor, ...]:
    """c tensors [n, H, d] -> c tensors [N, h, d]: own rows with all heads to all rows with own heads, together."""
    degree, own, count = exchange.degree, exchange.rows[exchange.rank], len(tensors)
    _, heads, size = tensors[0].shape
    sent = tensors[0].new_empty(degree, own, count, heads // degree, size)
    for place, tensor in enumerate(tensors):  # straight into the buffer: a stack first would copy all of it twice
        sent[:, :, place] = tensor.unflatten(1, (degree, -1)).transpose(0, 1)
    received = sent.flatten(0, 1)
    if degree > 1:
        received = sent.new_empty(sum(exchange.rows), *sent.shape[2:])
        group.all_to_all(received, sent.flatten(0, 1), list(exchange.rows), [own] * degree)
    return (received if exchange.in_order else received.index_select(0, exchange.gather)).unbind(1)


def heads_to_rows(tensors: Sequence[Tensor], exchange: Exchange, group: Group) -> tuple[Tensor, ...]:
    """c tensors [N, h, d] -> c tensors [n, H, d]: the inverse of `rows_to_heads`."""
    degree, own = exchange.degree, exchange.rows[exchange.rank]
    sent = tensors[0][:, None] if len(tensors) == 1 else torch.stack(list(tensors), dim=1)
    sent = sent if exchange.in_order else sent.index_select(0, exchange.scatter)
    received = sent
    if degree > 1:
        received = sent.new_empty(degree * own, *sent.shape[1:])
        group.all_to_all(received, sent, [own] * degree, list(exchange.rows))
    by_tensor: Tensor = received.unflatten(0, (degree, own)).permute(2, 1, 0, 3, 4)  # [c, n, k, h, d]
    return by_tensor.flatten(2, 3).unbind(0)


class _Ends(Context, Protocol):
    """What backward needs: between which ranks the heads were exchanged."""

    exchange: Exchange
    group: Group


class RowsToHeads(torch.autograd.Function):
    """Both directions only permute elements, so each one's backward is the other one's forward."""

    @staticmethod
    def forward(ctx: _Ends, exchange: Exchange, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.group = exchange, group
        return rows_to_heads(tensors, exchange, group)

    @staticmethod
    def backward(ctx: _Ends, *grads: Tensor) -> InputGradients:
        return None, None, *heads_to_rows(grads, ctx.exchange, ctx.group)


class HeadsToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Ends, exchange: Exchange, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.group = exchange, group
        return heads_to_rows(tensors, exchange, group)

    @staticmethod
    def backward(ctx: _Ends, *grads: Tensor) -> InputGradients:
        return None, None, *rows_to_heads(grads, ctx.exchange, ctx.group)
