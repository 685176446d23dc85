"""Settings of SkyReels-V2's transformer. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from ops.models.wan.config import WanBlocksConfig
from ops.ranges import above, check_numbers

if TYPE_CHECKING:
    from ops.models.base.family import Json

FORCING = "DiffusionForcing"  # in the names of pipelines whose weights know a noise level for each latent frame
RATES = (16.0, 24.0)  # frames per second with an embedding


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyReelsConfig(WanBlocksConfig):
    """SkyReels-V2: Wan2.1's blocks, of which the weights for diffusion forcing (DF) know a noise level for each latent
    frame. Text to video, DF, and image to video."""

    architecture: Literal["skyreels"] = "skyreels"
    # DF weights: an export names their pipeline, and a run goes on from them by train.flow.frame_levels. A folder's own
    # pipeline counts
    diffusion_forcing: bool = False
    # the weights take the frame rate, as those of DF-1.3B: an embedding for 16 frames per second and one for 24. Other
    # rates count as the nearer of the two
    sample_info: bool = False
    frame_rate: float = 24.0  # with sample_info: of samples, and of clips by data.fps; where that is 0 each has its own

    def __post_init__(self) -> None:
        WanBlocksConfig.__post_init__(self)
        check_numbers("model.dit", self, frame_rate=above(0, 1000))
        if self.diffusion_forcing and self.first_frame != "none":
            raise ValueError(
                f"model.dit.diffusion_forcing is true, and first_frame {self.first_frame} is of weights with one noise "
                f"level for all of a clip. Set one of the two as it is without."
            )

    @property
    def clip_rate(self) -> float | None:
        return self.frame_rate if self.sample_info else None

    def at_rate(self, frame_rate: float) -> Self:
        return replace(self, frame_rate=frame_rate) if self.sample_info else self

    def of_pipeline(self, index: Json) -> Self:
        forcing = self.diffusion_forcing or FORCING in str(index.get("_class_name"))
        return replace(self, diffusion_forcing=forcing and self.first_frame == "none")
