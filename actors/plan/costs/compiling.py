"""Whether compiled blocks are faster: cascades of the DiT measured both ways, and what `model.dit.compile: auto` takes
by them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from actors.plan.types import refuse_below, refuse_unless_positive

LEAST_GAIN = 0.03
"""Share of the seconds of all points. Compiling, in every process anew, is not worth its wait for less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilingPoint:
    """One cascade alone on a device, forward and backward, both ways: the shortest of its runs after a warm-up."""

    batch: int
    frames: int
    height: int
    width: int
    as_written_s: float
    compiled_s: float
    compiling_s: float = 0.0  # by which the first compiled run was longer than the first as written

    def __post_init__(self) -> None:
        refuse_below(1, self, "batch", "frames", "height", "width")
        refuse_unless_positive(self, "as_written_s", "compiled_s")
        refuse_below(0, self, "compiling_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class BothWays:
    """What `heddle profile` found of a model whose config says `auto`. The other points of its profile were then
    measured the faster way."""

    torch: str  # version, which decides what code is made
    points: tuple[CompilingPoint, ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("both_ways has no points; leave it out, or have heddle profile measure it (--fresh).")

    @property
    def gain(self) -> float:
        """Share of the seconds of all points that compiled blocks save; negative where they take more."""
        return 1 - sum(one.compiled_s for one in self.points) / sum(one.as_written_s for one in self.points)

    @property
    def compiled(self) -> bool:
        """What `auto` takes."""
        return self.gain >= LEAST_GAIN

    def __str__(self) -> str:
        seconds = [sum(getattr(one, name) for one in self.points) for name in ("compiled_s", "as_written_s")]
        return (
            f"{len(self.points)} cascades took {seconds[0]:.4g} s compiled and {seconds[1]:.4g} s as written, "
            f"{abs(self.gain):.1%} {'less' if self.gain > 0 else 'more'} ({LEAST_GAIN:.0%} less are asked for); "
            f"compiling took {sum(one.compiling_s for one in self.points):.0f} s"
        )
