"""What a schedule takes on given hardware, event by event, and the schedule that takes least. No torch, no Ray.

Every rank computes one slice at a time; all ranks share one link, which carries one part at a time in the order in
which parts are sent, each from the moment the last rank has sent it. Parts and slices take times in proportion to what
they hold, and something fixed. With slices longer than their parts this gives what the paper counts: exposed
communication Comm in DSP, Comm / N within layers, Comm / (N_T N_S) across them (ScaleFusion 4.3, 4.4); in addition it
has jagged slices, ranks without rows, links slower than computation, and the cost of slicing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal

import numpy as np

from ops.spatial_temporal.schedule import (
    DSP,
    Grid,
    Schedule,
    SendPart,
    axis_of,
    backward_program,
    forward_program,
    length_of,
)
from ops.spatial_temporal.slicing import SLICES

Direction = Literal["forward", "backward"]
PAIRS = 3  # of layers, enough for a steady state


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """Seconds of one pair of layers. Whole layers of one device; exchanges at the degree in question."""

    spatial_s: float  # forward of a spatial layer over all frames on one device
    temporal_s: float  # of a temporal layer over all positions
    exchange_s: float  # on the link: one change of layout of all activations, without what is fixed per part
    slice_s: float = 0.0  # fixed, per slice that a rank computes
    part_s: float = 0.0  # fixed, per part
    backward: float = 2.0  # the backward of a slice relative to its forward

    def __post_init__(self) -> None:
        for name in ("spatial_s", "temporal_s", "exchange_s", "slice_s", "part_s", "backward"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; a cost is at least 0.")

    def compute_s(self, layer: int) -> float:
        return self.temporal_s if layer % 2 else self.spatial_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Seconds of a stack of layers."""

    total_s: float
    compute_s: float  # of the rank that computes longest
    link_s: float  # all parts, hidden or not

    @property
    def exposed_s(self) -> float:
        """Communication that no computation hides; waiting for slower ranks counts as such."""
        return self.total_s - self.compute_s

    @property
    def hidden(self) -> float:
        """Share of the communication that is hidden, 0 to 1; 1 where there is none."""
        return max(0.0, 1 - self.exposed_s / self.link_s) if self.link_s else 1.0


@lru_cache(maxsize=4096)
def simulate(
    frames: int,
    positions: int,
    degree: int,
    schedule: Schedule,
    costs: LayerCosts,
    pairs: int = PAIRS,
    direction: Direction = "forward",
) -> Forecast:
    """A stack of `pairs` spatial and temporal layers over T frames and S positions on `degree` ranks."""
    back = direction == "backward"
    grid = Grid(frames=frames, positions=positions, schedule=schedule, degree=degree, rank=0)
    factor = costs.backward if back else 1.0
    slice_s = [[factor * seconds for seconds in _slice_seconds(grid, parity, costs)] for parity in (0, 1)]
    part_s = [_part_seconds(grid, parity, costs) for parity in (0, 1)]
    clock, busy = np.zeros(degree), np.zeros(degree)
    latest = link_free = link_s = 0.0
    arrived: dict[tuple[int, int], float] = {}  # (layer, slice) whose parts have been sent -> when the last is there
    for step in (backward_program if back else forward_program)(schedule, 2 * pairs):
        if isinstance(step, SendPart):
            seconds = part_s[step.layer % 2][step.target][step.source]
            if seconds:
                link_free = max(link_free, latest) + seconds
                link_s += seconds
                goal = (step.layer - 1, step.source) if back else (step.layer, step.target)
                arrived[goal] = link_free
        else:
            seconds_of_ranks = slice_s[step.layer % 2][step.index]
            clock = np.maximum(clock, arrived.get((step.layer, step.index), 0.0)) + seconds_of_ranks
            busy += seconds_of_ranks
            latest = float(clock.max())
    total = max(latest, link_free) if back else latest  # the gradients of the stack's input travel, too
    return Forecast(total_s=total, compute_s=float(busy.max()), link_s=link_s)


def _part_seconds(grid: Grid, layer: int, costs: LayerCosts) -> list[list[float]]:
    """[target][source] on the link; 0 for what is not sent."""
    axis, other = axis_of(layer), axis_of(layer + 1)
    targets, sources = (
        [length_of(grid.part(one, index)) for index in range(grid.schedule.slices(one))] for one in (axis, other)
    )
    whole = grid.frames * grid.positions
    return [
        [costs.part_s + costs.exchange_s * t * s / whole if t * s and grid.degree > 1 else 0.0 for s in sources]
        for t in targets
    ]


def _slice_seconds(grid: Grid, layer: int, costs: LayerCosts) -> list[np.ndarray]:
    """Seconds of every slice, forward, for every rank."""
    axis = axis_of(layer)
    full = grid.frames if axis == "temporal" else grid.positions
    rows = [
        np.array([length_of(chunk) for chunk in grid.chunks(axis, index)])
        for index in range(grid.schedule.slices(axis))
    ]
    return [own / full * costs.compute_s(layer) + np.where(own > 0, costs.slice_s, 0.0) for own in rows]


def ulysses_forecast(height: int, degree: int, heads: int, costs: LayerCosts, pairs: int = PAIRS) -> Forecast | None:
    """Forward with Ulysses as Open-Sora 1.2 runs it (its stdit3.py and blocks.py): each rank has some of the `height`
    rows of positions of all frames, which are padded until the degree divides them. A spatial layer exchanges q, k and
    v before attention and its result afterwards, then the q of its attention to the text and the result of that, six
    times the activations in four messages; a temporal layer nothing. None where the degree does not divide the heads.
    """
    if heads % degree:
        return None
    padded = degree * -(-height // degree) / height
    compute = pairs * (padded / degree * (costs.spatial_s + costs.temporal_s) + 2 * costs.slice_s)
    link = pairs * (6 * padded * costs.exchange_s + 4 * costs.part_s) if degree > 1 else 0.0
    return Forecast(total_s=compute + link, compute_s=compute, link_s=link)


@lru_cache(maxsize=1024)
def best_schedule(
    frames: int,
    positions: int,
    degree: int,
    costs: LayerCosts,
    training: bool = False,
    slices: tuple[int, ...] = SLICES,
) -> Schedule:
    """The schedule with the shortest simulated forward (and backward, in training). Among equals the one with the
    fewest parts: what the simulation leaves out grows with their number."""
    if degree == 1:
        return DSP

    def seconds(schedule: Schedule) -> float:
        forward = simulate(frames, positions, degree, schedule, costs)
        back = simulate(frames, positions, degree, schedule, costs, direction="backward") if training else None
        return forward.total_s + (back.total_s if back else 0.0)

    best, shortest = DSP, seconds(DSP)
    counts = sorted(product(slices, slices), key=lambda n: n[0] * n[1])
    for temporal, spatial in counts:
        if temporal > frames or spatial > positions:
            continue
        floor = _least_seconds(frames, positions, degree, (temporal, spatial), costs)
        if floor * (1 + costs.backward if training else 1) >= shortest:
            continue  # computing alone takes as long
        for temporal_lead, spatial_lead in product(leads_tried(temporal), leads_tried(spatial)):
            schedule = Schedule(
                temporal_slices=temporal,
                spatial_slices=spatial,
                temporal_lead=temporal_lead,
                spatial_lead=spatial_lead,
            )
            if (found := seconds(schedule)) < shortest * (1 - 1e-9):
                best, shortest = schedule, found
    return best


def leads_tried(slices: int) -> tuple[int, ...]:
    """No lead, the first slice, all but the last, all."""
    return tuple(sorted({0, min(1, slices), slices - 1, slices}))


def _least_seconds(frames: int, positions: int, degree: int, slices: tuple[int, int], costs: LayerCosts) -> float:
    """Computation of a rank, as if slices were as even as can be."""
    rows = (-(-frames // degree) / frames * costs.spatial_s, -(-positions // degree) / positions * costs.temporal_s)
    run = [min(count, max(1, whole // degree)) for count, whole in zip(slices, (frames, positions))]
    return PAIRS * (sum(rows) + sum(run) * costs.slice_s)
