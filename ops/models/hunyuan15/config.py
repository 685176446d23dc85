"""Settings of HunyuanVideo-1.5's transformer. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from ops.models.base.config import DiTConfig
from ops.models.base.flops import ForwardFlops, joint_flops
from ops.models.base.joint_config import check_axes, default_rope_split
from ops.ranges import between, check_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Hunyuan15Config(DiTConfig):
    """HunyuanVideo-1.5: double-stream blocks alone, and text of captions, glyphs and, for image to video, first frames.

    Sinusoids have 256 numbers whatever `freq_dim` says, as in the published code. All weights have columns for the
    latent of a first frame and its mask, which are zero in text to video: there `in_channels` are those of the noisy
    latent alone.
    """

    architecture: Literal["hunyuan15"] = "hunyuan15"
    num_refiner_layers: int = 2  # self-attention blocks over the captions' states
    glyph_dim: int = 0  # width of the states of what a caption quotes, at most text_dim; 0: text_dim
    image_dim: int = 64  # width of the rows of a first frame; text to video holds their weights and does not use them
    # channels: the first frame's latent and a mask of one channel are joined to the noisy latent (65 channels), and its
    # rows of SigLIP are text; none: text to video
    first_frame: Literal["none", "channels"] = "none"
    target_size: int = 640  # side of a square of as many pixels as clips of its pipeline have (480p: 640, 720p: 960)
    rope_axes: tuple[int, int, int] | None = None  # head sizes given to (t, h, w); null: 16, 56, 56 of 128, scaled

    def __post_init__(self) -> None:
        DiTConfig.__post_init__(self)
        check_numbers(
            "model.dit",
            self,
            num_refiner_layers=between(0, 1000),
            glyph_dim=between(0, 1 << 16),
            image_dim=between(1, 1 << 16),
            target_size=between(1, 1 << 14),
            rope_axes=between(0, 1024),
        )
        check_axes(self.rope_axes, self.head_dim)
        if self.glyph_dim > self.text_dim:
            raise ValueError(
                f"model.dit.glyph_dim {self.glyph_dim} is more than text_dim {self.text_dim}: states of glyphs lie in "
                f"rows of the captions' width. Use a narrower encoder of glyphs."
            )

    @property
    def flops(self) -> ForwardFlops:
        return joint_flops(self.num_layers, self.dim, self.ffn_dim)

    @property
    def rope_split(self) -> tuple[int, int, int]:
        return self.rope_axes or default_rope_split(self.head_dim)

    @property
    def glyph_width(self) -> int:
        return self.glyph_dim or self.text_dim

    @property
    def starts_from_image(self) -> bool:
        return self.first_frame != "none"

    @property
    def encodes_frame_alone(self) -> bool:
        return True

    @property
    def picture_every(self) -> int:
        """All rows of the first frame are text."""
        return int(self.starts_from_image)

    def with_glyphs(self, dim: int) -> Self:
        return replace(self, glyph_dim=0 if dim == self.text_dim else dim)

    def with_vision(self, dim: int) -> Self:
        if dim > self.text_dim:
            raise ValueError(
                f"model.text makes rows of the first frame of {dim} numbers and of captions of {self.text_dim}, in "
                f"which those must find room. Use a narrower encoder of pictures."
            )
        return replace(self, image_dim=dim)

    def fitted(self, channels: int, stride: tuple[int, int, int], text_dim: int, image_dim: int) -> Self:
        """See the base. Published weights for first frames: 32 noisy channels, 32 of the condition, 1 of the mask."""
        fitted = DiTConfig.fitted(self, channels, stride, text_dim, image_dim)
        return replace(fitted, in_channels=2 * channels + 1) if self.starts_from_image else fitted
