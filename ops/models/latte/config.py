"""Settings of Latte's transformer. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ops.config import Diffusion
from ops.models.base.config import DiTConfig
from ops.ranges import between, check_numbers
from ops.spatial_temporal.choice import Slicing


@dataclass(frozen=True, kw_only=True, slots=True)
class LatteConfig(DiTConfig):
    """Latte-1, text to video, trained by diffusion: `num_layers` spatial blocks and as many temporal ones, in turn.

    A bag runs it by spatial-temporal parallelism (ops/spatial_temporal/), sliced as the settings say; results are the
    same for any slices. Sinusoids of times have 256 numbers whatever `freq_dim` says. `out_channels` are those of the
    predicted noise; the learned variances behind them in published weights are kept as they are and not trained.
    """

    architecture: Literal["latte"] = "latte"
    sample_size: int = 64  # latents in height and width to whose positions other sizes are scaled
    video_length: int = 16  # frames of a clip that Diffusers' class takes, no more and no less, beside pictures
    # How a bag runs the blocks, in numbers, or auto: by what computation and exchanges cost, for each grid and degree
    temporal_slices: int | Literal["auto"] = "auto"  # of the frames, in which it runs spatial blocks
    spatial_slices: int | Literal["auto"] = "auto"  # of the positions of a frame, in which it runs temporal blocks
    temporal_lead: int | Literal["auto"] = "auto"  # slices of the next spatial block that are sent under the one before
    spatial_lead: int | Literal["auto"] = "auto"  # the same of the next temporal block

    def __post_init__(self) -> None:
        DiTConfig.__post_init__(self)
        check_numbers(
            "model.dit",
            self,
            sample_size=between(2, 1 << 16),
            video_length=between(1, 1 << 16),
        )
        if self.patch[0] != 1 or self.patch[1] != self.patch[2]:
            raise ValueError(f"model.dit.patch {self.patch}: Latte's tokens are squares of one frame, as [1, 2, 2].")
        if self.dim % 4:
            raise ValueError(f"the width {self.dim} is not a multiple of 4, as Latte's positions need.")
        if self.ffn_dim != 4 * self.dim:
            raise ValueError(f"model.dit.ffn_dim {self.ffn_dim} is not 4 times the width {self.dim}, as Latte has it.")
        try:
            self.slicing  # noqa: B018  (checks the numbers)
        except ValueError as error:
            raise ValueError(f"model.dit: {error}") from None

    @property
    def slicing(self) -> Slicing:
        return Slicing(
            temporal_slices=self.temporal_slices,
            spatial_slices=self.spatial_slices,
            temporal_lead=self.temporal_lead,
            spatial_lead=self.spatial_lead,
        )

    @property
    def diffusion(self) -> Diffusion:
        return Diffusion(predicts="noise")

    @property
    def block_counts(self) -> tuple[int, ...]:
        return (2 * self.num_layers,)
