"""FLUX.1's transformer over packed pictures, with the parameter names of FluxTransformer2DModel.

n picture rows and m text rows of this rank, D width. HunyuanVideo's blocks, without a refiner of the text.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from ops.models.base.joint import JointTransformer
from ops.models.base.transformer import ForwardInputs
from ops.models.flux.config import FluxConfig


class FluxDiT(JointTransformer):
    def __init__(self, config: FluxConfig) -> None:
        super().__init__(
            config,
            nn.Linear(config.in_channels * math.prod(config.patch), config.dim),
            nn.Linear(config.text_dim, config.dim),
        )

    def embedded(self, given: ForwardInputs, mean: Tensor) -> tuple[Tensor, Tensor]:
        """As `JointTransformer.embedded`. Raises ValueError for clips of more than one frame."""
        layout = given.layout
        if any(sequence.grid[0] > 1 for sequence in layout.sequences):
            raise ValueError("a clip of several frames: FLUX.1 makes pictures. Give it clips of one frame.")
        dtype = self.proj_out.weight.dtype
        rows = given.text.index_select(0, layout.text_rows)
        return self.x_embedder(given.tokens.to(dtype)), self.context_embedder(rows.to(dtype))
