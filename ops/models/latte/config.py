"""Settings of Latte's transformer. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ops.config import Diffusion
from ops.models.base.flops import ForwardFlops, crossing_flops, joint_flops
from ops.models.base.spatial_temporal_config import SpatialTemporalDiTConfig
from ops.ranges import between, check_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class LatteConfig(SpatialTemporalDiTConfig):
    """Latte-1, text to video, trained by diffusion.

    `out_channels` are those of the predicted noise; the learned variances after them in published weights are kept as
    they are and not trained.
    """

    architecture: Literal["latte"] = "latte"
    sample_size: int = 64  # latents in height and width to whose positions other sizes are scaled
    video_length: int = 16  # frames of a clip that Diffusers' class takes, no more and no less, beside pictures

    def __post_init__(self) -> None:
        SpatialTemporalDiTConfig.__post_init__(self)
        check_numbers("model.dit", self, sample_size=between(2, 1 << 16), video_length=between(1, 1 << 16))

    @property
    def flops(self) -> ForwardFlops:
        """Spatial blocks attend to the text, too."""
        spatial, temporal = (f(self.num_layers, self.dim, self.ffn_dim) for f in (crossing_flops, joint_flops))
        pair = spatial.pair + temporal.pair
        return replace(spatial, video=spatial.video + temporal.video, pair=pair, in_turn=True)

    @property
    def diffusion(self) -> Diffusion:
        return Diffusion(predicts="noise")
