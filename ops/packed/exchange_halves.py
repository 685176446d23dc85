"""Ulysses attention with its all-to-alls hidden by the attention itself: the heads of each rank in two halves.

Heads do not see each other, so while one half is attended, the rows of the other are under way, in both directions:

    send 1, send 2, wait 1, attend 1, return 1, wait 2, attend 2, return 2, wait 1, wait 2

What stays exposed is the way there of the first half and the way back of the second. On NCCL exchanges run on a stream
of their own and a wait orders streams; Gloo has threads of its own. The numbers are those of whole exchanges. So are
their bits wherever a backend adds up a head in an order that does not depend on how many there are: on the CPU in fp32,
not in FlashAttention 3, which may cut keys into parts.

Autograd runs functions in the reverse order of their creation, on every rank alike, so the backward follows the same
schedule from its end without any bookkeeping, as in `ops.spatial_temporal.relayout`.

n local rows, N rows of the bag, H heads, d head size, k ranks, h heads of one rank and one half, c tensors that travel
together: 3 (q, k and v) or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from ops.comm.collectives import Group
from ops.halving import fills_halves, halves_of
from ops.kernels.base.autograd import Context, InputGradients
from ops.packed.packing import Exchange
from ops.waiting import PendingCollective

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [N, h, d] -> [N, h, d]


def worth_halving(exchange: Exchange, heads: int, group: Group) -> bool:
    """Whether a rank sends its `heads` in halves: as the layout says, else on NCCL where the attention of one half
    alone fills a GPU for long enough. Equal on all ranks of a bag."""
    if heads < 2 or exchange.degree == 1:
        return False
    if exchange.in_halves is not None:
        return exchange.in_halves
    return group.on_device and fills_halves(heads, sum(exchange.rows), exchange.scores)


def attention_in_halves(q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, group: Group, attend: Attend) -> Tensor:
    """Self-attention of packed sequences that are spread over the bag: q, k, v [n, H, d] -> [n, H, d]; H is a multiple
    of the degree, with two heads or more for each rank. Collective, forward and backward."""
    trip = _Trip(exchange, group, q.shape[1] // exchange.degree)
    way_back = []
    for half, token in enumerate(_Depart.apply(trip, q, k, v)):
        found = attend(*_Arrive.apply(trip, half, token))
        way_back.append(_Return.apply(trip, half, found))
    out: Tensor = _Home.apply(trip, *way_back)
    return out


@dataclass(slots=True)
class _Parcel:
    """Rows between the ranks: `sent` stays as it is until it has arrived."""

    pending: PendingCollective
    received: Tensor
    sent: Tensor


class _Trip:
    """The exchanges of one attention, there and back, and the same of its gradients."""

    def __init__(self, exchange: Exchange, group: Group, heads: int) -> None:
        self.exchange, self.group = exchange, group
        self.halves = halves_of(heads)
        self._under_way: dict[int, _Parcel] = {}  # by half; a half is on one way at a time

    # [n, H, d] of all heads -> [N, h, d] of one half

    def pack_rows(self, half: int, tensors: Sequence[Tensor]) -> Tensor:
        """c tensors [n, H, d] -> [k n, c, h, d], rank by rank."""
        degree, heads = self.exchange.degree, self.halves[half]
        own, size = len(tensors[0]), tensors[0].shape[-1]
        sent = tensors[0].new_empty(degree, own, len(tensors), heads.stop - heads.start, size)
        for place, tensor in enumerate(tensors):  # straight into the buffer: a stack first would copy all of it twice
            sent[:, :, place] = tensor.unflatten(1, (degree, -1))[:, :, heads].transpose(0, 1)
        return sent.flatten(0, 1)

    def send_rows(self, half: int, rows: Tensor) -> None:
        exchange = self.exchange
        own = exchange.rows[exchange.rank]
        received = rows.new_empty(sum(exchange.rows), *rows.shape[1:])
        self._send(half, rows, received, list(exchange.rows), [own] * exchange.degree)

    def heads_here(self, half: int) -> tuple[Tensor, ...]:
        """Waits; c tensors [N, h, d]."""
        received = self._wait(half)
        exchange = self.exchange
        return (received if exchange.in_order else received.index_select(0, exchange.gather)).unbind(1)

    # [N, h, d] of one half -> [n, H, d] of all heads

    def pack_heads(self, tensors: Sequence[Tensor]) -> Tensor:
        """c tensors [N, h, d] -> [N, c, h, d], rank by rank."""
        sent = tensors[0][:, None] if len(tensors) == 1 else torch.stack(list(tensors), dim=1)
        return sent if self.exchange.in_order else sent.index_select(0, self.exchange.scatter)

    def send_heads(self, half: int, heads: Tensor) -> None:
        exchange = self.exchange
        own = exchange.rows[exchange.rank]
        received = heads.new_empty(exchange.degree * own, *heads.shape[1:])
        self._send(half, heads, received, [own] * exchange.degree, list(exchange.rows))

    def rows_here(self, order: Sequence[int]) -> tuple[Tensor, ...]:
        """Waits for both halves in this order; c tensors [n, H, d]."""
        degree, own = self.exchange.degree, self.exchange.rows[self.exchange.rank]
        whole: Tensor | None = None
        for half in order:
            received, heads = self._wait(half), self.halves[half]
            if whole is None:
                _, count, _, size = received.shape
                whole = received.new_empty(count, own, degree, self.halves[-1].stop, size)
            whole[:, :, :, heads] = received.unflatten(0, (degree, own)).permute(2, 1, 0, 3, 4)
        assert whole is not None
        return whole.flatten(2, 3).unbind(0)

    def _send(self, half: int, sent: Tensor, received: Tensor, into: list[int], out_of: list[int]) -> None:
        pending = self.group.all_to_all_async(received, sent, into, out_of)
        self._under_way[half] = _Parcel(pending, received, sent)

    def _wait(self, half: int) -> Tensor:
        parcel = self._under_way.pop(half)
        parcel.pending.wait()
        return parcel.received


class _OfTrip(Context, Protocol):
    """Which half of which exchanges."""

    trip: _Trip
    half: int


class _Depart(Function):
    """q, k, v [n, H, d] leave in two halves. Backward: waits for their gradients, of the second half first."""

    @staticmethod
    def forward(ctx: _OfTrip, trip: _Trip, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.trip = trip
        for half in (0, 1):  # the first is on its way while the second is packed
            trip.send_rows(half, trip.pack_rows(half, tensors))
        return tuple(_token(tensors[0]) for _ in trip.halves)

    @staticmethod
    def backward(ctx: _OfTrip, *tokens: Tensor) -> InputGradients:
        return None, *ctx.trip.rows_here((1, 0))


class _Arrive(Function):
    """Waits for a half: q, k, v [N, h, d]. Backward: sends their gradients home."""

    @staticmethod
    def forward(ctx: _OfTrip, trip: _Trip, half: int, token: Tensor) -> tuple[Tensor, ...]:
        ctx.trip, ctx.half = trip, half
        return trip.heads_here(half)

    @staticmethod
    def backward(ctx: _OfTrip, *gradients: Tensor) -> InputGradients:
        ctx.trip.send_heads(ctx.half, ctx.trip.pack_heads(gradients))
        return None, None, _token(gradients[0])


class _Return(Function):
    """What attention found for a half, [N, h, d], leaves for home. Backward: waits for its gradient."""

    @staticmethod
    def forward(ctx: _OfTrip, trip: _Trip, half: int, found: Tensor) -> Tensor:
        ctx.trip, ctx.half = trip, half
        heads = trip.pack_heads([found])
        trip.send_heads(half, heads)
        return _token(heads)

    @staticmethod
    def backward(ctx: _OfTrip, token: Tensor) -> InputGradients:
        (gradient,) = ctx.trip.heads_here(ctx.half)
        return None, None, gradient


class _Home(Function):
    """Waits for both halves: [n, H, d]. Backward: sends their gradients out, the second half first."""

    @staticmethod
    def forward(ctx: _OfTrip, trip: _Trip, *tokens: Tensor) -> Tensor:
        ctx.trip = trip
        (out,) = trip.rows_here((0, 1))
        # Recomputation of a checkpointed block ends with the last tensor that was saved: not before both are here.
        ctx.save_for_backward(out.new_empty(0))
        return out

    @staticmethod
    def backward(ctx: _OfTrip, gradient: Tensor) -> InputGradients:
        trip = ctx.trip
        for half in (1, 0):
            trip.send_rows(half, trip.pack_rows(half, [gradient]))
        return None, *(_token(gradient) for _ in trip.halves)


def _token(like: Tensor) -> Tensor:
    """What stands between two functions for rows that are under way: one number that nobody reads, of any value."""
    return like.new_empty(())
