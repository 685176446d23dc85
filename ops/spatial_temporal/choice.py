"""Which schedule a bag takes: numbers that the settings give, or the cheapest by a cost model. No torch, no Ray.

The model is the paper's (ScaleFusion 4.3, 4.4) in closed form, layer by layer: a layer's first slice waits for Comm / N
of its exchange, with a lead for Comm / (N_T N_S), plus what the layer before could not hide of the lead; a later slice
waits where its parts take longer than the slices before it. Every slice and every part has something fixed, which is
what speaks against many of them. `simulate.py` is what it is measured by: `heddle bench scalefusion` shows both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from ops.spatial_temporal.schedule import Schedule
from ops.spatial_temporal.simulate import LayerCosts, leads_tried
from ops.spatial_temporal.slicing import AUTO, SLICES, Auto, Slicing

_WORTH = 0.01  # share of the time that a finer schedule must save: the model is not truer than that


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenSchedule:
    """A schedule, and seconds of a pair of layers by the cost model: forward and, in training, backward."""

    schedule: Schedule
    total_s: float
    compute_s: float  # of the rank with most rows, with what slices cost
    link_s: float  # of all its exchanges without what parts cost: as if each were one

    @property
    def exposed_s(self) -> float:
        return self.total_s - self.compute_s

    @property
    def exposed(self) -> float:
        """The same as a share of the seconds on the link: 1 as in DSP, more where parts are mostly what is fixed."""
        return self.exposed_s / self.link_s if self.link_s else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceRates:
    """What a transformer's blocks and exchanges take on the workers of a run, by its profile. Made with a plan, which
    brings it to every rank of a bag: all choose by the same numbers."""

    row_s: float  # forward of a block on one device, per row without its attention
    key_s: float  # per row and key that it attends to
    moved_s: float  # one change of layout on one device's link, per row that it sends
    slice_s: float  # fixed, per slice that a rank computes
    part_s: float  # fixed, per exchange
    backward: float  # of a block, relative to its forward
    temporal_text: float = 0.0  # share of the text that temporal blocks attend to, as spatial ones do to all of it

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; a cost is at least 0.")

    def rounded(self) -> SliceRates:
        """To two digits: what a run learns from step to step then rarely changes a choice."""
        return SliceRates(**{name: float(f"{getattr(self, name):.1e}") for name in self.__dataclass_fields__})

    def layer_costs(self, frames: int, positions: int, samples: int, text_rows: int, degree: int) -> LayerCosts:
        """Costs of the layers on a bag, for a stack of samples of one grid, each with `text_rows` rows of text."""
        rows = samples * frames * positions
        return LayerCosts(
            spatial_s=rows * (self.row_s + self.key_s * (positions + text_rows)),
            temporal_s=rows * (self.row_s + self.key_s * (frames + self.temporal_text * text_rows)),
            exchange_s=self.moved_s * rows * (degree - 1) / degree**2,
            slice_s=self.slice_s,
            part_s=self.part_s,
            backward=self.backward,
        )


WHOLE = SliceRates(row_s=1.0, key_s=0.0, moved_s=0.0, slice_s=1.0, part_s=1.0, backward=2.0)
"""Rates by which `auto` slices nothing, which takes the most memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicingRule:
    """How each stack of a pack is sliced. Without rates, where nobody knows what anything costs, `auto` is the paper's
    choice."""

    slicing: Slicing
    rates: SliceRates | None = None
    training: bool = False

    def stack(self, frames: int, positions: int, samples: int, text_rows: int, degree: int) -> Schedule:
        """The schedule for `samples` samples of one grid with a mean of `text_rows` rows of text."""
        if self.rates is None or self.slicing.fixed:
            return self.slicing.usual()
        costs = self.rates.layer_costs(frames, positions, samples, text_rows, degree)
        return choose(frames, positions, degree, costs, self.training, self.slicing).schedule


@lru_cache(maxsize=4096)
def choose(
    frames: int, positions: int, degree: int, costs: LayerCosts, training: bool, slicing: Slicing = AUTO
) -> ChosenSchedule:
    """The schedule for T frames and S positions on `degree` ranks: a pure function, so that all ranks of a bag take the
    same one. Among schedules within a hundredth of the shortest the one with the fewest parts."""
    own_T, own_S = -(-frames // degree), -(-positions // degree)  # of the rank with most
    slices_T, slices_S, lead_T, lead_S = _candidates(slicing, _most(frames, own_T), _most(positions, own_S))
    total, compute, link = np.zeros(len(slices_T)), np.zeros(len(slices_T)), 0.0
    exchange_s, part_s = (costs.exchange_s, costs.part_s) if degree > 1 else (0.0, 0.0)
    for factor in (1.0, costs.backward) if training else (1.0,):
        spatial_s = factor * (costs.spatial_s * own_T / frames + np.minimum(slices_T, own_T) * costs.slice_s)
        temporal_s = factor * (costs.temporal_s * own_S / positions + np.minimum(slices_S, own_S) * costs.slice_s)
        slice_T, slice_S = spatial_s / slices_T, temporal_s / slices_S
        part = exchange_s / (slices_T * slices_S) + part_s
        layers = _layer_s(slices_T, slices_S, lead_T, slice_T, slice_S, spatial_s / own_T, part)
        layers = layers + _layer_s(slices_S, slices_T, lead_S, slice_S, slice_T, temporal_s / own_S, part)
        total += np.maximum(layers, 2 * slices_T * slices_S * part)
        compute += spatial_s + temporal_s
        link += 2 * exchange_s
    cheap = np.flatnonzero(total <= (1 + _WORTH) * total.min())
    best = cheap[np.argmin((slices_T * slices_S)[cheap] + 1e-6 * total[cheap] / total.max())]
    schedule = Schedule(
        temporal_slices=int(slices_T[best]),
        spatial_slices=int(slices_S[best]),
        temporal_lead=int(lead_T[best]),
        spatial_lead=int(lead_S[best]),
    )
    return ChosenSchedule(schedule=schedule, total_s=float(total[best]), compute_s=float(compute[best]), link_s=link)


def _layer_s(
    slices: np.ndarray,
    before: np.ndarray,
    lead: np.ndarray,
    slice_s: np.ndarray,
    before_s: np.ndarray,
    row_s: np.ndarray,
    part: np.ndarray,
) -> np.ndarray:
    """Seconds of a layer of each number of slices after one of `before` slices: the latest of its slices that may
    decide, the first ones with and without lead, and the last. No slice with rows takes less than one of its rows."""
    left = (before - 1) * np.maximum(0.0, lead * part - before_s)  # of the lead, when the layer before has ended
    led = left + lead * part
    ends = [
        np.where(lead > 0, left + part, before * part) + slices * slice_s,
        np.where(lead > 0, led + np.maximum((slices - lead + 1) * slice_s, row_s), 0.0),
        np.where(lead < slices, led + before * part + (slices - lead) * slice_s, 0.0),
        np.where(lead < slices, led + (slices - lead) * before * part + np.maximum(slice_s, row_s), 0.0),
    ]
    latest: np.ndarray = np.maximum.reduce(ends)
    return latest


def _most(rows: int, own: int) -> int:
    """The most slices of `rows` rows: no more than a rank has of them, as some would wait for others in every one. With
    a row each, ranks may begin one after the other."""
    return own if own > 1 else rows


@lru_cache(maxsize=256)
def _candidates(slicing: Slicing, frames: int, positions: int) -> tuple[np.ndarray, ...]:
    """(N_T, N_S, L_T, L_S) of all schedules that the settings allow. `auto` makes no empty slices."""

    def of(slices: int | Auto, lead: int | Auto, rows: int) -> list[tuple[int, int]]:
        counts = [n for n in SLICES if n <= max(rows, 1)] if slices == "auto" else [slices]
        if slices == "auto" and lead != "auto":
            counts = [n for n in counts if n >= lead] or [max(lead, 1)]
        return [(n, one) for n in counts for one in (leads_tried(n) if lead == "auto" else (lead,))]

    both = product(
        of(slicing.temporal_slices, slicing.temporal_lead, frames),
        of(slicing.spatial_slices, slicing.spatial_lead, positions),
    )
    table = np.array([(n, m, k, l) for (n, k), (m, l) in both], dtype=float)
    return tuple(table.T)
