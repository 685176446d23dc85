"""One change of layout, part by part, and the same way back for gradients.

B samples, C width. A part is what a slice of the layer before (`source`) holds of a slice of the layer after
(`target`); it travels as rows [cut, own source, B, C], rank by rank. Sending is asynchronous: NCCL runs it on a stream
of its own after the work that was queued before, Gloo in its own threads.

Autograd runs functions in the reverse order of their creation, on every rank alike. So the backward of `_Arrival` (a
slice's gradient is there: send its parts) and of `_Departure` (a slice needs its gradient: wait) follow
`backward_program` without any further bookkeeping; the tensors between the two carry no data, as the parts are on the
way. Buffers live from the packing of a part until its arrival.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from ops.comm.collectives import Group
from ops.kernels.base.autograd import Context, InputGradients
from ops.spatial_temporal.schedule import Grid, axis_of, length_of, returned_at_once, returned_later
from ops.waiting import PendingCollective


@dataclass(slots=True)
class PartInFlight:
    """A part between two ranks' slices: the sender may not touch `sent` before it has arrived."""

    pending: PendingCollective
    received: Tensor
    sent: Tensor


class Relayout:
    """The exchange in front of layer number `layer`, once per forward. Collective: all ranks call in the same order."""

    def __init__(self, grid: Grid, group: Group, layer: int) -> None:
        self.grid, self.group, self.layer = grid, group, layer
        self.target_axis, self.source_axis = axis_of(layer), axis_of(layer + 1)
        self.num_targets = grid.schedule.slices(self.target_axis)
        self.num_sources = grid.schedule.slices(self.source_axis)
        self.cut_dim = 1 if self.target_axis == "temporal" else 2  # of a block [B, T, S, C]: what is dealt to the ranks
        self.whole_dim = 3 - self.cut_dim  # what becomes whole
        self._packed: dict[tuple[int, int], Tensor] = {}  # (target, source): rows that are ready to be sent
        self._under_way: dict[tuple[int, int], PartInFlight] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}  # packed, not yet returned
        self._returning: dict[tuple[int, int], PartInFlight] = {}
        self._slices_returned = 0

    def depart(self, source: int, block: Tensor) -> None:
        """A slice of the layer before is done: [B, t, S, C] or [B, T, s, C] of own rows. Sends nothing yet."""
        for target, rows in enumerate(_Departure.apply(self, source, block)):
            self._packed[target, source] = rows

    def send(self, target: int, source: int) -> None:
        """Starts the exchange of one part."""
        rows = self._packed[target, source].detach()
        self._under_way[target, source] = self._exchange(rows, target, source, back=False)

    def arrive(self, target: int) -> Tensor:
        """Waits for all parts of a slice of the layer; the block it computes on."""
        rows = [self._packed.pop((target, source)) for source in range(self.num_sources)]
        block: Tensor = _Arrival.apply(self, target, *rows)
        return block

    # What the functions do ------------------------------------------------------------------------------------------

    def pack(self, block: Tensor) -> tuple[Tensor, ...]:
        """Rows [cut, own source, B, C] of every target slice."""
        cut = self._row_order(block)
        parts = (self.grid.part(self.target_axis, target) for target in range(self.num_targets))
        return tuple(cut[part].flatten(0, 1).contiguous() for part in parts)

    def unpack_gradient(self, source: int, like: Tensor) -> Tensor:
        """Waits for the gradients of all parts that a slice of the layer before gave away: its block's gradient."""
        gradient = like.new_empty(self._source_shape(source, like))
        rows = self._row_order(gradient)
        for target in range(self.num_targets):
            part = self._returning.pop((target, source))
            part.pending.wait()
            here = rows[self.grid.part(self.target_axis, target)]
            here.copy_(part.received.view(here.shape))
        return gradient

    def unpack(self, target: int, like: Tensor) -> Tensor:
        """Waits part by part; the block [B, own, S, C] or [B, T, own, C] of a target slice."""
        block = like.new_empty(self._target_shape(target, like))
        rows = self._row_order(block)  # [own, whole, B, C]
        for source in range(self.num_sources):
            part = self._under_way.pop((target, source))
            part.pending.wait()
            for piece, place in zip(
                part.received.split(self._lengths(target, source)), self.grid.chunks(self.source_axis, source)
            ):
                here = rows[:, place]
                here.copy_(piece.view(here.shape))
        return block

    def return_gradient(self, target: int, gradient: Tensor) -> None:
        """A slice of the layer has been run backward: packs its parts' gradients and sends those that go at once; after
        the last slice of the layer the others follow, in the order in which the layer before needs them."""
        rows = self._row_order(gradient)
        schedule = self.grid.schedule
        for source in range(self.num_sources):
            pieces = [rows[:, place].flatten(0, 1) for place in self.grid.chunks(self.source_axis, source)]
            self._gradients[target, source] = torch.cat(pieces)
        for source in returned_at_once(schedule, self.layer):
            self._send_back(target, source)
        self._slices_returned += 1
        if self._slices_returned == self.num_targets:
            self._slices_returned = 0
            for late_target, source in returned_later(schedule, self.layer):
                self._send_back(late_target, source)

    def _send_back(self, target: int, source: int) -> None:
        rows = self._gradients.pop((target, source))
        self._returning[target, source] = self._exchange(rows, target, source, back=True)

    def _exchange(self, rows: Tensor, target: int, source: int, back: bool) -> PartInFlight:
        width = length_of(self.grid.chunk(self.source_axis, source, self.grid.rank))
        as_source = [length_of(chunk) * width for chunk in self.grid.chunks(self.target_axis, target)]
        as_target = self._lengths(target, source)
        sent, received = (as_target, as_source) if back else (as_source, as_target)
        buffer = rows.new_empty(sum(received), *rows.shape[1:])
        whole = self.grid.part(self.target_axis, target), self.grid.part(self.source_axis, source)
        if not all(map(length_of, whole)):  # on every rank
            return PartInFlight(PendingCollective(None, None, "an empty part"), buffer, rows)
        return PartInFlight(self.group.all_to_all_async(buffer, rows, received, sent), buffer, rows)

    # Shapes ----------------------------------------------------------------------------------------------------------

    def _row_order(self, block: Tensor) -> Tensor:
        """A view [cut, whole, B, C] of a block [B, T, S, C]."""
        return block.permute(self.cut_dim, self.whole_dim, 0, 3)

    def _lengths(self, target: int, source: int) -> list[int]:
        """Rows of a part that this rank, as the target, gets from each rank."""
        own = length_of(self.grid.chunk(self.target_axis, target, self.grid.rank))
        return [own * length_of(chunk) for chunk in self.grid.chunks(self.source_axis, source)]

    def _target_shape(self, target: int, rows: Tensor) -> tuple[int, ...]:
        own = length_of(self.grid.chunk(self.target_axis, target, self.grid.rank))
        whole = self.grid.positions if self.target_axis == "temporal" else self.grid.frames
        t, s = (own, whole) if self.target_axis == "temporal" else (whole, own)
        return rows.shape[1], t, s, rows.shape[2]

    def _source_shape(self, source: int, rows: Tensor) -> tuple[int, ...]:
        own = length_of(self.grid.chunk(self.source_axis, source, self.grid.rank))
        whole = self.grid.frames if self.target_axis == "temporal" else self.grid.positions
        t, s = (whole, own) if self.target_axis == "temporal" else (own, whole)
        return rows.shape[1], t, s, rows.shape[2]


class _Slice(Context, Protocol):
    """Which slice of which exchange."""

    relayout: Relayout
    index: int
    shapes: tuple[torch.Size, ...]


class _Departure(Function):
    """A block to its parts. Its backward waits for their gradients, which no tensor carries."""

    @staticmethod
    def forward(ctx: _Slice, relayout: Relayout, source: int, block: Tensor) -> tuple[Tensor, ...]:
        ctx.relayout, ctx.index = relayout, source
        return relayout.pack(block)

    @staticmethod
    def backward(ctx: _Slice, *tokens: Tensor) -> InputGradients:
        return None, None, ctx.relayout.unpack_gradient(ctx.index, tokens[0])


class _Arrival(Function):
    """Parts to a block. Its backward sends their gradients and hands back zeros without memory in their place."""

    @staticmethod
    def forward(ctx: _Slice, relayout: Relayout, target: int, *parts: Tensor) -> Tensor:
        ctx.relayout, ctx.index = relayout, target
        ctx.shapes = tuple(part.shape for part in parts)
        return relayout.unpack(target, parts[0])

    @staticmethod
    def backward(ctx: _Slice, gradient: Tensor) -> InputGradients:
        ctx.relayout.return_gradient(ctx.index, gradient)
        token = gradient.new_zeros(())
        return None, None, *(token.expand(shape) for shape in ctx.shapes)
