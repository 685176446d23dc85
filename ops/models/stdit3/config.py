"""Settings of STDiT3, the transformer of Open-Sora 1.2. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from ops.models.base.flops import ForwardFlops, crossing_flops
from ops.models.base.spatial_temporal_config import SpatialTemporalDiTConfig
from ops.ranges import above, between, check_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class STDiT3Config(SpatialTemporalDiTConfig):
    """STDiT3, text to video, trained by a rectified flow.

    It gets the frame rate of a clip, and sees the size of a frame in its positions, so it must know the VAE's
    strides. `out_channels` are those of the velocity; the learned variances after them in published weights are kept
    as they are and not trained. Frames given clean, the mask training of its report, are not offered.
    """

    architecture: Literal["stdit3"] = "stdit3"
    base_size: int = 512  # side in pixels of the square frame whose positions are counted one by one
    caption_rows: int = 300  # fixed random rows that stand for a caption that is no text (model.text.empty: none)
    frame_rate: float = 24.0  # of samples, and of clips by data.fps; where that is 0 each has its own
    pixel_stride: tuple[int, int] = (8, 8)  # over height and width; set from model.vae

    def __post_init__(self) -> None:
        SpatialTemporalDiTConfig.__post_init__(self)
        check_numbers(
            "model.dit",
            self,
            base_size=between(1, 1 << 16),
            caption_rows=between(1, 1 << 16),
            frame_rate=above(0, 1000),
            pixel_stride=between(1, 1 << 10),
        )

    @property
    def clip_rate(self) -> float:
        return self.frame_rate

    def at_rate(self, frame_rate: float) -> Self:
        return replace(self, frame_rate=frame_rate)

    @property
    def flops(self) -> ForwardFlops:
        """Blocks of both kinds attend to the text, too."""
        return replace(crossing_flops(2 * self.num_layers, self.dim, self.ffn_dim), in_turn=True)

    def fitted(self, channels: int, stride: tuple[int, int, int], text_dim: int, image_dim: int) -> Self:
        plain = SpatialTemporalDiTConfig.fitted(self, channels, stride, text_dim, image_dim)
        return replace(plain, pixel_stride=stride[1:])
