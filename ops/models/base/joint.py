"""Transformers in which text and video attend to each other in one sequence, with Diffusers' parameter names: those of
HunyuanVideo and FLUX.1, which differ in how rows come in.

S sequences, n video rows and m text rows of this rank, D width, H heads, d head size. Under Ulysses both are cut into
chunks. Double-stream blocks keep separate weights for video and text, single-stream blocks treat [video rows; text
rows] alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.kernels.gate_residual.op import gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate.op import ln_modulate
from ops.kernels.qk_rope.op import qk_norm_rope
from ops.models.base.config import DiTConfig
from ops.models.base.joint_config import JointDiTConfig
from ops.models.base.layers import FeedForward, TwoLayerMLP, gelu_tanh, init_linear, sinusoidal_embedding
from ops.models.base.transformer import ForwardInputs, PackedTransformer
from ops.packed.conditions import Conditions
from ops.packed.packing import Layout
from ops.packed.sequence_parallel import sequence_parallel_attention
from ops.precision import precise_linear, precise_product

_TIME_DIM = 256  # sinusoidal width of both families, not a setting there
EPS = 1e-6


class JointInputs(NamedTuple):
    """What all blocks of one forward share."""

    condition: Tensor  # [S, D] after silu, what every modulation is projected from
    row_condition: Tensor  # the same of video rows: [S, D], or [2 S, D] where frames are clean (`Layout.times`)
    cos: Tensor  # [n + m, d / 2]; text rows are not rotated
    sin: Tensor
    layout: Layout
    group: Group


def joint_rope(layout: Layout, axes: tuple[int, int, int], theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [n + m, d / 2] of video rows, then of text rows, which are not rotated."""
    cos, sin = layout.rope(axes, theta, dtype)
    text_rows = (layout.local_text_tokens, cos.shape[1])
    return torch.cat([cos, cos.new_ones(text_rows)]), torch.cat([sin, sin.new_zeros(text_rows)])


def pooled_of(conditions: Conditions, mean: Tensor, width: int) -> Tensor:
    """[S, width]: the pooled vectors that are given, or the mean of each text [S, E] where that is as wide, or
    zeros."""
    if conditions.pooled is not None:
        return conditions.pooled
    return mean if mean.shape[1] == width else mean.new_zeros(len(mean), width)


class ConditionEmbedding(nn.Module):
    """Timestep, pooled text and guidance of each sequence, in at least fp32: [S, D]."""

    def __init__(self, pooled_dim: int, dim: int, guidance: float | None = None) -> None:
        """`guidance`: the scale in training, of weights that take one."""
        super().__init__()
        self.guidance = guidance
        self.timestep_embedder = TwoLayerMLP(_TIME_DIM, dim, F.silu)
        self.text_embedder = TwoLayerMLP(pooled_dim, dim, F.silu)
        self.guidance_embedder = None if guidance is None else TwoLayerMLP(_TIME_DIM, dim, F.silu)

    def forward(self, timesteps: Tensor, pooled: Tensor, guidance: Tensor | None = None) -> Tensor:
        """timesteps [S], pooled [S, pooled_dim], guidance [S] -> [S, D]."""
        out = self.unguided(timesteps, pooled)
        if self.guidance_embedder is None or self.guidance is None:
            return out
        guidance = torch.full_like(timesteps, 1000.0 * self.guidance) if guidance is None else guidance
        return out + self.guidance_embedder.precise(sinusoidal_embedding(guidance, _TIME_DIM, out.dtype))

    def unguided(self, timesteps: Tensor, pooled: Tensor) -> Tensor:
        """The embedding without guidance: for clean frames, which do not get it."""
        sinusoids = sinusoidal_embedding(timesteps, _TIME_DIM, self.timestep_embedder.linear_1.weight.dtype)
        return self.timestep_embedder.precise(sinusoids) + self.text_embedder.precise(pooled)


class Modulation(nn.Module):
    """`parts` modulation tables from the condition [S, D], in at least fp32; holds Diffusers' AdaLayerNorm*.linear."""

    def __init__(self, dim: int, parts: int, width: int | None = None) -> None:
        """`width` of a table, by default D."""
        super().__init__()
        self.linear = nn.Linear(dim, parts * (width or dim))
        self.parts = parts

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        """condition [S, D] -> `parts` tables [S, width]."""
        return precise_linear(self.linear, condition).chunk(self.parts, dim=-1)


class JointAttention(nn.Module):
    """Projections of Diffusers' Attention; `text` adds those of a separate text stream, `output` the way out."""

    def __init__(self, config: DiTConfig, text: bool, output: bool, qk_norm: bool = True) -> None:
        super().__init__()
        dim, self.head_dim, self.backend = config.dim, config.head_dim, config.attention
        self.to_q, self.to_k, self.to_v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        if qk_norm:
            self.norm_q, self.norm_k = nn.RMSNorm(self.head_dim, EPS), nn.RMSNorm(self.head_dim, EPS)
        if output:
            self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        if text:
            self.add_q_proj, self.add_k_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
            self.add_v_proj, self.to_add_out = nn.Linear(dim, dim), nn.Linear(dim, dim)
            self.norm_added_q, self.norm_added_k = nn.RMSNorm(self.head_dim, EPS), nn.RMSNorm(self.head_dim, EPS)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[n, D] -> normalised and rotated q, k and plain v, each [n, H, d]."""
        q, k = qk_norm_rope(
            self.to_q(x),
            self.to_k(x),
            self.norm_q.weight,
            self.norm_k.weight,
            cos,
            sin,
            head_dim=self.head_dim,
            per_head=True,
            eps=EPS,
        )
        return self._heads(q), self._heads(k), self._heads(self.to_v(x))

    def project_text(self, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same for the text stream, which is not rotated."""
        q, k = qk_norm_rope(
            self.add_q_proj(context),
            self.add_k_proj(context),
            self.norm_added_q.weight,
            self.norm_added_k.weight,
            head_dim=self.head_dim,
            per_head=True,
            eps=EPS,
        )
        return self._heads(q), self._heads(k), self._heads(self.add_v_proj(context))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class DoubleStreamBlock(nn.Module):
    """Joint attention with separate weights, norms and MLPs for video and text."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.norm1, self.norm1_context = Modulation(config.dim, 6), Modulation(config.dim, 6)
        self.attn = JointAttention(config, text=True, output=True)
        self.ff = FeedForward(config.dim, config.ffn_dim)
        self.ff_context = FeedForward(config.dim, config.ffn_dim)

    def forward(self, x: Tensor, context: Tensor, shared: JointInputs) -> tuple[Tensor, Tensor]:
        """x [n, D], context [m, D] -> the same."""
        layout, rows = shared.layout, shared.layout.local_tokens
        segments, text_segments = layout.segments, layout.local_text_segments
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.norm1(shared.row_condition)
        c_shift, c_scale, c_gate, c_mlp_shift, c_mlp_scale, c_mlp_gate = self.norm1_context(shared.condition)

        h = ln_modulate(x, scale, shift, segments, eps=EPS)
        c = ln_modulate(context, c_scale, c_shift, text_segments, eps=EPS)
        video = self.attn.project(h, shared.cos[:rows], shared.sin[:rows])
        q, k, v = (torch.cat(pair) for pair in zip(video, self.attn.project_text(c)))
        y = sequence_parallel_attention(q, k, v, layout.joint_exchange, shared.group, self.attn.backend).flatten(1)

        y, c = self.attn.to_out[0](y[:rows]), self.attn.to_add_out(y[rows:])
        x, h = gate_residual_ln_modulate(x, y, gate, mlp_scale, mlp_shift, segments, eps=EPS)
        context, c = gate_residual_ln_modulate(context, c, c_gate, c_mlp_scale, c_mlp_shift, text_segments, eps=EPS)
        x = gate_residual(x, self.ff(h), mlp_gate, segments)
        return x, gate_residual(context, self.ff_context(c), c_mlp_gate, text_segments)


class SingleStreamBlock(nn.Module):
    """Attention and MLP side by side, one set of weights for video and text rows."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.norm = Modulation(config.dim, 3)
        self.attn = JointAttention(config, text=False, output=False)
        self.proj_mlp = nn.Linear(config.dim, config.ffn_dim)
        self.proj_out = nn.Linear(config.dim + config.ffn_dim, config.dim)

    def forward(self, x: Tensor, shared: JointInputs) -> Tensor:
        """x [n + m, D] -> the same."""
        layout = shared.layout
        shift, scale, gate = self.norm(shared.row_condition)
        h = ln_modulate(x, scale, shift, layout.joint_segments, eps=EPS)
        q, k, v = self.attn.project(h, shared.cos, shared.sin)
        y = sequence_parallel_attention(q, k, v, layout.joint_exchange, shared.group, self.attn.backend).flatten(1)
        y = self.proj_out(torch.cat([y, gelu_tanh(self.proj_mlp(h))], dim=1))
        return gate_residual(x, y, gate, layout.joint_segments)


class JointTransformer(PackedTransformer):
    """Rows and text as a family embeds them, double-stream blocks, single-stream ones, and the way out."""

    config: JointDiTConfig
    block_parts = ("joint_exchange", "joint_segments", "segments", "local_text_segments")

    def __init__(self, config: JointDiTConfig, x_embedder: nn.Module, context_embedder: nn.Module) -> None:
        super().__init__(config)
        self.x_embedder, self.context_embedder = x_embedder, context_embedder
        guidance = config.trained_guidance if config.guidance_embeds else None
        self.time_text_embed = ConditionEmbedding(config.pooled_width, config.dim, guidance)
        self.transformer_blocks = nn.ModuleList(DoubleStreamBlock(config) for _ in range(config.num_layers))
        self.single_transformer_blocks = nn.ModuleList(
            SingleStreamBlock(config) for _ in range(config.num_single_layers)
        )
        self.norm_out = Modulation(config.dim, 2)
        self.proj_out = nn.Linear(config.dim, config.out_channels * self.patch_size)
        init_linear(self, head=self.proj_out)

    def embedded(self, given: ForwardInputs, mean: Tensor) -> tuple[Tensor, Tensor]:
        """[n, D] of the video's rows and [m, D] of the text's on this rank; `mean` [S, E] is of each whole text. Raises
        ValueError for clips that the family does not take."""
        raise NotImplementedError(f"{type(self).__name__} does not say how rows come in.")

    def velocity(self, given: ForwardInputs) -> Tensor:
        """[n, C_out * patch].

        `conditions.pooled` is the second text encoder's vector; without one it is the mean of the text where the widths
        agree, else zero. `conditions.guidance` is read by guidance-distilled weights only; 1000 times the scale of the
        training by default.
        """
        text, layout, conditions = given.text, given.layout, given.conditions
        mean = precise_product(layout.text_mean(torch.promote_types(text.dtype, torch.float32)), text.T)
        pooled = pooled_of(conditions, mean, self.config.pooled_width)
        x, context = self.embedded(given, mean)
        condition = row_condition = F.silu(self.time_text_embed(given.timesteps, pooled, conditions.guidance))
        if layout.has_clean_frames:
            clean = self.time_text_embed.unguided(torch.zeros_like(given.timesteps), pooled)
            row_condition = torch.cat([condition, F.silu(clean)])
        cos, sin = joint_rope(layout, self.config.rope_split, self.config.rope_theta, condition.dtype)
        shared = JointInputs(condition, row_condition, cos, sin, layout, given.group)
        for block in self.transformer_blocks:
            x, context = self.run(block, x, context, shared)
        x = torch.cat([x, context])
        for block in self.single_transformer_blocks:
            x = self.run(block, x, shared)
        scale, shift = self.norm_out(condition)
        return self.proj_out(ln_modulate(x[: layout.local_tokens], scale, shift, layout.sequence_segments, eps=EPS))
