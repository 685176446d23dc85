"""Settings of CogVideoX's transformer. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from ops.config import Diffusion
from ops.models.base.config import DiTConfig
from ops.models.base.flops import ForwardFlops, joint_flops
from ops.ranges import above, between, check_numbers

_VAE_SCALE = 0.7  # scaling_factor of the autoencoder of CogVideoX 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class CogVideoXConfig(DiTConfig):
    """CogVideoX 2B, 5B and 1.5, text to video and image to video, trained by diffusion. 1.5 has patches of two latent
    frames.

    Sinusoids of times are as wide as the model whatever `freq_dim` says.
    """

    architecture: Literal["cogvideox"] = "cogvideox"
    eps: float = 1e-5
    time_dim: int = 512  # width of the time embedding
    rotary: bool = True  # positions turn queries and keys (5B, 1.5); else they are added to the tokens (2B)
    spatial_scale: float = 1.875  # 2B: divides the positions in height and width
    sample_size: tuple[int, int] = (60, 90)  # 5B: latents (height, width) to whose positions other sizes are scaled
    sample_frames: int = 49  # 5B I2V: frames of a clip for which it has learned places
    text_rows: int = 226  # 2B, 5B I2V: rows of text that Diffusers' class takes, no more and no less
    # 5B I2V: every token of a clip of `sample_size` and `sample_frames` has a place kept with the weights; other clips
    # have sinusoids instead
    learned_positions: bool = False
    # channels: the latent of the first frame, then zeros, are joined to the noisy latent
    first_frame: Literal["none", "channels"] = "none"
    ofs_dim: int = 0  # 1.5 I2V: width of an embedding of a constant, beside that of the time; 0: none
    snr_shift: float = 1.0  # divides the signal-to-noise ratio of the diffusion; 3 for 2B

    def __post_init__(self) -> None:
        DiTConfig.__post_init__(self)
        check_numbers(
            "model.dit",
            self,
            time_dim=between(1, 1 << 16),
            spatial_scale=above(0, 1000),
            sample_size=between(1, 1 << 16),
            sample_frames=between(1, 1 << 16),
            ofs_dim=between(0, 1 << 16),
            text_rows=between(1, 1 << 16),
            snr_shift=above(0, 1000),
        )
        if self.patch not in ((1, 2, 2), (2, 2, 2)):
            raise ValueError(
                f"model.dit.patch {self.patch}: CogVideoX's tokens are [1, 2, 2] latents, those of 1.5 [2, 2, 2]."
            )
        if self.ofs_dim not in (0, self.time_dim):
            raise ValueError(
                f"model.dit.ofs_dim {self.ofs_dim} is added to the time embedding, of width {self.time_dim}. Set it to "
                f"that, or to 0."
            )
        if self.learned_positions and not (self.rotary and self.patch[0] == 1):
            raise ValueError("model.dit.learned_positions are of CogVideoX-5B-I2V: rotary, with patches of one frame.")
        if self.rotary and self.head_dim % 16:
            raise ValueError(f"model.dit.head_dim {self.head_dim} is not a multiple of 16, as RoPE of CogVideoX needs.")
        if not self.rotary and self.dim % 16:
            raise ValueError(f"the width {self.dim} is not a multiple of 16, as added positions of CogVideoX need.")
        if self.ffn_dim != 4 * self.dim:
            raise ValueError(
                f"model.dit.ffn_dim {self.ffn_dim} is not 4 times the width {self.dim}, as CogVideoX has it."
            )

    @property
    def flops(self) -> ForwardFlops:
        return joint_flops(sum(self.block_counts), self.dim, self.ffn_dim)

    @property
    def rope_split(self) -> tuple[int, int, int]:
        return self.head_dim // 4, self.head_dim // 8 * 3, self.head_dim // 8 * 3

    @property
    def kept_grid(self) -> tuple[int, int, int]:
        """Tokens (t, h, w) of the clips for which it has learned places."""
        height, width = (size // part for size, part in zip(self.sample_size, self.patch[1:]))
        return (self.sample_frames - 1) // 4 + 1, height, width

    @property
    def starts_from_image(self) -> bool:
        return self.first_frame != "none"

    @property
    def encodes_frame_alone(self) -> bool:
        return self.first_frame != "none"

    @property
    def condition_scale(self) -> float:
        """1.5 was trained with first frames that were divided by the autoencoder's factor instead of multiplied
        (`invert_scale_latents` there)."""
        return _VAE_SCALE**-2 if self.first_frame != "none" and self.patch[0] > 1 else 1.0

    def fitted(self, channels: int, stride: tuple[int, int, int], text_dim: int, image_dim: int) -> Self:
        """See the base. Published image-to-video weights: 16 noisy channels, 16 of the condition."""
        fitted = DiTConfig.fitted(self, channels, stride, text_dim, image_dim)
        return replace(fitted, in_channels=2 * channels) if self.first_frame == "channels" else fitted

    @property
    def diffusion(self) -> Diffusion:
        return Diffusion(snr_shift=self.snr_shift)
