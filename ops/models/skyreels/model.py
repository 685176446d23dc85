"""SkyReels-V2's transformer over packed sequences: Wan's, and where the weights take it an embedding of the frame rate
that is added to the modulation of every block. Parameter names are those of Diffusers' SkyReelsV2Transformer3DModel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ops.models.base.layers import FeedForward
from ops.models.skyreels.config import RATES, SkyReelsConfig
from ops.models.wan.model import WanDiT
from ops.packed.packing import Layout


class SkyReelsDiT(WanDiT):
    """See `WanDiT` for a call; with `Sequence.frame_times` it takes a time for each latent frame."""

    config: SkyReelsConfig

    def __init__(self, config: SkyReelsConfig) -> None:
        super().__init__(config)
        if config.sample_info:
            self.fps_embedding = nn.Embedding(len(RATES), config.dim)
            self.fps_projection = FeedForward(config.dim, config.dim, nn.functional.silu, out_dim=6 * config.dim)
            for weight in (self.fps_embedding.weight, *(w for w in self.fps_projection.parameters() if w.dim() > 1)):
                nn.init.normal_(weight, std=0.02)

    def modulation(self, times: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Wan's, and to that of the blocks what the frame rate of each clip adds."""
        time, modulation = super().modulation(times, layout)
        if not self.config.sample_info:
            return time, modulation
        rates = self.fps_embedding(layout.made(_rates, self.config.frame_rate))
        told = self.fps_projection.precise(rates).unflatten(1, (6, -1))
        return time, modulation + told[layout.table_sequences]


def _rates(layout: Layout, frame_rate: float) -> Tensor:
    """int64 [S]: the row of the embedding for each sequence."""
    slow, fast = RATES
    rates = [sequence.frame_rate or frame_rate for sequence in layout.sequences]
    return torch.tensor([int(rate > (slow + fast) / 2) for rate in rates])
