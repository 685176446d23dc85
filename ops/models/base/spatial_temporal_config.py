"""Settings of transformers with spatial and temporal blocks in turn. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ops.models.base.config import DiTConfig
from ops.spatial_temporal.slicing import Slicing


@dataclass(frozen=True, kw_only=True, slots=True)
class SpatialTemporalDiTConfig(DiTConfig):
    """`num_layers` spatial blocks and as many temporal ones, in turn (Latte, STDiT3).

    A base, as `DiTConfig` is. A bag runs them by spatial-temporal parallelism (ops/spatial_temporal/), sliced as the
    settings say, or by Ulysses, to compare the two; results are the same. Sinusoids of times have 256 numbers whatever
    `freq_dim` says.
    """

    bag_mode: Literal["sliced", "ulysses"] = "sliced"  # what a bag deals out: frames and positions, or attention heads
    # into how many slices a bag cuts the frames when it runs spatial blocks. auto, here and in the three below: by what
    # computation and exchanges cost, for each grid of latents and each degree
    temporal_slices: int | Literal["auto"] = "auto"
    # into how many it cuts the positions of a frame when it runs temporal blocks
    spatial_slices: int | Literal["auto"] = "auto"
    # how many slices of the next spatial block are sent while the block before it computes; at most temporal_slices
    temporal_lead: int | Literal["auto"] = "auto"
    spatial_lead: int | Literal["auto"] = "auto"  # the same of the next temporal block; at most spatial_slices

    def __post_init__(self) -> None:
        DiTConfig.__post_init__(self)
        name = self.architecture
        if self.patch[0] != 1 or self.patch[1] != self.patch[2]:
            raise ValueError(f"model.dit.patch {self.patch}: tokens of {name} are squares of one frame, as [1, 2, 2].")
        if self.dim % 4:
            raise ValueError(f"the width {self.dim} is not a multiple of 4, as positions of {name} need.")
        if self.ffn_dim != 4 * self.dim:
            raise ValueError(f"model.dit.ffn_dim {self.ffn_dim} is not 4 times the width {self.dim}, as in {name}.")
        try:
            self._slicing()
        except ValueError as error:
            raise ValueError(f"model.dit: {error}") from None

    @property
    def spatial_temporal(self) -> bool:
        return True

    @property
    def slicing(self) -> Slicing | None:
        return None if self.bag_mode == "ulysses" else self._slicing()

    def _slicing(self) -> Slicing:
        """Raises ValueError for numbers that are no schedule."""
        return Slicing(
            temporal_slices=self.temporal_slices,
            spatial_slices=self.spatial_slices,
            temporal_lead=self.temporal_lead,
            spatial_lead=self.spatial_lead,
        )

    @property
    def block_counts(self) -> tuple[int, ...]:
        return (2 * self.num_layers,)
