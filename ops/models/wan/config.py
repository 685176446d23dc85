"""Settings of Wan's transformer. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from ops.models.base.config import DiTConfig
from ops.models.base.flops import ForwardFlops, crossing_flops
from ops.ranges import above, between, check_numbers

if TYPE_CHECKING:
    from ops.models.base.family import Json


@dataclass(frozen=True, kw_only=True, slots=True)
class WanBlocksConfig(DiTConfig):
    """What all transformers of Wan's blocks have: text to video, and image to video with the first frame as further
    input channels. A base; `WanConfig` is Wan's own."""

    cross_attn_norm: bool = True
    # channels: the latent of (first frame, then grey) and a mask of its frames are joined to the noisy latent, as in
    # Wan's image-to-video weights; none: text to video
    first_frame: Literal["none", "channels"] = "none"
    # Wan2.1-FLF2V: the last frame is given, too; rows of the embeddings of both, each with a trained place (514 as
    # published: 257 of each). 0: the first frame alone
    pos_embed_seq_len: int = 0
    # width of the image encoder's output, whose rows the blocks attend to; 0: they attend to none. Set from model.image
    image_dim: int = 0

    def __post_init__(self) -> None:
        DiTConfig.__post_init__(self)
        check_numbers("model.dit", self, image_dim=between(0, 1 << 16), pos_embed_seq_len=between(0, 1 << 16))
        if self.pos_embed_seq_len and self.first_frame == "none":
            raise ValueError(
                f"model.dit.pos_embed_seq_len {self.pos_embed_seq_len} is of transformers that get the first and the "
                f"last frame, and first_frame is none. Set that to channels, or this to 0."
            )

    @property
    def flops(self) -> ForwardFlops:
        return crossing_flops(self.num_layers, self.dim, self.ffn_dim)

    @property
    def rope_split(self) -> tuple[int, int, int]:
        """Wan's 44, 42, 42 of 128: a third of the pairs each for h and w, the rest for t."""
        spatial = 2 * (self.head_dim // 6)
        return self.head_dim - 2 * spatial, spatial, spatial

    @property
    def image_width(self) -> int:
        return self.image_dim

    @property
    def starts_from_image(self) -> bool:
        return self.first_frame != "none"

    @property
    def image_rows(self) -> int:
        return self.pos_embed_seq_len

    @property
    def takes_last_frame(self) -> bool:
        return self.pos_embed_seq_len > 0

    @property
    def frame_times(self) -> bool:
        return self.first_frame == "none"

    @property
    def levels_by_frame(self) -> bool:
        return self.first_frame == "none"

    def fitted(self, channels: int, stride: tuple[int, int, int], text_dim: int, image_dim: int) -> Self:
        """See the base. Published image-to-video weights: 16 noisy channels, 4 of the mask, 16 of the condition."""
        if image_dim and self.first_frame == "none":
            raise ValueError(
                "model.image makes embeddings of first frames, but model.dit.first_frame is none. Set it to channels, "
                "or leave model.image out."
            )
        told = channels + stride[0] if self.first_frame == "channels" else 0
        return replace(self, in_channels=channels + told, out_channels=channels, text_dim=text_dim, image_dim=image_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class WanConfig(WanBlocksConfig):
    """Wan2.1 and 2.2."""

    architecture: Literal["wan"] = "wan"
    # Wan2.2 A14B has a transformer for high noise (transformer/) and one for low (transformer_2/); a run trains one of
    # them, or both
    expert: Literal["none", "high", "low", "both"] = "none"
    boundary: float = 0.875  # the noise level between them; 0.9 for image to video; a folder's own counts

    def __post_init__(self) -> None:
        WanBlocksConfig.__post_init__(self)
        check_numbers("model.dit", self, boundary=above(0, 0.999))

    @property
    def levels_by_frame(self) -> bool:
        """An expert is for some levels, and those of a clip's frames would be of both."""
        return self.first_frame == "none" and self.expert == "none"

    @property
    def part(self) -> str:
        return "transformer_2" if self.expert == "low" else "transformer"

    @property
    def sigmas(self) -> tuple[float, float]:
        return {"high": (self.boundary, 1.0), "low": (0.0, self.boundary)}.get(self.expert, (0.0, 1.0))

    @property
    def experts(self) -> tuple[Self, ...]:
        if self.expert != "both":
            return (self,)
        return replace(self, expert="high"), replace(self, expert="low")

    @property
    def expert_name(self) -> str:
        return self.expert if self.expert in ("high", "low") else ""

    def other_expert(self) -> Self:
        return replace(self, expert="low" if self.expert == "high" else "high")

    def of_pipeline(self, index: Json) -> Self:
        return replace(self, boundary=index.get("boundary_ratio") or self.boundary)
