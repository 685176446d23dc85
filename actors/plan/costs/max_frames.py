"""Shapes of which a profile says that they ran out of memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from actors.plan.costs.point import PointKey
from actors.plan.types import refuse_below


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxFrames:
    """A measured limit: more than `frames` at this shape and degree run out of memory."""

    module: str
    degree: int
    height: int
    width: int
    batch: int
    frames: int

    def __post_init__(self) -> None:
        refuse_below(1, self, "degree", "height", "width", "batch")
        refuse_below(0, self, "frames")  # 0: not even pictures

    def forbids(self, key: PointKey) -> bool:
        """Whether a cascade is as large as one that ran out of memory."""
        module, batch, frames, height, width, degree = key
        return (
            self.module == module
            and self.degree >= degree
            and height * width >= self.height * self.width
            and batch >= self.batch
            and frames > self.frames
        )
