"""Latte's diffusion transformer over packed sequences, with the parameter names of LatteTransformer3DModel.

Spatial blocks attend within a frame and to the text, temporal blocks along a position, in turn (Ma et al. 2024, variant
1). A bag runs them by spatial-temporal parallelism: sequences of one token grid as a stack, stacks one after the other.

S sequences, B of one stack, T frames, P positions of a frame (h w), n rows of a slice, D width, H heads, d head size.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ops.attention.varlen import attention
from ops.kernels.base.segments import Segments
from ops.kernels.gate_residual.op import gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate.op import ln_modulate
from ops.models.base.layers import FeedForward, TimeModulation, TwoLayerMLP, gelu_tanh, init_linear
from ops.models.base.spatial_temporal import (
    FlatPatches,
    SpatialTemporalTransformer,
    StackInputs,
    first_channels,
    frame_positions,
    sinusoids,
)
from ops.models.base.transformer import ForwardInputs
from ops.models.latte.config import LatteConfig
from ops.spatial_temporal.layers import LayerFunction
from ops.spatial_temporal.packed import Rest, Stack, from_rest, to_rest

_OUT_EPS = 1e-6


class LatteDiT(SpatialTemporalTransformer):
    config: LatteConfig

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        dim = config.dim
        patch = config.patch[1:]
        self.pos_embed = FlatPatches(nn.Conv2d(config.in_channels, dim, patch, patch))
        self.adaln_single = TimeModulation(dim)
        self.caption_projection = TwoLayerMLP(config.text_dim, dim, gelu_tanh)
        self.transformer_blocks = nn.ModuleList(LatteSpatialBlock(config) for _ in range(config.num_layers))
        self.temporal_transformer_blocks = nn.ModuleList(LatteBlock(config) for _ in range(config.num_layers))
        self.scale_shift_table = nn.Parameter(torch.randn(2, dim) / dim**0.5)
        self.proj_out = nn.Linear(dim, 2 * config.out_channels * self.patch_size)  # noise and variance
        init_linear(self, head=self.proj_out)
        nn.init.xavier_uniform_(self.pos_embed.proj.weight.flatten(1))

    def velocity(self, given: ForwardInputs) -> Tensor:
        """The predicted noise."""
        layout, group = given.layout, given.group
        rest = layout.made(Rest.of, self.how_sliced())
        time, modulation = self.adaln_single(given.timesteps)
        texts = self.caption_projection(given.text).split(layout.text_lengths)
        tables = (self.scale_shift_table.to(time.dtype) + time[:, None]).unbind(1)  # shift and scale [S, D]
        finished = []
        for stack, tokens in zip(rest.stacks, to_rest(given.tokens, rest, group)):
            shared = self.inputs_of(stack, modulation, texts, group)
            x = self.pos_embed(tokens)
            x = x + spatial_positions(stack, self.config)[stack.positions].to(x.dtype)
            x = self.through(x, self._layers(stack, shared), stack, group)
            shift, scale = (table[stack.index] for table in tables)
            segments = shared.segments(x.shape[1] * x.shape[2])
            rows = ln_modulate(x.flatten(0, 2), scale, shift, segments, eps=_OUT_EPS)
            noise = first_channels(self.proj_out(rows), self.patch_size, self.config.out_channels)
            finished.append(noise.unflatten(0, x.shape[:3]))
        return from_rest(finished, rest, group)

    def _layers(self, stack: Stack, shared: StackInputs) -> list[LayerFunction]:
        """Spatial and temporal blocks in turn, as `run_layers` calls them. Frames are numbered after the first spatial
        block, pictures are not."""
        moments = None
        if stack.split.frames > 1:
            places = torch.arange(stack.split.frames, dtype=torch.float64, device=shared.device)
            moments = sinusoids(places, self.config.dim)[:, None]  # [T, 1, D]
        layers: list[LayerFunction] = []
        for number, (spatial, temporal) in enumerate(zip(self.transformer_blocks, self.temporal_transformer_blocks)):
            layers.append(partial(self._on_frames, spatial, shared))
            layers.append(partial(self._on_positions, temporal, shared, None if number else moments))
        return layers

    def _on_frames(self, block: nn.Module, shared: StackInputs, x: Tensor, numbers: Tensor) -> Tensor:
        return self.on_frames(block, shared, x)

    def _on_positions(
        self, block: nn.Module, shared: StackInputs, moments: Tensor | None, x: Tensor, numbers: Tensor
    ) -> Tensor:
        return self.on_positions(block, shared, x if moments is None else x + moments.to(x.dtype))


def spatial_positions(stack: Stack, config: LatteConfig) -> Tensor:
    """[h w, D] in fp64: sinusoids of w, then of h, scaled to the grid of `sample_size`."""
    _, h, w = stack.grid
    base, scale = config.sample_size // config.patch[1], max(config.sample_size // 64, 1)
    # in fp32 as published, so that places that fp32 cannot hold are the same ones
    device = stack.positions.device
    rows, columns = (torch.arange(n, dtype=torch.float32, device=device) / (n / base) / scale for n in (h, w))
    return frame_positions(rows, columns, config.dim)


class LatteAttention(nn.Module):
    """Projections of Diffusers' Attention; queries and keys are not normalised."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.to_q, self.to_k, self.to_v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [n, H, d] of x; k, v [m, H, d] of the context."""
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        return self._heads(q), self._heads(k), self._heads(v)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def output(self, heads: Tensor) -> Tensor:
        """[n, H, d] -> [n, D]"""
        return self.to_out[0](heads.flatten(1))


class LatteBlock(nn.Module):
    """Attention within `count` sequences of `length` rows, then the MLP: a temporal block."""

    def __init__(self, config: LatteConfig) -> None:
        super().__init__()
        self.eps, self.backend = config.eps, config.attention
        self.attn1 = LatteAttention(config.dim, config.head_dim)
        self.ff = FeedForward(config.dim, config.ffn_dim)
        self.scale_shift_table = nn.Parameter(torch.randn(6, config.dim) / config.dim**0.5)

    def forward(self, x: Tensor, shared: StackInputs, length: int, count: int) -> Tensor:
        """x [n, D] -> [n, D], n = length count."""
        segments = shared.segments(len(x) // len(shared.modulation))
        table = self.scale_shift_table.to(shared.modulation.dtype) + shared.modulation
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = table.unbind(1)
        h = ln_modulate(x, scale, shift, segments, eps=self.eps)
        q, k, v = self.attn1.project(h, h)
        y = self.attn1.output(shared.attend(q, k, v, length, count, self.backend))
        x, h = self._after(x, y, gate, mlp_scale, mlp_shift, shared, segments)
        return gate_residual(x, self.ff(h), mlp_gate, segments)

    def _after(
        self,
        x: Tensor,
        y: Tensor,
        gate: Tensor,
        scale: Tensor,
        shift: Tensor,
        shared: StackInputs,
        segments: Segments,
    ) -> tuple[Tensor, Tensor]:
        """What attention gave is added: the stream, and what the MLP sees of it."""
        return gate_residual_ln_modulate(x, y, gate, scale, shift, segments, eps=self.eps)


class LatteSpatialBlock(LatteBlock):
    """The same with cross-attention to the text of each sequence, which reads the stream as it is."""

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        self.attn2 = LatteAttention(config.dim, config.head_dim)

    def _after(
        self,
        x: Tensor,
        y: Tensor,
        gate: Tensor,
        scale: Tensor,
        shift: Tensor,
        shared: StackInputs,
        segments: Segments,
    ) -> tuple[Tensor, Tensor]:
        x = gate_residual(x, y, gate, segments)
        q, k, v = self.attn2.project(x, shared.text)
        each = len(x) // len(shared.modulation)
        queries = shared.lengths(each, len(shared.modulation))
        y = self.attn2.output(attention(q, k, v, queries, shared.text_lengths, self.backend))
        return gate_residual_ln_modulate(x, y, None, scale, shift, segments, eps=self.eps)
