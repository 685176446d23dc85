"""STDiT3 over packed sequences, with the parameter names of Open-Sora 1.2 (Zheng et al. 2024).

Spatial blocks attend within a frame, temporal ones along a position with RoPE over the frames, in turn, and all of them
to the text. A bag runs them by spatial-temporal parallelism: sequences of one token grid as a stack, stacks one after
the other.

S sequences, B of one stack, T frames, P positions of a frame (h w), n rows of a slice, D width, H heads, d head size.

The published weights predict signal minus noise. Here, as in every family, a transformer predicts noise minus signal:
that is turned at its end.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.attention.varlen import attention
from ops.kernels.gate_residual.op import gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate.op import ln_modulate
from ops.kernels.qk_rope.op import qk_norm_rope
from ops.models.base.layers import gelu_tanh, sinusoidal_embedding
from ops.models.base.spatial_temporal import (
    FlatPatches,
    SpatialTemporalTransformer,
    StackInputs,
    first_channels,
    frame_positions,
)
from ops.models.base.transformer import ForwardInputs
from ops.models.stdit3.config import STDiT3Config
from ops.packed.packing import Layout
from ops.precision import precise_linear
from ops.spatial_temporal.layers import LayerFunction
from ops.spatial_temporal.packed import Rest, Stack, from_rest, to_rest

_SINUSOIDS = 256  # of times and frame rates, not a setting in the published code
_OUT_EPS = 1e-6
_PICTURE_RATE = 120.0  # frames per second that a picture is said to have


class STDiT3(SpatialTemporalTransformer):
    config: STDiT3Config

    def __init__(self, config: STDiT3Config) -> None:
        super().__init__(config)
        dim = config.dim
        self.x_embedder = FlatPatches(nn.Conv3d(config.in_channels, dim, config.patch, config.patch))
        self.t_embedder = ScalarEmbedder(dim)
        self.fps_embedder = ScalarEmbedder(dim)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.y_embedder = CaptionEmbedder(config)
        self.spatial_blocks = nn.ModuleList(STDiT3Block(config) for _ in range(config.num_layers))
        self.temporal_blocks = nn.ModuleList(STDiT3Block(config) for _ in range(config.num_layers))
        self.final_layer = FinalLayer(dim, 2 * config.out_channels * self.patch_size)  # velocity and variance
        self._draw()

    def velocity(self, given: ForwardInputs) -> Tensor:
        """[n, C * patch]. Raises ValueError for clips with clean frames."""
        layout, group = given.layout, given.group
        if layout.has_clean_frames:
            raise ValueError("a clip with clean frames: STDiT3 is trained here with one time for all of a clip.")
        rest = layout.made(Rest.of, self.how_sliced(), self.config.caption_rows)
        time, modulation = self._told(given.timesteps, layout)
        texts = self.y_embedder(given.text, layout)
        finished = []
        for stack, tokens in zip(rest.stacks, to_rest(given.tokens, rest, group)):
            shared = self.inputs_of(stack, modulation, texts, group)
            x = self.x_embedder(tokens)
            x = x + spatial_positions(stack, self.config)[stack.positions].to(x.dtype)
            x = self.through(x, self._layers(stack, shared), stack, group)
            rows = self.final_layer(x.flatten(0, 2), time[stack.index], shared)
            rows = first_channels(rows, self.patch_size, self.config.out_channels)
            finished.append(-rows.unflatten(0, x.shape[:3]))
        return from_rest(finished, rest, group)

    def _told(self, timesteps: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """What all blocks get for each sequence, its time and frame rate: [S, D], and as modulation [S, 6, D].

        In at least fp32, also with weights in bf16 and under autocast: modulation multiplies every activation.
        """
        told = self.t_embedder(timesteps) + self.fps_embedder(layout.made(_rates, self.config.frame_rate))
        projection = self.t_block[1]
        assert isinstance(projection, nn.Linear)
        return told, precise_linear(projection, F.silu(told)).unflatten(1, (6, -1))

    def _layers(self, stack: Stack, shared: StackInputs) -> list[LayerFunction]:
        """Spatial and temporal blocks in turn, as `run_layers` calls them."""
        cos, sin = frame_rotation(stack.split.frames, self.config, shared)
        layers: list[LayerFunction] = []
        for spatial, temporal in zip(self.spatial_blocks, self.temporal_blocks):
            layers.append(partial(self._on_frames, spatial, shared))
            layers.append(partial(self._on_positions, temporal, shared, cos, sin))
        return layers

    def _on_frames(self, block: nn.Module, shared: StackInputs, x: Tensor, numbers: Tensor) -> Tensor:
        return self.on_frames(block, shared, x)

    def _on_positions(
        self, block: nn.Module, shared: StackInputs, cos: Tensor, sin: Tensor, x: Tensor, numbers: Tensor
    ) -> Tensor:
        return self.on_positions(block, shared, x, cos, sin)

    def _draw(self) -> None:
        """Xavier for projections, 0.02 for the first layer of what embeds a number, as published. What is published as
        zero is small instead, so that every parameter has a gradient from the first step on."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.flatten(1))
        for embedder in (self.t_embedder, self.fps_embedder):
            for linear in embedder.linears:
                nn.init.normal_(linear.weight, std=0.02)
        nn.init.normal_(self.final_layer.linear.weight, std=0.02)


def _rates(layout: Layout, frame_rate: float) -> Tensor:
    """fp32 [S]: frames per second, or what stands for a picture."""
    rates = [one.frame_rate or frame_rate for one in layout.sequences]
    return torch.tensor([r if one.grid[0] > 1 else _PICTURE_RATE for r, one in zip(rates, layout.sequences)])


def spatial_positions(stack: Stack, config: STDiT3Config) -> Tensor:
    """[h w, D] in fp64: sinusoids of w, then of h, scaled to a square grid of as many tokens and to the frame's size in
    pixels."""
    _, h, w = stack.grid
    pixels = h * config.patch[1] * config.pixel_stride[0] * w * config.patch[2] * config.pixel_stride[1]
    scale, side = math.sqrt(pixels) / config.base_size, round(math.sqrt(h * w))
    # in fp32 as published, so that places that fp32 cannot hold are the same ones
    device = stack.positions.device
    rows, columns = (torch.arange(n, dtype=torch.float32, device=device) / scale * (side / n) for n in (h, w))
    return frame_positions(rows, columns, config.dim)


def frame_rotation(frames: int, config: STDiT3Config, shared: StackInputs) -> tuple[Tensor, Tensor]:
    """cos and sin [T, d / 2] of the rotation of a head by the number of its frame, at least fp32."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=shared.device) / config.head_dim
    angles = torch.arange(frames, dtype=torch.float64, device=shared.device)[:, None] * config.rope_theta**-half
    return angles.cos().to(shared.modulation.dtype), angles.sin().to(shared.modulation.dtype)


class ScalarEmbedder(nn.Module):
    """Open-Sora's TimestepEmbedder and SizeEmbedder: a number as sinusoids, through two layers, in at least fp32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = nn.ModuleList([nn.Linear(_SINUSOIDS, dim), nn.SiLU(), nn.Linear(dim, dim)])

    def forward(self, numbers: Tensor) -> Tensor:
        """[S] -> [S, D]"""
        first, second = self.linears
        sinusoids = sinusoidal_embedding(numbers, _SINUSOIDS, first.weight.dtype)
        return precise_linear(second, F.silu(precise_linear(first, sinusoids)))

    @property
    def linears(self) -> tuple[nn.Linear, nn.Linear]:
        first, _, second = self.mlp
        assert isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
        return first, second


class TwoLinear(nn.Module):
    """timm's Mlp: fc1, gelu, fc2."""

    def __init__(self, in_dim: int, inner_dim: int, out_dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(in_dim, inner_dim), nn.Linear(inner_dim, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[n, in_dim] -> [n, out_dim]"""
        return self.fc2(gelu_tanh(self.fc1(x)))


class CaptionEmbedder(nn.Module):
    """Text in the width of the transformer; a caption that is no text is the fixed rows of `y_embedding`."""

    y_embedding: Tensor  # [caption_rows, text_dim], never trained

    def __init__(self, config: STDiT3Config) -> None:
        super().__init__()
        self.y_proj = TwoLinear(config.text_dim, config.dim, config.dim)
        rows = torch.randn(config.caption_rows, config.text_dim) / config.text_dim**0.5
        self.register_buffer("y_embedding", rows)

    def forward(self, text: Tensor, layout: Layout) -> list[Tensor]:
        """text [rows, E] of all sequences -> [rows, D] of each of them."""
        dtype = self.y_proj.fc1.weight.dtype
        missing = self.y_embedding.to(text.device, dtype)
        shown = [rows if len(rows) else missing for rows in text.to(dtype).split(layout.text_lengths)]
        return list(self.y_proj(torch.cat(shown)).split([len(rows) for rows in shown]))


class SelfAttention(nn.Module):
    """Open-Sora's Attention: one projection for queries, keys and values, an RMSNorm of each head of the first two."""

    def __init__(self, dim: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.head_dim, self.eps = head_dim, eps
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm = nn.RMSNorm(head_dim, eps), nn.RMSNorm(head_dim, eps)

    def project(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """[n, D] -> normalised q and k, rotated where there are angles, and v, each [n, H, d]."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = qk_norm_rope(
            q,
            k,
            self.q_norm.weight,
            self.k_norm.weight,
            cos,
            sin,
            head_dim=self.head_dim,
            per_head=True,
            eps=self.eps,
        )
        return self._heads(q), self._heads(k), self._heads(v)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class TextAttention(nn.Module):
    """Open-Sora's MultiHeadCrossAttention."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_linear, self.kv_linear, self.proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def project(self, x: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [n, H, d] of x [n, D]; k, v [T, H, d] of the text [T, D]."""
        k, v = self.kv_linear(text).unflatten(-1, (2, -1, self.head_dim)).unbind(1)
        return self.q_linear(x).unflatten(-1, (-1, self.head_dim)), k, v


class STDiT3Block(nn.Module):
    """Attention within `count` sequences of `length` rows, attention to the text of each clip, then the MLP."""

    def __init__(self, config: STDiT3Config) -> None:
        super().__init__()
        dim = config.dim
        self.eps, self.backend = config.eps, config.attention
        self.attn = SelfAttention(dim, config.head_dim, config.eps)
        self.cross_attn = TextAttention(dim, config.head_dim)
        self.mlp = TwoLinear(dim, config.ffn_dim, dim)
        self.scale_shift_table = nn.Parameter(torch.randn(6, dim) / dim**0.5)

    def forward(
        self,
        x: Tensor,
        shared: StackInputs,
        length: int,
        count: int,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> Tensor:
        """x [n, D] -> [n, D], n = length count; cos and sin [length, d / 2] turn the rows of a sequence."""
        each = len(x) // len(shared.modulation)
        segments = shared.segments(each)
        table = self.scale_shift_table.to(shared.modulation.dtype) + shared.modulation
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = table.unbind(1)
        h = ln_modulate(x, scale, shift, segments, eps=self.eps)
        q, k, v = self.attn.project(h, cos, sin)
        y = self.attn.proj(shared.attend(q, k, v, length, count, self.backend).flatten(1))
        x = gate_residual(x, y, gate, segments)
        q, k, v = self.cross_attn.project(x, shared.text)
        clips = shared.lengths(each, len(shared.modulation))
        y = self.cross_attn.proj(attention(q, k, v, clips, shared.text_lengths, self.backend).flatten(1))
        x, h = gate_residual_ln_modulate(x, y, None, mlp_scale, mlp_shift, segments, eps=self.eps)
        return gate_residual(x, self.mlp(h), mlp_gate, segments)


class FinalLayer(nn.Module):
    """Open-Sora's T2IFinalLayer, whose output is channel last."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, width)
        self.scale_shift_table = nn.Parameter(torch.randn(2, dim) / dim**0.5)

    def forward(self, x: Tensor, told: Tensor, shared: StackInputs) -> Tensor:
        """x [n, D], told [B, D] -> [n, width]"""
        shift, scale = (self.scale_shift_table.to(told.dtype) + told[:, None]).unbind(1)
        return self.linear(ln_modulate(x, scale, shift, shared.segments(len(x) // len(told)), eps=_OUT_EPS))
