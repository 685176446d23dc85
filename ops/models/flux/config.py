"""Settings of FLUX.1's transformer. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ops.models.base.joint_config import JointDiTConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxConfig(JointDiTConfig):
    """FLUX.1, text to image: dev with `guidance_embeds`, schnell without. Pictures are clips of one frame."""

    architecture: Literal["flux"] = "flux"

    def __post_init__(self) -> None:
        JointDiTConfig.__post_init__(self)
        if self.patch != (1, 2, 2):
            raise ValueError(f"model.dit.patch {self.patch}: FLUX.1's tokens are 2x2 latents. Use [1, 2, 2].")
        if self.ffn_dim != 4 * self.dim:
            raise ValueError(f"model.dit.ffn_dim {self.ffn_dim} is not 4 times the width {self.dim}, as FLUX.1 has it.")
        if self.rope_theta != 10000:
            raise ValueError(f"model.dit.rope_theta {self.rope_theta:g}: FLUX.1's is 10000. Leave it out.")

    @property
    def images_only(self) -> bool:
        return True
