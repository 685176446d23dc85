"""HunyuanVideo's transformer over packed sequences, with the parameter names of HunyuanVideoTransformer3DModel.

S sequences, n video rows and m text rows of this rank, T rows of the whole (replicated) text, D width, H heads,
d head size. Text and video attend to each other in one sequence; under Ulysses both are cut into chunks. Double-stream
blocks keep separate weights for video and text, single-stream blocks treat [video rows; text rows] alike.

The text is refined in full by every rank and only then cut, so its gradients too are partial and sum up over the bag.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.attention.varlen import attention
from ops.fused import gate_residual, gate_residual_ln_modulate, ln_modulate
from ops.models.base.joint import (
    EPS,
    ConditionEmbedding,
    DoubleStreamBlock,
    JointAttention,
    JointInputs,
    Modulation,
    SingleStreamBlock,
    joint_rope,
    pooled_of,
)
from ops.models.base.layers import FeedForward, PatchEmbedding, init_linear
from ops.models.base.transformer import ForwardInputs, PackedTransformer
from ops.models.hunyuan.config import HunyuanConfig
from ops.packing import Layout

_REFINER_MLP = 4  # mlp ratio of the token refiner, not a setting there


class HunyuanDiT(PackedTransformer):
    config: HunyuanConfig

    def __init__(self, config: HunyuanConfig) -> None:
        super().__init__(config)
        self.x_embedder = _PatchEmbed(config)
        self.context_embedder = TokenRefiner(config)
        self.time_text_embed = ConditionEmbedding(config.pooled_width, config.dim, config.guidance_embeds)
        self.transformer_blocks = nn.ModuleList(DoubleStreamBlock(config) for _ in range(config.num_layers))
        self.single_transformer_blocks = nn.ModuleList(
            SingleStreamBlock(config) for _ in range(config.num_single_layers)
        )
        self.norm_out = Modulation(config.dim, 2)
        self.proj_out = nn.Linear(config.dim, config.out_channels * self.patch_size)
        init_linear(self, head=self.proj_out)

    def velocity(self, given: ForwardInputs) -> Tensor:
        """[n, C_out * patch].

        `conditions.pooled` is the second text encoder's vector; without one it is the mean of the text where the widths
        agree, else zero. `conditions.guidance` is read by guidance-distilled weights only; 1000 by default.
        Raises ValueError for clips with clean frames.
        """
        timesteps, text, layout, conditions = given.timesteps, given.text, given.layout, given.conditions
        if layout.has_clean_frames:
            raise ValueError("a clip with clean frames: HunyuanVideo's blocks take one time for all of a clip.")
        mean = layout.text_mean(text.dtype) @ text
        pooled = pooled_of(conditions, mean, self.config.pooled_width)
        x = self.x_embedder(given.tokens)
        context = self.context_embedder(text, mean, timesteps, layout).index_select(0, layout.text_rows)
        condition = F.silu(self.time_text_embed(timesteps, pooled, conditions.guidance))
        cos, sin = joint_rope(layout, self.config.rope_split, self.config.rope_theta, condition.dtype)
        shared = JointInputs(condition, cos, sin, layout, given.group)
        for block in self.transformer_blocks:
            x, context = self.run(block, x, context, shared)
        x = torch.cat([x, context])
        for block in self.single_transformer_blocks:
            x = self.run(block, x, shared)
        scale, shift = self.norm_out(condition)
        return self.proj_out(ln_modulate(x[: layout.local_tokens], scale, shift, layout.segments, eps=EPS))


class _PatchEmbed(nn.Module):
    def __init__(self, config: HunyuanConfig) -> None:
        super().__init__()
        self.proj = PatchEmbedding(config.in_channels, config.dim, config.patch)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, C * patch] -> [n, D]"""
        return self.proj(tokens)


class TokenRefiner(nn.Module):
    """Self-attention among the text tokens of each sequence, gated by time and mean text; replicated on every rank."""

    def __init__(self, config: HunyuanConfig) -> None:
        super().__init__()
        self.time_text_embed = ConditionEmbedding(config.text_dim, config.dim)
        self.proj_in = nn.Linear(config.text_dim, config.dim)
        self.token_refiner = _RefinerStack(config)

    def forward(self, text: Tensor, mean: Tensor, timesteps: Tensor, layout: Layout) -> Tensor:
        """text [T, text_dim], mean [S, text_dim], timesteps [S] -> [T, D]."""
        condition = F.silu(self.time_text_embed(timesteps, mean))
        x = self.proj_in(text.to(self.proj_in.weight.dtype))
        for block in self.token_refiner.refiner_blocks:
            x = block(x, condition, layout)
        return x


class _RefinerStack(nn.Module):
    def __init__(self, config: HunyuanConfig) -> None:
        super().__init__()
        self.refiner_blocks = nn.ModuleList(RefinerBlock(config) for _ in range(config.num_refiner_layers))


class RefinerBlock(nn.Module):
    def __init__(self, config: HunyuanConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.dim, EPS), nn.LayerNorm(config.dim, EPS)
        self.attn = JointAttention(config, text=False, output=True, qk_norm=False)
        self.ff = FeedForward(config.dim, _REFINER_MLP * config.dim, F.silu)
        self.norm_out = Modulation(config.dim, 2)

    def forward(self, x: Tensor, condition: Tensor, layout: Layout) -> Tensor:
        """x [T, D], condition [S, D] -> [T, D]."""
        gate, mlp_gate = self.norm_out(condition)
        h = ln_modulate(x, weight=self.norm1.weight, bias=self.norm1.bias, eps=EPS)
        q, k, v = (
            linear(h).unflatten(-1, (-1, self.attn.head_dim))
            for linear in (self.attn.to_q, self.attn.to_k, self.attn.to_v)
        )
        y = self.attn.to_out[0](attention(q, k, v, layout.text, layout.text, self.attn.backend).flatten(1))
        x, h = gate_residual_ln_modulate(
            x, y, gate, None, None, layout.text_segments, weight=self.norm2.weight, bias=self.norm2.bias, eps=EPS
        )
        return gate_residual(x, self.ff(h), mlp_gate, layout.text_segments)
