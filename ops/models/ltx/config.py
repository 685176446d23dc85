"""Settings of LTX-Video's transformer. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from ops.models.base.config import DiTConfig
from ops.models.base.flops import ForwardFlops, crossing_flops
from ops.ranges import above, between, check_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class LTXConfig(DiTConfig):
    """LTX-Video 0.9, text to video. Its positions are seconds and pixels, so it must know frame rate and VAE.

    Sinusoids have 256 numbers whatever `freq_dim` says, and RoPE rotates the whole width before it is cut into heads.
    """

    architecture: Literal["ltx"] = "ltx"
    patch: tuple[int, int, int] = (1, 1, 1)
    frame_rate: float = 25.0  # of samples, and of clips by data.fps; where that is 0 each has its own
    vae_stride: tuple[int, int, int] = (8, 32, 32)  # follows model.vae

    def __post_init__(self) -> None:
        DiTConfig.__post_init__(self)
        check_numbers("model.dit", self, frame_rate=above(0, 1000), vae_stride=between(1, 1 << 10))
        if self.patch != (1, 1, 1):
            raise ValueError(f"model.dit.patch {self.patch}: LTX-Video's tokens are single latents. Use [1, 1, 1].")
        if self.ffn_dim != 4 * self.dim:
            raise ValueError(
                f"model.dit.ffn_dim {self.ffn_dim} is not 4 times the width {self.dim}, as LTX-Video has it."
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
    def clip_rate(self) -> float:
        return self.frame_rate

    def at_rate(self, frame_rate: float) -> Self:
        return replace(self, frame_rate=frame_rate)

    def fitted(self, channels: int, stride: tuple[int, int, int], text_dim: int, image_dim: int) -> Self:
        return replace(DiTConfig.fitted(self, channels, stride, text_dim, image_dim), vae_stride=stride)
