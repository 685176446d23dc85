"""What the settings say of a spatial-temporal schedule. Imports neither torch nor NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ops.spatial_temporal.schedule import Schedule

Auto = Literal["auto"]
SLICES = (1, 2, 3, 4, 6, 8)  # that `auto` tries; the paper looks at 2 to 8 (Fig. 10, 11)
MOST = 64  # slices that may be asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Slicing:
    """What the settings say of a schedule: numbers, or `auto`. See `Schedule`."""

    temporal_slices: int | Auto = "auto"
    spatial_slices: int | Auto = "auto"
    temporal_lead: int | Auto = "auto"
    spatial_lead: int | Auto = "auto"

    def __post_init__(self) -> None:
        for axis in ("temporal", "spatial"):
            slices, lead = getattr(self, f"{axis}_slices"), getattr(self, f"{axis}_lead")
            most = max(SLICES) if slices == "auto" else slices
            if slices != "auto" and not 1 <= slices <= MOST:
                raise ValueError(f"{axis}_slices is {slices}; give a number from 1 to {MOST}, or auto.")
            if lead != "auto" and not 0 <= lead <= most:
                raise ValueError(
                    f"{axis}_lead {lead} of {axis}_slices {slices}: a lead lies in 0..{axis}_slices, of at most "
                    f"{most} here. Give a smaller one, or auto."
                )

    @property
    def fixed(self) -> bool:
        """Whether nothing is `auto`."""
        return "auto" not in (self.temporal_slices, self.spatial_slices, self.temporal_lead, self.spatial_lead)

    def usual(self) -> Schedule:
        """The schedule with the paper's numbers in place of every `auto`, as far as those that are given allow."""
        usual = Schedule()
        slices, leads = {}, {}
        for axis in ("temporal", "spatial"):
            count, lead = getattr(self, f"{axis}_slices"), getattr(self, f"{axis}_lead")
            count = max(getattr(usual, f"{axis}_slices"), 0 if lead == "auto" else lead) if count == "auto" else count
            slices[f"{axis}_slices"] = count
            leads[f"{axis}_lead"] = min(getattr(usual, f"{axis}_lead"), count) if lead == "auto" else lead
        return Schedule(**slices, **leads)


AUTO = Slicing()
WHOLE_LAYERS = Slicing(temporal_slices=1, spatial_slices=1, temporal_lead=0, spatial_lead=0)
