"""Kandinsky 5.0's transformer over packed sequences, with the parameter names of Kandinsky5Transformer3DModel.

S sequences, n video rows of this rank, T rows of the whole (replicated) text, D width, E time width, d head size.
Blocks of self-attention over the text come first, computed in full by every rank; then blocks over the video, with a
cross-attention to what these made. All are modulated by the time and the pooled text. Gradients are partial, as in
ops/models/wan/model.py: the text reaches the loss through a rank's own video rows only, so their sum over the bag is
exact.

The class of Diffusers rounds queries and keys to bfloat16 after RoPE, whatever it computes in; here they are not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.attention.varlen import attention
from ops.comm.collectives import Group
from ops.kernels.gate_residual.op import gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate.op import ln_modulate
from ops.kernels.qk_rope.op import qk_norm_rope
from ops.models.base.joint import pooled_of
from ops.models.base.layers import init_linear, sinusoidal_embedding
from ops.models.base.transformer import ForwardInputs, PackedTransformer
from ops.models.kandinsky.config import KandinskyConfig
from ops.packed.packing import Layout
from ops.packed.sequence_parallel import sequence_parallel_attention
from ops.precision import precise_linear, precise_product

_EPS = 1e-5  # of LayerNorm
_QK_EPS = torch.finfo(torch.float32).eps  # of RMSNorm, where none is named


class TextInputs(NamedTuple):
    """What all blocks over the text share."""

    condition: Tensor  # [S, E] after silu, what every modulation is projected from
    cos: Tensor  # [T, d / 2]
    sin: Tensor
    layout: Layout


class VideoInputs(NamedTuple):
    """What all blocks over the video share."""

    text: Tensor  # [T, D]
    condition: Tensor  # [S, E] after silu
    cos: Tensor  # [n, d / 2]
    sin: Tensor
    layout: Layout
    group: Group


class KandinskyDiT(PackedTransformer):
    config: KandinskyConfig
    block_parts = ("segments", "text_segments", "video_exchange", "local_lengths", "text")

    def __init__(self, config: KandinskyConfig) -> None:
        super().__init__(config)
        self.time_embeddings = _TimeProjection(config.dim, config.time_dim)
        self.text_embeddings = _TextEmbedding(config.text_dim, config.dim)
        self.pooled_text_embeddings = _TextEmbedding(config.pooled_width, config.time_dim)
        self.visual_embeddings = _VisualPatches(config)
        self.text_transformer_blocks = nn.ModuleList(_TextBlock(config) for _ in range(config.num_text_layers))
        self.visual_transformer_blocks = nn.ModuleList(_VideoBlock(config) for _ in range(config.num_layers))
        self.out_layer = _Head(config)
        init_linear(self, head=self.out_layer.out_layer)

    def velocity(self, given: ForwardInputs) -> Tensor:
        """[n, C_out * patch]. `conditions.pooled` is the second text encoder's vector; without one it is the mean of
        the text where the widths agree, else zero. Raises ValueError for clips with clean frames."""
        layout, config = given.layout, self.config
        if layout.has_clean_frames:
            raise ValueError("a clip with clean frames: of Kandinsky 5.0 text to video is computed.")
        mean = precise_product(layout.text_mean(torch.promote_types(given.text.dtype, torch.float32)), given.text.T)
        pooled = pooled_of(given.conditions, mean, config.pooled_width)
        condition = F.silu(self.time_embeddings(given.timesteps) + self.pooled_text_embeddings.precise(pooled))
        cos, sin = _text_rotation(layout, config, condition.dtype)
        text = self.text_embeddings(given.text)
        for block in self.text_transformer_blocks:
            text = self.run(block, text, TextInputs(condition, cos, sin, layout))
        cos, sin = _video_rotation(layout, config, condition.dtype)
        shared = VideoInputs(text, condition, cos, sin, layout, given.group)
        x = self.visual_embeddings(given.tokens)
        for block in self.visual_transformer_blocks:
            x = self.run(block, x, shared)
        return self.out_layer(x, condition, layout)


def _text_rotation(layout: Layout, config: KandinskyConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, d / 2]: rows of each text count from 0."""
    angles = layout.made(_text_places)[:, None] * _frequencies(config.head_dim, config.rope_theta, layout.device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _video_rotation(layout: Layout, config: KandinskyConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [n, d / 2] of each local row; places over height and width are divided by the scale of its clip."""
    places, scale = layout.positions.double(), layout.made(_row_scales, config)
    divided = (places[:, 0], places[:, 1] / scale, places[:, 2] / scale)
    parts = [
        place[:, None] * _frequencies(size, config.rope_theta, layout.device)
        for place, size in zip(divided, config.rope_split, strict=True)
    ]
    angles = torch.cat(parts, dim=1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _text_places(layout: Layout) -> Tensor:
    return torch.cat([torch.arange(length, dtype=torch.float64) for length in layout.text_lengths])


def _row_scales(layout: Layout, config: KandinskyConfig) -> Tensor:
    """fp64 [n]: by what the places of each local row are divided."""
    scales = [config.rope_scale(*sequence.grid[1:]) for sequence in layout.sequences]
    return torch.tensor(scales, dtype=torch.float64)[layout.seq_index]


def _frequencies(size: int, theta: float, device: torch.device) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float64, device=device) / max(size, 1))


class _TimeProjection(nn.Module):
    def __init__(self, dim: int, time_dim: int) -> None:
        super().__init__()
        self.in_layer, self.out_layer = nn.Linear(dim, time_dim), nn.Linear(time_dim, time_dim)

    def forward(self, timesteps: Tensor) -> Tensor:
        """[S] -> [S, E], in at least fp32."""
        weight = self.in_layer.weight
        sinusoids = sinusoidal_embedding(timesteps, weight.shape[1], weight.dtype)
        return precise_linear(self.out_layer, F.silu(precise_linear(self.in_layer, sinusoids)))


class _TextEmbedding(nn.Module):
    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.in_layer, self.norm = nn.Linear(in_dim, dim), nn.LayerNorm(dim, _EPS)

    def forward(self, text: Tensor) -> Tensor:
        """[T, in_dim] -> [T, dim]"""
        return self._normed(self.in_layer(text.to(self.in_layer.weight.dtype)))

    def precise(self, vectors: Tensor) -> Tensor:
        """[S, in_dim] -> [S, dim], in at least fp32."""
        x = precise_linear(self.in_layer, vectors)
        return self._normed(x, x.dtype)

    def _normed(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return ln_modulate(x, weight=self.norm.weight, bias=self.norm.bias, eps=_EPS, out_dtype=out_dtype)


class _VisualPatches(nn.Module):
    """A row of the weights lies patch by patch, channels last; those of a first frame and its mask see zeros."""

    def __init__(self, config: KandinskyConfig) -> None:
        super().__init__()
        self.channels = config.in_channels
        self.read = 2 * config.in_channels + 1 if config.visual_cond else config.in_channels
        size = config.patch[0] * config.patch[1] * config.patch[2]
        self.in_layer = nn.Linear(size * self.read, config.dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, C * patch] -> [n, D]"""
        weight = self.in_layer.weight.unflatten(1, (-1, self.read))[..., : self.channels]
        return F.linear(tokens.to(weight.dtype), weight.transpose(1, 2).flatten(1), self.in_layer.bias)


class _Modulation(nn.Module):
    """`parts` modulation tables from the condition [S, E], in at least fp32."""

    def __init__(self, time_dim: int, dim: int, parts: int) -> None:
        super().__init__()
        self.out_layer, self.parts = nn.Linear(time_dim, parts * dim), parts

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        """[S, E] -> `parts` tables [S, D]."""
        return precise_linear(self.out_layer, condition).chunk(self.parts, dim=-1)


class _Attention(nn.Module):
    """Diffusers' Kandinsky5Attention: QK norm over each head."""

    def __init__(self, config: KandinskyConfig) -> None:
        super().__init__()
        dim, self.head_dim, self.backend = config.dim, config.head_dim, config.attention
        self.to_query, self.to_key, self.to_value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.query_norm, self.key_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)
        self.out_layer = nn.Linear(dim, dim)

    def project(
        self, x: Tensor, context: Tensor, cos: Tensor | None = None, sin: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised, rotated q [n, H, d] of x; k, v [m, H, d] of the context."""
        q, k = qk_norm_rope(
            self.to_query(x),
            self.to_key(context),
            self.query_norm.weight,
            self.key_norm.weight,
            cos,
            sin,
            head_dim=self.head_dim,
            per_head=True,
            eps=_QK_EPS,
        )
        return self._heads(q), self._heads(k), self._heads(self.to_value(context))

    def output(self, heads: Tensor) -> Tensor:
        """[n, H, d] -> [n, D]"""
        return self.out_layer(heads.flatten(1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class _FeedForward(nn.Module):
    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.in_layer, self.out_layer = nn.Linear(dim, ffn_dim, bias=False), nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, D] -> [n, D]"""
        return self.out_layer(F.gelu(self.in_layer(x)))


class _TextBlock(nn.Module):
    """Self-attention among the rows of each text, and MLP."""

    def __init__(self, config: KandinskyConfig) -> None:
        super().__init__()
        self.text_modulation = _Modulation(config.time_dim, config.dim, 6)
        self.self_attention = _Attention(config)
        self.feed_forward = _FeedForward(config.dim, config.ffn_dim)

    def forward(self, x: Tensor, shared: TextInputs) -> Tensor:
        """[T, D] -> the same."""
        layout, segments, attend = shared.layout, shared.layout.text_segments, self.self_attention
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.text_modulation(shared.condition)
        h = ln_modulate(x, scale, shift, segments, eps=_EPS)
        q, k, v = attend.project(h, h, shared.cos, shared.sin)
        y = attend.output(attention(q, k, v, layout.text, layout.text, attend.backend))
        x, h = gate_residual_ln_modulate(x, y, gate, mlp_scale, mlp_shift, segments, eps=_EPS)
        return gate_residual(x, self.feed_forward(h), mlp_gate, segments)


class _VideoBlock(nn.Module):
    """Self-attention over the bag, cross-attention to the replicated text, and MLP."""

    def __init__(self, config: KandinskyConfig) -> None:
        super().__init__()
        self.visual_modulation = _Modulation(config.time_dim, config.dim, 9)
        self.self_attention, self.cross_attention = _Attention(config), _Attention(config)
        self.feed_forward = _FeedForward(config.dim, config.ffn_dim)

    def forward(self, x: Tensor, shared: VideoInputs) -> Tensor:
        """[n, D] -> the same."""
        layout, segments = shared.layout, shared.layout.segments
        shift, scale, gate, text_shift, text_scale, text_gate, mlp_shift, mlp_scale, mlp_gate = self.visual_modulation(
            shared.condition
        )
        attend = self.self_attention
        h = ln_modulate(x, scale, shift, segments, eps=_EPS)
        q, k, v = attend.project(h, h, shared.cos, shared.sin)
        y = attend.output(sequence_parallel_attention(q, k, v, layout.video_exchange, shared.group, attend.backend))
        x, h = gate_residual_ln_modulate(x, y, gate, text_scale, text_shift, segments, eps=_EPS)

        attend = self.cross_attention
        q, k, v = attend.project(h, shared.text)
        y = attend.output(attention(q, k, v, layout.local_lengths, layout.text, attend.backend))
        x, h = gate_residual_ln_modulate(x, y, text_gate, mlp_scale, mlp_shift, segments, eps=_EPS)
        return gate_residual(x, self.feed_forward(h), mlp_gate, segments)


class _Head(nn.Module):
    def __init__(self, config: KandinskyConfig) -> None:
        super().__init__()
        self.modulation = _Modulation(config.time_dim, config.dim, 2)
        size = config.patch[0] * config.patch[1] * config.patch[2]
        self.out_layer = nn.Linear(config.dim, config.out_channels * size)

    def forward(self, x: Tensor, condition: Tensor, layout: Layout) -> Tensor:
        """[n, D] -> [n, C_out * patch]"""
        shift, scale = self.modulation(condition)
        return self.out_layer(ln_modulate(x, scale, shift, layout.segments, eps=_EPS))
