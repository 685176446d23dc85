"""HunyuanVideo's transformer over packed sequences, with the parameter names of HunyuanVideoTransformer3DModel.

S sequences, n video rows and m text rows of this rank, T rows of the whole (replicated) text, D width, H heads,
d head size. Text and video attend to each other in one sequence; under Ulysses both are cut into chunks. Double-stream
blocks keep separate weights for video and text, single-stream blocks treat [video rows; text rows] alike.

The text is refined in full by every rank and only then cut, so its gradients too are partial and sum up over the bag.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ops.attention.varlen import attention
from ops.kernels.gate_residual.op import gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate.op import ln_modulate
from ops.models.base.joint import (
    EPS,
    ConditionEmbedding,
    JointAttention,
    JointTransformer,
    Modulation,
)
from ops.models.base.layers import FeedForward, PatchEmbedding
from ops.models.base.transformer import ForwardInputs
from ops.models.hunyuan.config import HunyuanConfig
from ops.packed.packing import Layout

_REFINER_MLP = 4  # mlp ratio of the token refiner, not a setting there


class HunyuanDiT(JointTransformer):
    def __init__(self, config: HunyuanConfig) -> None:
        super().__init__(config, _PatchEmbed(config), TokenRefiner(config))

    def embedded(self, given: ForwardInputs, mean: Tensor) -> tuple[Tensor, Tensor]:
        """As `JointTransformer.embedded`. Raises ValueError for clips with clean frames, but for `token_replace`."""
        layout = given.layout
        if layout.has_clean_frames and not self.config.frame_times:
            raise ValueError(
                "a clip with clean frames: these blocks take one time for all of a clip. model.dit.first_frame "
                "token_replace has blocks that take two."
            )
        context = self.context_embedder(given.text, mean, given.timesteps, layout)
        return self.x_embedder(given.tokens), context.index_select(0, layout.text_rows)


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
