"""The token refiner of HunyuanVideo and HunyuanVideo-1.5: blocks of self-attention over the text, before it meets the
video.

S sequences, T rows of the whole (replicated) text, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.attention.varlen import attention
from ops.kernels.gate_residual.op import gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate.op import ln_modulate
from ops.models.base.config import DiTConfig
from ops.models.base.joint import EPS, ConditionEmbedding, JointAttention, Modulation
from ops.models.base.layers import FeedForward
from ops.packed.packing import Layout

_MLP = 4  # mlp ratio, not a setting in the published code


class TokenRefiner(nn.Module):
    """Self-attention among the text tokens of each sequence, gated by time and mean text; replicated on every rank."""

    def __init__(self, config: DiTConfig, num_layers: int) -> None:
        super().__init__()
        self.time_text_embed = ConditionEmbedding(config.text_dim, config.dim)
        self.proj_in = nn.Linear(config.text_dim, config.dim)
        self.token_refiner = _RefinerStack(config, num_layers)

    def forward(
        self, text: Tensor, mean: Tensor, timesteps: Tensor, layout: Layout, seen: Tensor | None = None
    ) -> Tensor:
        """text [T, text_dim], mean [S, text_dim], timesteps [S] -> [T, D]. `seen` bool [T]: the rows that are attended
        to, where others stand between them, whose results mean nothing; at least one of each text."""
        condition = F.silu(self.time_text_embed(timesteps, mean))
        x: Tensor = self.proj_in(text.to(self.proj_in.weight.dtype))
        for block in self.token_refiner.refiner_blocks:
            x = block(x, condition, layout, seen)
        return x


class _RefinerStack(nn.Module):
    def __init__(self, config: DiTConfig, num_layers: int) -> None:
        super().__init__()
        self.refiner_blocks = nn.ModuleList(RefinerBlock(config) for _ in range(num_layers))


class RefinerBlock(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.dim, EPS), nn.LayerNorm(config.dim, EPS)
        self.attn = JointAttention(config, text=False, output=True, qk_norm=False)
        self.ff = FeedForward(config.dim, _MLP * config.dim, F.silu)
        self.norm_out = Modulation(config.dim, 2)

    def forward(self, x: Tensor, condition: Tensor, layout: Layout, seen: Tensor | None) -> Tensor:
        """x [T, D], condition [S, D], seen [T] -> [T, D]."""
        gate, mlp_gate = self.norm_out(condition)
        h = ln_modulate(x, weight=self.norm1.weight, bias=self.norm1.bias, eps=EPS)
        q, k, v = (
            linear(h).unflatten(-1, (-1, self.attn.head_dim))
            for linear in (self.attn.to_q, self.attn.to_k, self.attn.to_v)
        )
        if seen is None:
            y = attention(q, k, v, layout.text, layout.text, self.attn.backend)
        else:
            y = _attention_to_seen(q, k, v, seen, layout.text_lengths)
        x, h = gate_residual_ln_modulate(
            x,
            self.attn.to_out[0](y.flatten(1)),
            gate,
            None,
            None,
            layout.text_segments,
            weight=self.norm2.weight,
            bias=self.norm2.bias,
            eps=EPS,
        )
        return gate_residual(x, self.ff(h), mlp_gate, layout.text_segments)


def _attention_to_seen(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """[T, H, d] each, seen [T] -> [T, H, d]. Which rows are seen the device alone knows, so they are masked: rows
    without them would have lengths for which the host had to wait."""
    found = []
    for rows in zip(*(part.split(lengths) for part in (q, k, v, seen)), strict=True):
        queries, keys, values = (part.transpose(0, 1)[None] for part in rows[:3])
        heads = F.scaled_dot_product_attention(queries, keys, values, attn_mask=rows[3][None, None, None])
        found.append(heads[0].transpose(0, 1))
    return torch.cat(found)
