"""Settings of HunyuanVideo's transformer. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from ops.models.base.joint_config import JointDiTConfig
from ops.ranges import between, check_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class HunyuanConfig(JointDiTConfig):
    """HunyuanVideo: text to video, and both published variants of image to video, by Diffusers' names of them."""

    architecture: Literal["hunyuan"] = "hunyuan"
    num_refiner_layers: int = 2  # self-attention blocks over the text
    # latent_concat: the first frame's latent and a mask of one channel are joined to the noisy latent (33 channels).
    # token_replace: the first latent frame is given as it is, at time 0. Both see the frame in the text, too
    first_frame: Literal["none", "latent_concat", "token_replace"] = "none"

    def __post_init__(self) -> None:
        JointDiTConfig.__post_init__(self)
        check_numbers("model.dit", self, num_refiner_layers=between(0, 1000))

    @property
    def starts_from_image(self) -> bool:
        return self.first_frame != "none"

    @property
    def encodes_frame_alone(self) -> bool:
        return True

    @property
    def drops_first_latent(self) -> bool:
        """As HunyuanVideoImageToVideoPipeline does with the weights of 33 channels."""
        return self.first_frame == "latent_concat"

    @property
    def frame_times(self) -> bool:
        return self.first_frame == "token_replace"

    @property
    def gives_first_frame(self) -> bool:
        return self.first_frame == "token_replace"

    @property
    def picture_every(self) -> int:
        """As HunyuanVideoImageToVideoPipeline thins them out."""
        return {"none": 0, "latent_concat": 2, "token_replace": 4}[self.first_frame]

    def fitted(self, channels: int, stride: tuple[int, int, int], text_dim: int, image_dim: int) -> Self:
        """See the base. Published weights of 33 channels: 16 noisy ones, 16 of the condition, 1 of the mask."""
        fitted = JointDiTConfig.fitted(self, channels, stride, text_dim, image_dim)
        return replace(fitted, in_channels=2 * channels + 1) if self.first_frame == "latent_concat" else fitted
