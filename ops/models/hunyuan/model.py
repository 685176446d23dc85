"""HunyuanVideo's transformer over packed sequences, with the parameter names of HunyuanVideoTransformer3DModel.

n video rows and m text rows of this rank, D width. Text and video attend to each other in one sequence; a bag cuts both
into chunks. Double-stream blocks keep separate weights for video and text, single-stream blocks treat
[video rows; text rows] alike.

The text is refined in full by every rank and only then cut, so its gradients too are partial and sum up over the bag.
"""

from __future__ import annotations

from torch import Tensor, nn

from ops.models.base.joint import JointTransformer
from ops.models.base.layers import PatchEmbedding
from ops.models.base.refiner import TokenRefiner
from ops.models.base.transformer import ForwardInputs
from ops.models.hunyuan.config import HunyuanConfig


class HunyuanDiT(JointTransformer):
    def __init__(self, config: HunyuanConfig) -> None:
        super().__init__(config, _PatchEmbed(config), TokenRefiner(config, config.num_refiner_layers))

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
