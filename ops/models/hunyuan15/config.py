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
    """HunyuanVideo-1.5, text to video: double-stream blocks alone, and two kinds of text, captions and glyphs.

    Sinusoids have 256 numbers whatever `freq_dim` says, as in the published code. `in_channels` are those of the noisy
    latent: the weights have as many more for a first frame and one for its mask, which are zero in text to video.
    """

    architecture: Literal["hunyuan15"] = "hunyuan15"
    num_refiner_layers: int = 2  # self-attention blocks over the captions' states
    glyph_dim: int = 0  # width of the states of what a caption quotes, at most text_dim; 0: text_dim
    image_dim: int = 64  # width of image embeddings, of weights that text to video holds and does not use
    rope_axes: tuple[int, int, int] | None = None  # head sizes given to (t, h, w); None scales 16, 56, 56

    def __post_init__(self) -> None:
        DiTConfig.__post_init__(self)
        check_numbers(
            "model.dit",
            self,
            num_refiner_layers=between(0, 1000),
            glyph_dim=between(0, 1 << 16),
            image_dim=between(1, 1 << 16),
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

    def with_glyphs(self, dim: int) -> Self:
        return replace(self, glyph_dim=0 if dim == self.text_dim else dim)
