"""What transformers with spatial and temporal blocks in turn share: rows of a stack by frame and by position.

S sequences, B of one stack, T frames, P positions of a frame (h w), n rows of a slice, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ops.attention.lengths import Lengths
from ops.attention.table import AttentionSetting
from ops.attention.varlen import attention
from ops.comm.collectives import Group
from ops.kernels.base.segments import Segments
from ops.models.base.transformer import PackedTransformer
from ops.packed.packing import Exchange
from ops.packed.sequence_parallel import sequence_parallel_attention
from ops.spatial_temporal.layers import LayerFunction, run_layers
from ops.spatial_temporal.packed import Stack
from ops.spatial_temporal.ulysses import frames_exchange, run_in_place

RowBlock = Callable[..., Tensor]
"""(rows [n, D], inputs of the stack, length of a sequence of its attention, their number, ...) -> [n, D]"""


@dataclass(slots=True)
class StackInputs:
    """What all blocks share for the sequences of one stack; index tensors are kept by size of the slice.

    Where a bag runs by Ulysses, spatial blocks have inputs of their own (`frames`), by which they attend to all of a
    frame (`spread`).
    """

    modulation: Tensor  # [B, 6, D]
    text: Tensor  # [rows of text, D]
    text_lengths: Lengths
    device: torch.device
    frames: StackInputs | None = None
    spread: tuple[Exchange, Group] | None = None
    _segments: dict[int, Segments] = field(default_factory=dict)
    _lengths: dict[tuple[int, int], Lengths] = field(default_factory=dict)

    @staticmethod
    def of(stack: Stack, modulation: Tensor, texts: Sequence[Tensor]) -> StackInputs:
        """The inputs of the sequences of a stack: modulation [S, 6, D] and text [rows, D] of each of all sequences of
        the layout."""
        return StackInputs(
            modulation=modulation[stack.index],
            text=torch.cat([texts[member] for member in stack.members]),
            text_lengths=stack.text,
            device=modulation.device,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, length: int, count: int, backend: AttentionSetting) -> Tensor:
        """Self-attention within `count` sequences of `length` rows [n, H, d], n = length count, or within the whole
        frames of which these are rows -> [n, H, d]."""
        if self.spread is not None:
            return sequence_parallel_attention(q, k, v, *self.spread, backend)
        lengths = self.lengths(length, count)
        return attention(q, k, v, lengths, lengths, backend)

    def segments(self, rows: int) -> Segments:
        """The modulation row of each of `rows` rows of each sequence."""
        if rows not in self._segments:
            self._segments[rows] = Segments.dense(len(self.modulation), rows, self.device)
        return self._segments[rows]

    def lengths(self, length: int, count: int) -> Lengths:
        """Lengths of `count` sequences of attention."""
        if (length, count) not in self._lengths:
            self._lengths[length, count] = Lengths.alike(length, count, self.device)
        return self._lengths[length, count]


class SpatialTemporalTransformer(PackedTransformer):
    """Runs blocks on the rows of a stack; see `ops.spatial_temporal.layers.LayerFunction` for what calls what."""

    def inputs_of(self, stack: Stack, modulation: Tensor, texts: Sequence[Tensor], group: Group) -> StackInputs:
        """The inputs of a stack on a bag, as in `StackInputs.of`."""
        shared = StackInputs.of(stack, modulation, texts)
        if self.config.deals_heads and group.size > 1:
            size = len(stack.members), stack.split.frames, stack.split.positions
            exchange = frames_exchange(*size, group.size, group.rank, shared.device, self.config.in_halves)
            shared.frames = replace(shared, spread=(exchange, group))
        return shared

    def through(self, x: Tensor, layers: Sequence[LayerFunction], stack: Stack, group: Group) -> Tensor:
        """x [B, T, s, D] of a stack at rest through spatial and temporal blocks in turn. Collective."""
        if self.config.deals_heads:
            return run_in_place(x, layers, stack.positions)
        return run_layers(x, layers, stack.split, group)

    def on_frames(self, block: RowBlock, shared: StackInputs, x: Tensor, *rest: object) -> Tensor:
        """x [B, t, P, D]: rows by frame."""
        batch, frames, positions, _ = x.shape
        rows = self.run(block, x.flatten(0, 2), shared.frames or shared, positions, batch * frames, *rest)
        return rows.view(x.shape)

    def on_positions(self, block: RowBlock, shared: StackInputs, x: Tensor, *rest: object) -> Tensor:
        """x [B, T, s, D]: rows by position."""
        batch, frames, positions, _ = x.shape
        by_position = x.transpose(1, 2)
        rows = self.run(block, by_position.flatten(0, 2), shared, frames, batch * positions, *rest)
        return rows.view(by_position.shape).transpose(1, 2)


class FlatPatches(nn.Module):
    """Squares of a frame as tokens: a convolution `proj` whose stride is its kernel, as one matrix product."""

    def __init__(self, proj: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, tokens: Tensor) -> Tensor:
        """[..., C * patch] -> [..., D]"""
        weight = self.proj.weight
        return nn.functional.linear(tokens.to(weight.dtype), weight.flatten(1), self.proj.bias)


def sinusoids(places: Tensor, dim: int) -> Tensor:
    """places [n] -> [n, dim] in fp64, sines first (Diffusers' get_1d_sincos_pos_embed_from_grid)."""
    half = dim // 2
    frequencies = 10000.0 ** -(torch.arange(half, dtype=torch.float64, device=places.device) / half)
    angles = places.double()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def frame_positions(rows: Tensor, columns: Tensor, dim: int) -> Tensor:
    """rows [h], columns [w] -> [h w, dim] in fp64: sinusoids of w, then of h."""
    half, h, w = dim // 2, len(rows), len(columns)
    return torch.cat([sinusoids(columns, half).repeat(h, 1), sinusoids(rows, half).repeat_interleave(w, dim=0)], dim=1)


def first_channels(rows: Tensor, patch: int, channels: int) -> Tensor:
    """The first `channels` of [n, patch (C, more)], channel last as in published heads: [n, channels patch], channel
    first. The rest are learned variances, which are not trained."""
    first: Tensor = rows.unflatten(-1, (patch, -1))[..., :channels].transpose(-1, -2).flatten(-2)
    return first
