"""LTX-Video's diffusion transformer over packed sequences, with the parameter names of LTXVideoTransformer3DModel.

S sequences, n rows of this rank, D width, T rows of the (replicated) text. Blocks are like Wan's, with RMSNorm without
weights, a cross-attention that reads the stream as it is, and positions in seconds and pixels (HaCohen et al. 2024).
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.attention.varlen import attention
from ops.kernels.base.segments import Segments
from ops.kernels.gate_residual.op import gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate.op import ln_modulate
from ops.models.base.layers import (
    Attention,
    FeedForward,
    TimeModulation,
    TwoLayerMLP,
    gelu_tanh,
    init_linear,
)
from ops.models.base.transformer import ForwardInputs, PackedTransformer, TextBlockInputs
from ops.models.ltx.config import LTXBlocksConfig, LTXConfig
from ops.packed.packing import Layout
from ops.packed.sequence_parallel import sequence_parallel_attention

_OUT_EPS = 1e-6
LONGEST = (20.0, 2048.0, 2048.0)  # seconds and pixels at which a position is 1


class LTXTransformer(PackedTransformer):
    """LTX-Video's transformer and that of LTX-2, without what differs: `block` and `rotation`."""

    config: LTXBlocksConfig

    def __init__(self, config: LTXBlocksConfig) -> None:
        super().__init__(config)
        self.proj_in = nn.Linear(config.in_channels, config.dim)
        self.time_embed = TimeModulation(config.dim)
        self.caption_projection = TwoLayerMLP(config.text_dim, config.dim, gelu_tanh)
        self.transformer_blocks = nn.ModuleList(self.block() for _ in range(config.num_layers))
        self.proj_out = nn.Linear(config.dim, config.out_channels)
        self.scale_shift_table = nn.Parameter(torch.randn(2, config.dim) / config.dim**0.5)
        init_linear(self, head=self.proj_out)

    def velocity(self, given: ForwardInputs) -> Tensor:
        layout = given.layout
        x = self.proj_in(given.tokens.to(self.proj_in.weight.dtype))
        time, modulation = self.time_embed(layout.times(given.timesteps, given.conditions.first_times))
        cos, sin = self.rotation(layout, time.dtype)
        shared = TextBlockInputs(self.caption_projection(given.text), modulation, cos, sin, layout, given.group)
        for block in self.transformer_blocks:
            x = self.run(block, x, shared)
        shift, scale = (self.scale_shift_table.to(time.dtype) + time[:, None]).unbind(1)
        return self.proj_out(ln_modulate(x, scale, shift, layout.segments, eps=_OUT_EPS))

    def block(self) -> nn.Module:
        """A block of x [n, D] and `TextBlockInputs`."""
        raise NotImplementedError

    def rotation(self, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [n, D / 2] of each local row."""
        raise NotImplementedError


class LTXDiT(LTXTransformer):
    config: LTXConfig

    def block(self) -> nn.Module:
        return LTXBlock(self.config)

    def rotation(self, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return rotation(layout, self.config, dtype)


def rotation(layout: Layout, config: LTXConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [n, D / 2] of each local row, by the rule of `causal_temporal_positioning`. A frequency turns all
    three axes before the next one does; in front are the pairs that are not rotated. In fp32 as in Diffusers."""
    positions = layout.positions.float()
    if config.causal_temporal_positioning:
        positions[:, 0] = (positions[:, 0] - (1 - 1 / config.vae_stride[0])).clamp(min=0)
    place = positions * layout.made(_units, config)[layout.seq_index] * 2 - 1  # [n, 3]
    count = config.dim // 6
    powers = torch.linspace(0.0, 1.0, count, dtype=torch.float32, device=layout.device)
    frequencies = config.rope_theta**powers * (math.pi / 2)
    angles = (frequencies[:, None] * place[:, None]).flatten(1)  # [n, count * 3]
    angles = F.pad(angles, (config.dim % 6 // 2, 0))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _units(layout: Layout, config: LTXConfig) -> Tensor:
    """fp32 [S, 3]: the distance of two tokens on t, h and w, as a share of the longest that the model knows."""
    seconds = torch.tensor([[one.frame_rate or config.frame_rate, 1.0, 1.0] for one in layout.sequences])
    return torch.tensor(config.vae_stride) / seconds / torch.tensor(LONGEST)


class LTXBlock(nn.Module):
    """Self-attention over the bag, cross-attention to the replicated text, MLP; AdaLN from each row's table row."""

    self_attention: ClassVar[type[Attention]] = Attention
    qk_eps: ClassVar[float] = 1e-5

    def __init__(self, config: LTXBlocksConfig) -> None:
        super().__init__()
        self.eps, self.backend = config.eps, config.attention
        self.attn1 = self.self_attention(config.dim, config.head_dim, self.qk_eps, rope_dim=config.dim)
        self.attn2 = Attention(config.dim, config.head_dim, self.qk_eps)
        self.ff = FeedForward(config.dim, config.ffn_dim)
        self.scale_shift_table = nn.Parameter(torch.randn(6, config.dim) / config.dim**0.5)

    def forward(self, x: Tensor, shared: TextBlockInputs) -> Tensor:
        """x [n, D] -> [n, D]."""
        layout, segments = shared.layout, shared.layout.segments
        table = self.scale_shift_table.to(shared.modulation.dtype) + shared.modulation
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = table.unbind(1)

        h = ln_modulate(x, scale, shift, segments, eps=self.eps, rms=True)
        q, k, v = self.attn1.project(h, h, shared.cos, shared.sin)
        y = self.attn1.output(sequence_parallel_attention(q, k, v, layout.video_exchange, shared.group, self.backend))
        x, h = self.text_queries(x, y, gate, segments)

        q, k, v = self.attn2.project(h, shared.text)
        y = self.attn2.output(attention(q, k, v, layout.local_lengths, layout.text, self.backend))
        x, h = gate_residual_ln_modulate(x, y, None, mlp_scale, mlp_shift, segments, eps=self.eps, rms=True)
        return gate_residual(x, self.ff(h), mlp_gate, segments)

    def text_queries(self, x: Tensor, y: Tensor, gate: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """The stream after self-attention gave y, and what the cross-attention makes its queries of; both [n, D]."""
        x = gate_residual(x, y, gate, segments)
        return x, x
