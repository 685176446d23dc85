"""Settings of LTX-Video's transformer. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from ops.config import Spacing
from ops.models.base.config import DiTConfig
from ops.models.base.flops import ForwardFlops, crossing_flops
from ops.ranges import above, between, check_numbers

if TYPE_CHECKING:
    from ops.models.base.family import Json

CONDITION_PIPELINE = "LTXConditionPipeline"  # Diffusers' class for 0.9.5 and later


@dataclass(frozen=True, kw_only=True, slots=True)
class LTXBlocksConfig(DiTConfig):
    """What LTX-Video and LTX-2 have in common: positions are seconds and pixels, so it must know frame rate and VAE.

    Sinusoids have 256 numbers whatever `freq_dim` says, and RoPE's frequencies are those of the whole width.
    """

    patch: tuple[int, int, int] = (1, 1, 1)
    frame_rate: float = 25.0  # of samples, and of clips by data.fps; where that is 0 each has its own
    vae_stride: tuple[int, int, int] = (8, 32, 32)  # over t, h, w; set from model.vae

    def __post_init__(self) -> None:
        DiTConfig.__post_init__(self)
        check_numbers("model.dit", self, frame_rate=above(0, 1000), vae_stride=between(1, 1 << 10))
        if self.patch != (1, 1, 1):
            raise ValueError(
                f"model.dit.patch {self.patch}: tokens of LTX-Video and LTX-2 are single latents. Use [1, 1, 1]."
            )
        if self.ffn_dim != 4 * self.dim:
            raise ValueError(
                f"model.dit.ffn_dim {self.ffn_dim} is not 4 times the width {self.dim}, as LTX-Video and LTX-2 have it."
            )

    @property
    def flops(self) -> ForwardFlops:
        return crossing_flops(self.num_layers, self.dim, self.ffn_dim)

    @property
    def rope_split(self) -> tuple[int, int, int]:
        """How the rotation is split over the whole width; what a sixth of it does not divide stays as it is."""
        each = 2 * (self.dim // 6)
        return each, each, each

    @property
    def frame_times(self) -> bool:
        return True

    @property
    def levels_by_frame(self) -> bool:
        return True

    @property
    def clip_rate(self) -> float:
        return self.frame_rate

    def at_rate(self, frame_rate: float) -> Self:
        return replace(self, frame_rate=frame_rate)

    def fitted(self, channels: int, stride: tuple[int, int, int], text_dim: int, image_dim: int) -> Self:
        return replace(DiTConfig.fitted(self, channels, stride, text_dim, image_dim), vae_stride=stride)


@dataclass(frozen=True, kw_only=True, slots=True)
class LTXConfig(LTXBlocksConfig):
    """LTX-Video 0.9.0 to 0.9.8, text to video. RoPE rotates the whole width before it is cut into heads."""

    architecture: Literal["ltx"] = "ltx"
    # 0.9.5 and later: a latent frame stands at its first frame, where the first one stands for one frame alone
    # (LTXConditionPipeline: max(8 f - 7, 0) / fps seconds); else at 8 f / fps, as LTXPipeline has it
    causal_temporal_positioning: bool = False

    @property
    def spacing(self) -> Spacing:
        return "linear_quadratic" if self.causal_temporal_positioning else "even"

    @property
    def sampled_unshifted(self) -> bool:
        """LTXConditionPipeline passes the times themselves."""
        return self.causal_temporal_positioning

    def of_pipeline(self, index: Json) -> Self:
        """0.9.5's folder is one of LTXPipeline, so that a config may say what that does not."""
        causal = self.causal_temporal_positioning or index.get("_class_name") == CONDITION_PIPELINE
        return replace(self, causal_temporal_positioning=causal)
