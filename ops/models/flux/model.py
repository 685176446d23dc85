"""FLUX.1's transformer over packed pictures, with the parameter names of FluxTransformer2DModel.

S sequences, n picture rows and m text rows of this rank, D width. HunyuanVideo's blocks, without a refiner of the text.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.fused import ln_modulate
from ops.models.base.joint import (
    EPS,
    ConditionEmbedding,
    DoubleStreamBlock,
    JointInputs,
    Modulation,
    SingleStreamBlock,
    joint_rope,
    pooled_of,
)
from ops.models.base.layers import init_linear
from ops.models.base.transformer import ForwardInputs, PackedTransformer
from ops.models.flux.config import FluxConfig


class FluxDiT(PackedTransformer):
    config: FluxConfig

    def __init__(self, config: FluxConfig) -> None:
        super().__init__(config)
        self.x_embedder = nn.Linear(config.in_channels * self.patch_size, config.dim)
        self.context_embedder = nn.Linear(config.text_dim, config.dim)
        self.time_text_embed = ConditionEmbedding(config.pooled_width, config.dim, config.guidance_embeds)
        self.transformer_blocks = nn.ModuleList(DoubleStreamBlock(config) for _ in range(config.num_layers))
        self.single_transformer_blocks = nn.ModuleList(
            SingleStreamBlock(config) for _ in range(config.num_single_layers)
        )
        self.norm_out = Modulation(config.dim, 2)
        self.proj_out = nn.Linear(config.dim, config.out_channels * self.patch_size)
        init_linear(self, head=self.proj_out)

    def velocity(self, given: ForwardInputs) -> Tensor:
        """[n, C_out * patch]. Conditions as HunyuanVideo's. Raises ValueError for clips of more than one frame."""
        layout, conditions = given.layout, given.conditions
        if any(sequence.grid[0] > 1 for sequence in layout.sequences):
            raise ValueError("a clip of several frames: FLUX.1 makes pictures. Give it clips of one frame.")
        dtype = self.x_embedder.weight.dtype
        mean = layout.text_mean(given.text.dtype) @ given.text
        pooled = pooled_of(conditions, mean, self.config.pooled_width)
        x = self.x_embedder(given.tokens.to(dtype))
        context = self.context_embedder(given.text.index_select(0, layout.text_rows).to(dtype))
        condition = F.silu(self.time_text_embed(given.timesteps, pooled, conditions.guidance))
        cos, sin = joint_rope(layout, self.config.rope_split, self.config.rope_theta, condition.dtype)
        shared = JointInputs(condition, cos, sin, layout, given.group)
        for block in self.transformer_blocks:
            x, context = self.run(block, x, context, shared)
        x = torch.cat([x, context])
        for block in self.single_transformer_blocks:
            x = self.run(block, x, shared)
        scale, shift = self.norm_out(condition)
        return self.proj_out(ln_modulate(x[: layout.local_tokens], scale, shift, layout.segments, eps=EPS))
