"""Mochi's transformer over packed sequences, with the parameter names of MochiTransformer3DModel.

S sequences, n video rows and m text rows of this rank, T rows of the whole (replicated) text, D width, C width of the
text's stream, H heads, d head size, f = d / 2. Text and video attend to each other in one sequence, as in HunyuanVideo;
a bag cuts both into chunks. Norms are RMSNorm without weights, also on what a branch gives before its gate, which is a
tanh. Frequencies of positions are trained, for every head its own (Genmo 2024, "Mochi 1").

The published weights take the share of signal and predict signal minus noise. Here, as in every family, a
transformer gets the share of noise and predicts noise minus signal: both are turned at its ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.attention.lengths import Lengths
from ops.attention.varlen import attention
from ops.comm.collectives import Group
from ops.kernels.base.segments import Segments
from ops.kernels.gate_residual.op import gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate.op import ln_modulate
from ops.kernels.qk_rope.op import qk_norm_rope
from ops.models.base.joint import Modulation
from ops.models.base.joint_config import default_rope_split
from ops.models.base.layers import FeedForward, TwoLayerMLP, init_linear, sinusoidal_embedding
from ops.models.base.transformer import ForwardInputs, PackedTransformer
from ops.models.mochi.config import POOL_HEADS, MochiConfig
from ops.packed.packing import Layout
from ops.packed.sequence_parallel import sequence_parallel_attention
from ops.precision import precise_linear, precise_product

_WHOLE = 1000.0  # what the published weights get for a clip without noise
_QK_EPS = 1e-5
_OUT_EPS = 1e-6
_AREA = 192.0 * 192.0  # tokens of the frame to whose size all frames are scaled


class MochiInputs(NamedTuple):
    """What all blocks of one forward share."""

    condition: Tensor  # [S, D] after silu, what every modulation is projected from
    cos: Tensor  # [n, H, f]
    sin: Tensor
    layout: Layout
    group: Group


class MochiDiT(PackedTransformer):
    config: MochiConfig
    block_parts = ("joint_exchange", "segments", "local_text_segments")

    def __init__(self, config: MochiConfig) -> None:
        super().__init__(config)
        self.patch_embed = FramePatches(config)
        self.time_embed = TimeAndText(config)
        self.pos_frequencies = nn.Parameter(initial_frequencies(config))
        middle = [MochiBlock(config) for _ in range(config.num_layers - 1)]
        self.transformer_blocks = nn.ModuleList([*middle, MochiLastBlock(config)])
        self.norm_out = Modulation(config.dim, 2)
        self.proj_out = nn.Linear(config.dim, config.out_channels * self.patch_size)
        init_linear(self, head=self.proj_out)
        nn.init.xavier_uniform_(self.patch_embed.proj.weight.flatten(1))

    def velocity(self, given: ForwardInputs) -> Tensor:
        """[n, C_out * patch]. Raises ValueError for clips with clean frames."""
        layout = given.layout
        if layout.has_clean_frames:
            raise ValueError("a clip with clean frames: Mochi's blocks take one time for all of a clip.")
        condition = F.silu(self.time_embed(_WHOLE - given.timesteps, given.text, layout))
        cos, sin = rotation(layout, self.pos_frequencies)
        x, context = self.patch_embed(given.tokens), self.time_embed.stream(given.text, layout)
        shared = MochiInputs(condition, cos, sin, layout, given.group)
        for block in self.transformer_blocks:
            x, context = self.run(block, x, context, shared)
        scale, shift = self.norm_out(condition)
        out = self.proj_out(ln_modulate(x, scale, shift, layout.segments, eps=_OUT_EPS))
        return -out.unflatten(-1, (self.patch_size, -1)).transpose(-1, -2).flatten(-2)  # its head is channel last


def initial_frequencies(config: MochiConfig) -> Tensor:
    """[3, H, f]: every pair of numbers of a head turns with one of t, h and w, as RoPE does; training changes that."""
    found = torch.zeros(3, config.num_heads, config.head_dim // 2)
    start = 0
    for axis, size in enumerate(default_rope_split(config.head_dim)):
        powers = torch.arange(0, size, 2, dtype=torch.float32) / max(size, 1)
        found[axis, :, start : start + size // 2] = config.rope_theta**-powers
        start += size // 2
    return found


def rotation(layout: Layout, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [n, H, f] of each local row, with a gradient to the frequencies [3, H, f]; at least fp32.

    Frames count from 0. Rows and columns count from the middle, in steps for which every frame has the same area.
    """
    dtype = torch.promote_types(frequencies.dtype, torch.float32)
    grids = layout.made(_grids)
    step = (_AREA / (grids[:, 1] * grids[:, 2])).sqrt()[layout.seq_index, None]
    middle = ((grids - 1) / 2)[layout.seq_index]
    place = layout.positions.double()
    place = torch.cat([place[:, :1], (place[:, 1:] - middle[:, 1:]) * step], dim=1).to(dtype)
    angles = precise_product(place, frequencies.flatten(1).T).unflatten(1, frequencies.shape[1:])
    return angles.cos(), angles.sin()


def _grids(layout: Layout) -> Tensor:
    """fp64 [S, 3]"""
    return torch.tensor([sequence.grid for sequence in layout.sequences], dtype=torch.float64)


def rotated_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[n, H, d] with each pair of each head turned by its angle [n, H, f]."""
    even, odd = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


class FramePatches(nn.Module):
    """Diffusers' PatchEmbed without positions."""

    def __init__(self, config: MochiConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(config.in_channels, config.dim, config.patch[1:], config.patch[1:])

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, C * patch] -> [n, D]"""
        weight = self.proj.weight
        return F.linear(tokens.to(weight.dtype), weight.flatten(1), self.proj.bias)


class TimeAndText(nn.Module):
    """Diffusers' MochiCombinedTimestepCaptionEmbedding: what modulates all blocks, and the text's stream."""

    def __init__(self, config: MochiConfig) -> None:
        super().__init__()
        self.timestep_embedder = TwoLayerMLP(config.freq_dim, config.dim, F.silu)
        self.pooler = TextPool(config.text_dim, config.dim)
        self.caption_proj = nn.Linear(config.text_dim, config.context_dim)

    def forward(self, times: Tensor, text: Tensor, layout: Layout) -> Tensor:
        """times [S], text [T, E] -> [S, D], in at least fp32, whatever weights and autocast are."""
        weight = self.timestep_embedder.linear_1.weight
        time = self.timestep_embedder.precise(sinusoidal_embedding(times, weight.shape[1], weight.dtype))
        return time + self.pooler(text.to(time.dtype), layout)

    def stream(self, text: Tensor, layout: Layout) -> Tensor:
        """[m, C]: the rows of the text that this rank holds."""
        return self.caption_proj(text.index_select(0, layout.text_rows).to(self.caption_proj.weight.dtype))


class TextPool(nn.Module):
    """Diffusers' MochiAttentionPool: the mean of a text attends to itself and to the text. Every rank does it whole."""

    def __init__(self, text_dim: int, dim: int) -> None:
        super().__init__()
        self.to_kv = nn.Linear(text_dim, 2 * text_dim)
        self.to_q = nn.Linear(text_dim, text_dim)
        self.to_out = nn.Linear(text_dim, dim)

    def forward(self, text: Tensor, layout: Layout) -> Tensor:
        """text [T, E] -> [S, D], in the dtype of the text, at least fp32; a sequence without text has the mean 0."""
        with torch.autocast(layout.device.type, enabled=False):
            mean = precise_product(layout.text_mean(text.dtype), text.T)
            pools = layout.made(PoolRows.of)
            rows = torch.cat([mean, text]).index_select(0, pools.order)
            k, v = (part.unflatten(-1, (POOL_HEADS, -1)) for part in precise_linear(self.to_kv, rows).chunk(2, dim=-1))
            q = precise_linear(self.to_q, mean).unflatten(-1, (POOL_HEADS, -1))
            alone = Lengths.alike(1, len(layout), layout.device)
            return precise_linear(self.to_out, attention(q, k, v, alone, pools.keys).flatten(1))


@dataclass(frozen=True, slots=True)
class PoolRows:
    """What each mean of a text attends to: itself, then the text's rows."""

    order: Tensor  # int64 [S + T]: these of each sequence, out of the means, then all rows of text
    keys: Lengths

    @staticmethod
    def of(layout: Layout) -> PoolRows:
        starts = len(layout) + np.cumsum((0, *layout.text_lengths))
        order = [np.append(i, np.arange(starts[i], starts[i + 1])) for i in range(len(layout))]
        keys = Lengths.of([length + 1 for length in layout.text_lengths])
        return PoolRows(torch.from_numpy(np.concatenate(order).astype(np.int64)), keys)


class MochiJointAttention(nn.Module):
    """Projections of Diffusers' MochiAttention."""

    def __init__(self, config: MochiConfig, last: bool) -> None:
        super().__init__()
        dim, context, self.head_dim = config.dim, config.context_dim, config.head_dim
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(context, dim, bias=False) for _ in range(3))
        self.norm_q, self.norm_k = nn.RMSNorm(self.head_dim, _QK_EPS), nn.RMSNorm(self.head_dim, _QK_EPS)
        self.norm_added_q, self.norm_added_k = nn.RMSNorm(self.head_dim, _QK_EPS), nn.RMSNorm(self.head_dim, _QK_EPS)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        if not last:
            self.to_add_out = nn.Linear(dim, context)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[n, D] -> normalised and rotated q, k and plain v, each [n, H, d]."""
        q, k = self._normed(self.to_q(x), self.to_k(x), self.norm_q.weight, self.norm_k.weight)
        return rotated_heads(q, cos, sin), rotated_heads(k, cos, sin), self._heads(self.to_v(x))

    def project_text(self, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[m, C] -> the same of the text, which is not rotated: [m, H, d] each."""
        q, k = self.add_q_proj(context), self.add_k_proj(context)
        q, k = self._normed(q, k, self.norm_added_q.weight, self.norm_added_k.weight)
        return q, k, self._heads(self.add_v_proj(context))

    def _normed(self, q: Tensor, k: Tensor, wq: Tensor, wk: Tensor) -> tuple[Tensor, Tensor]:
        q, k = qk_norm_rope(q, k, wq, wk, head_dim=self.head_dim, per_head=True, eps=_QK_EPS)
        return self._heads(q), self._heads(k)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


def swiglu(x: Tensor) -> Tensor:
    """[n, 2 F] -> [n, F]: the first half, gated by silu of the second (Shazeer 2020)."""
    value, gate = x.chunk(2, dim=-1)
    return value * F.silu(gate)


def gated_mlp(dim: int) -> FeedForward:
    """An MLP with two thirds of `4 dim` numbers between its layers, which have no biases."""
    return FeedForward(dim, 8 * dim // 3, swiglu, gated=True, bias=False)


class ScaledNorm(nn.Module):
    """The norm of the last block's text: one scale [S, C], in at least fp32; the stream ends there."""

    def __init__(self, config: MochiConfig) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(config.dim, config.context_dim)

    def forward(self, condition: Tensor) -> tuple[Tensor]:
        """condition [S, D] -> (scale [S, C],)"""
        return (precise_linear(self.linear_1, condition),)


class VideoStream(nn.Module):
    """What all blocks have: the video's norms, projections and MLP, and those by which text is attended to.

    Compiled code belongs to a function, and a backward that computes a block again runs the newest that fits. Code for
    the text's stream, whose width it leaves open, also fits the video's rows, and that of the last block the others. So
    both streams, and both kinds of block, have functions of their own for the same arithmetic.
    """

    def __init__(self, config: MochiConfig, norm1_context: nn.Module, last: bool) -> None:
        super().__init__()
        self.eps, self.backend = config.eps, config.attention
        self.norm1 = Modulation(config.dim, 4)
        self.norm1_context = norm1_context
        self.attn1 = MochiJointAttention(config, last)
        self.ff = gated_mlp(config.dim)

    def _joint(
        self, x: Tensor, context: Tensor, scale: Tensor, c_scale: Tensor, shared: MochiInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, D], context [m, C], scales of their norms -> q, k, v [n + m, H, d]."""
        layout = shared.layout
        h = ln_modulate(x, scale, None, layout.segments, eps=self.eps, rms=True)
        c = ln_modulate(context, c_scale, None, layout.local_text_segments, eps=self.eps, rms=True)
        q, k, v = self.attn1.project(h, shared.cos, shared.sin)
        c_q, c_k, c_v = self.attn1.project_text(c)
        return torch.cat([q, c_q]), torch.cat([k, c_k]), torch.cat([v, c_v])

    def _end(self, x: Tensor, y: Tensor, tables: Sequence[Tensor], segments: Segments) -> Tensor:
        """The stream [n, D] after what attention gave it [n, D], and after its MLP."""
        gate, mlp_scale, mlp_gate = tables
        y = ln_modulate(self.attn1.to_out[0](y), eps=self.eps, rms=True)
        x, h = gate_residual_ln_modulate(x, y, torch.tanh(gate), mlp_scale, None, segments, eps=self.eps, rms=True)
        return gate_residual(x, ln_modulate(self.ff(h), eps=self.eps, rms=True), torch.tanh(mlp_gate), segments)


class MochiBlock(VideoStream):
    """Joint attention with separate weights and MLPs for video and text."""

    def __init__(self, config: MochiConfig) -> None:
        super().__init__(config, Modulation(config.dim, 4, config.context_dim), last=False)
        self.ff_context = gated_mlp(config.context_dim)

    def forward(self, x: Tensor, context: Tensor, shared: MochiInputs) -> tuple[Tensor, Tensor]:
        """x [n, D], context [m, C] -> the same."""
        layout, rows = shared.layout, shared.layout.local_tokens
        scale, *tables = self.norm1(shared.condition)
        c_scale, *c_tables = self.norm1_context(shared.condition)
        q, k, v = self._joint(x, context, scale, c_scale, shared)
        y = sequence_parallel_attention(q, k, v, layout.joint_exchange, shared.group, self.backend).flatten(1)
        x = self._end(x, y[:rows], tables, layout.segments)
        return x, self._end_text(context, y[rows:], c_tables, layout.local_text_segments)

    def _end_text(self, context: Tensor, y: Tensor, tables: Sequence[Tensor], segments: Segments) -> Tensor:
        """The text's stream [m, C] after what attention gave it [m, D], and after its MLP."""
        gate, mlp_scale, mlp_gate = tables
        y = ln_modulate(self.attn1.to_add_out(y), eps=self.eps, rms=True)
        gate, mlp_gate = torch.tanh(gate), torch.tanh(mlp_gate)
        context, h = gate_residual_ln_modulate(context, y, gate, mlp_scale, None, segments, eps=self.eps, rms=True)
        return gate_residual(context, ln_modulate(self.ff_context(h), eps=self.eps, rms=True), mlp_gate, segments)


class MochiLastBlock(VideoStream):
    """Video attends to text, whose stream ends here."""

    def __init__(self, config: MochiConfig) -> None:
        super().__init__(config, ScaledNorm(config), last=True)

    def forward(self, x: Tensor, context: Tensor, shared: MochiInputs) -> tuple[Tensor, Tensor]:
        """x [n, D], context [m, C] -> x of the same shape, and context as it came."""
        layout, rows = shared.layout, shared.layout.local_tokens
        scale, *tables = self.norm1(shared.condition)
        (c_scale,) = self.norm1_context(shared.condition)
        q, k, v = self._joint(x, context, scale, c_scale, shared)
        y = sequence_parallel_attention(q, k, v, layout.joint_exchange, shared.group, self.backend).flatten(1)
        return self._end(x, y[:rows], tables, layout.segments), context
