"""Settings of Mochi's transformer. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ops.config import Spacing
from ops.models.base.config import DiTConfig
from ops.models.base.flops import ForwardFlops, joint_flops
from ops.ranges import between, check_numbers

POOL_HEADS = 8  # of the attention that pools the text, not a setting in the published code


@dataclass(frozen=True, kw_only=True, slots=True)
class MochiConfig(DiTConfig):
    """Mochi 1, text to video: text has a stream of its own, narrower than the video's.

    `ffn_dim` is 4 times the width; the gated MLP has two thirds of it three times, so as many weights. `rope_theta` is
    where frequencies begin that are drawn here: they are trained.
    """

    architecture: Literal["mochi"] = "mochi"
    context_dim: int = 64  # width of the text's stream

    def __post_init__(self) -> None:
        DiTConfig.__post_init__(self)
        check_numbers("model.dit", self, context_dim=between(1, 1 << 16))
        if self.patch[0] != 1 or self.patch[1] != self.patch[2]:
            raise ValueError(f"model.dit.patch {self.patch}: Mochi's tokens are squares of one frame, as [1, 2, 2].")
        if self.ffn_dim != 4 * self.dim:
            raise ValueError(f"model.dit.ffn_dim {self.ffn_dim} is not 4 times the width {self.dim}, as Mochi has it.")
        if self.text_dim % POOL_HEADS:
            raise ValueError(
                f"model.dit.text_dim {self.text_dim} is not a multiple of {POOL_HEADS}, the heads by which Mochi "
                f"pools the text."
            )

    @property
    def flops(self) -> ForwardFlops:
        """Text has keys, values and queries as wide as the video's, and an MLP of its own width; the last block gives
        none back, so it only has the former there."""
        own = joint_flops(self.num_layers, self.dim, self.ffn_dim)
        joined, back = 6.0 * self.context_dim * self.dim, 2.0 * self.context_dim * self.dim
        mlp = 16.0 * self.context_dim**2
        return replace(own, text=self.num_layers * joined + (self.num_layers - 1) * (back + mlp))

    @property
    def spacing(self) -> Spacing:
        return "linear_quadratic"

    @property
    def told_signal(self) -> bool:
        return True
