"""Settings of CogVideoX's transformer. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ops.config import Diffusion
from ops.models.base.config import DiTConfig
from ops.models.base.flops import ForwardFlops, joint_flops
from ops.ranges import above, between, check_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class CogVideoXConfig(DiTConfig):
    """CogVideoX 2B, 5B and 1.5, text to video, trained by diffusion. 1.5 has patches of two latent frames.

    Sinusoids of times are as wide as the model whatever `freq_dim` says.
    """

    architecture: Literal["cogvideox"] = "cogvideox"
    eps: float = 1e-5
    time_dim: int = 512  # width of the time embedding
    rotary: bool = True  # positions turn queries and keys (5B, 1.5); else they are added to the tokens (2B)
    spatial_scale: float = 1.875  # 2B: divides the positions in height and width
    sample_size: tuple[int, int] = (60, 90)  # 5B: latents (height, width) to whose positions other sizes are scaled
    text_rows: int = 226  # 2B: rows of text that Diffusers' class takes, no more and no less
    snr_shift: float = 1.0  # divides the signal-to-noise ratio of the diffusion; 3 for 2B

    def __post_init__(self) -> None:
        DiTConfig.__post_init__(self)
        check_numbers(
            "model.dit",
            self,
            time_dim=between(1, 1 << 16),
            spatial_scale=above(0, 1000),
            sample_size=between(1, 1 << 16),
            text_rows=between(1, 1 << 16),
            snr_shift=above(0, 1000),
        )
        if self.patch not in ((1, 2, 2), (2, 2, 2)):
            raise ValueError(
                f"model.dit.patch {self.patch}: CogVideoX's tokens are [1, 2, 2] latents, those of 1.5 [2, 2, 2]."
            )
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
    def diffusion(self) -> Diffusion:
        return Diffusion(snr_shift=self.snr_shift)
