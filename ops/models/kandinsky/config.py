"""Settings of Kandinsky 5.0's transformer. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from ops.config import Spacing
from ops.models.base.config import DiTConfig
from ops.models.base.flops import ForwardFlops, crossing_flops
from ops.models.base.joint_config import check_axes
from ops.ranges import between, check_numbers

if TYPE_CHECKING:
    from ops.models.base.family import Json

_OTHER_PIPELINES = {
    "Kandinsky5I2VPipeline": "image to video",
    "Kandinsky5T2IPipeline": "pictures of another autoencoder",
    "Kandinsky5I2IPipeline": "edited pictures",
}
_480P = 480, 854  # pixels of a side, from and to
_SCALE_480P, _SCALE = 2.0, 3.16  # by which places over height and width are divided


@dataclass(frozen=True, kw_only=True, slots=True)
class KandinskyConfig(DiTConfig):
    """Kandinsky 5.0, text to video: blocks over the text, then blocks over the video with a cross-attention to it.

    Sinusoids are as wide as the blocks whatever `freq_dim` says, as in the published code. `in_channels` are those of
    the noisy latent.
    """

    architecture: Literal["kandinsky"] = "kandinsky"
    num_text_layers: int = 2  # blocks of self-attention over the text
    time_dim: int = 512  # width of the embedding of time and pooled text
    pooled_dim: int = 0  # width of the pooled text vector; 0: text_dim
    # the weights have as many more channels for a first frame and one for its mask, which are zero in text to video
    visual_cond: bool = True
    vae_stride: int = 8  # pixels of a latent, over height and width; set from model.vae
    rope_axes: tuple[int, int, int] | None = None  # head sizes given to (t, h, w); null: 16, 24, 24 of 64, scaled

    def __post_init__(self) -> None:
        DiTConfig.__post_init__(self)
        check_numbers(
            "model.dit",
            self,
            num_text_layers=between(0, 1000),
            time_dim=between(1, 1 << 16),
            pooled_dim=between(0, 1 << 16),
            vae_stride=between(1, 1 << 10),
            rope_axes=between(0, 1024),
        )
        check_axes(self.rope_axes, self.head_dim)
        if self.patch != (1, 2, 2):
            raise ValueError(
                f"model.dit.patch {list(self.patch)}: Kandinsky5T2VPipeline counts tokens of 2x2 latents of one frame. "
                f"Use [1, 2, 2]."
            )

    @property
    def flops(self) -> ForwardFlops:
        return crossing_flops(self.num_layers, self.dim, self.ffn_dim)

    @property
    def rope_split(self) -> tuple[int, int, int]:
        return self.rope_axes or default_axes(self.head_dim)

    def rope_scale(self, height: int, width: int) -> float:
        """By what places over height and width are divided for clips of this size in tokens: one number for sizes
        around 480p, another for all others, as Kandinsky5T2VPipeline has it."""
        least, most = _480P
        rows, columns = height * self.patch[1] * self.vae_stride, width * self.patch[2] * self.vae_stride
        return _SCALE_480P if least <= rows <= most and least <= columns <= most else _SCALE

    @property
    def pooled_width(self) -> int:
        return self.pooled_dim or self.text_dim

    def with_pooled(self, dim: int) -> Self:
        return replace(self, pooled_dim=0 if dim == self.text_dim else dim)

    def of_pipeline(self, index: Json) -> Self:
        """Raises ValueError for a pipeline of another use, whose transformer has the same class and settings."""
        if use := _OTHER_PIPELINES.get(name := str(index.get("_class_name"))):
            raise ValueError(
                f"a {name}, for {use}: of Kandinsky 5.0 text to video is computed. Take a folder of "
                f"Kandinsky5T2VPipeline."
            )
        return self

    @property
    def spacing(self) -> Spacing:
        return "to_least"

    def fitted(self, channels: int, stride: tuple[int, int, int], text_dim: int, image_dim: int) -> Self:
        """See the base. Raises ValueError for a VAE whose latents are not square."""
        if stride[1] != stride[2]:
            raise ValueError(
                f"model.vae makes latents of {stride[1]}x{stride[2]} pixels, and Kandinsky 5.0 counts sizes in square "
                f"ones. Use a VAE of one stride over height and width."
            )
        return replace(DiTConfig.fitted(self, channels, stride, text_dim, image_dim), vae_stride=stride[1])


def default_axes(head_dim: int) -> tuple[int, int, int]:
    """16, 24, 24 of 64 and 32, 48, 48 of 128, as Lite and Pro have it, scaled in whole pairs."""
    spatial = 2 * (head_dim * 3 // 16)
    return head_dim - 2 * spatial, spatial, spatial
