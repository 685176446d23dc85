"""What `auto` chooses on small grids beside the simulator's best of a sweep, by how slow the link is.

A pair of layers takes one second of a rank, divided as at 1080p; what is fixed per slice and per part are shares of
that, as small clips on small devices have them. `time` is the chosen schedule's over the best one's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ops.spatial_temporal.choice import choose
from ops.spatial_temporal.schedule import DSP, Schedule
from ops.spatial_temporal.simulate import LayerCosts, best_schedule, simulate

GRIDS = ((3, 24), (5, 60), (8, 96), (16, 64), (16, 400))  # T, S
DEGREES = (2, 3, 4)
LINKS = (0.1, 0.5, 1.0, 2.0)  # seconds of a pair's two exchanges, of one rank's computation
SPATIAL = 0.6
SLICE, PART = 0.005, 0.002  # of a pair's computation


@dataclass(frozen=True, kw_only=True, slots=True)
class GridChoice:
    """One grid on one bag with one link: what is chosen, what is best, and their simulated seconds of a training pass
    (forward and backward)."""

    frames: int
    positions: int
    degree: int
    link: float
    auto: Schedule
    best: Schedule
    auto_s: float
    best_s: float
    dsp_s: float

    @property
    def off(self) -> float:
        """Time of the chosen schedule over that of the best."""
        return self.auto_s / self.best_s


def small_grids() -> Iterator[GridChoice]:
    """All of them. The simulator's sweep takes seconds for each."""
    for (frames, positions), degree, link in product(GRIDS, DEGREES, LINKS):
        costs = LayerCosts(
            spatial_s=SPATIAL * degree,
            temporal_s=(1 - SPATIAL) * degree,
            exchange_s=link / 2,
            slice_s=SLICE,
            part_s=PART,
        )
        auto = choose(frames, positions, degree, costs, True).schedule
        best = best_schedule(frames, positions, degree, costs, training=True)
        auto_s, best_s, dsp_s = (trained_seconds(frames, positions, degree, one, costs) for one in (auto, best, DSP))
        yield GridChoice(
            frames=frames,
            positions=positions,
            degree=degree,
            link=link,
            auto=auto,
            best=best,
            auto_s=auto_s,
            best_s=best_s,
            dsp_s=dsp_s,
        )


def trained_seconds(frames: int, positions: int, degree: int, schedule: Schedule, costs: LayerCosts) -> float:
    """Simulated forward and backward."""
    forward, backward = (
        simulate(frames, positions, degree, schedule, costs, direction=way).total_s for way in ("forward", "backward")
    )
    return forward + backward
