"""When a stack of spatial and temporal layers exchanges and computes which slice. Imports neither torch nor Ray.

A layer is cut into slices along the dimension in which it does not attend: a spatial layer along T (N_T slices), a
temporal one along S (N_S). Before slice `target` of a layer can run, a part must arrive from every slice `source` of
the layer before. Exchanges are carried out one after the other in the order in which they are sent, beside computation:

- one slice (`DSP`): everything is sent, then everything is computed, as in DSP (Zhao et al. 2024);
- intra-layer (ScaleFusion 4.3): all slices are sent at once, so slice i+1 travels while slice i computes;
- inter-layer (4.4): the parts of the first `lead` slices are sent as soon as a slice of the layer before is done, under
  its later slices; the first slice then waits for one part of N_T N_S.

The backward mirrors this: slices run from last to first, the gradients of the last `lead` slices of the layer below are
sent as soon as a slice is done, and the rest after the layer. (Algorithm 1 of the paper, whose loops over the remaining
parts skip some blocks as printed: after a lead of L slices, all parts of the other slices remain.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ops.chunks import chunk_bounds

# a slice of T, in which spatial layers run; a slice of S, in which temporal ones do
Axis = Literal["temporal", "spatial"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How finely layers are sliced and how early the next layer's exchange begins; the paper's defaults (5.1)."""

    temporal_slices: int = 4  # N_T: slices of T, in which spatial layers run
    spatial_slices: int = 4  # N_S: slices of S, in which temporal layers run
    temporal_lead: int = 1  # L_T: slices of a spatial layer that get their parts under the layer before
    spatial_lead: int = 3  # L_S: the same of a temporal layer

    def __post_init__(self) -> None:
        for axis in ("temporal", "spatial"):
            lead, slices = getattr(self, f"{axis}_lead"), getattr(self, f"{axis}_slices")
            if not (slices >= 1 and 0 <= lead <= slices):
                raise ValueError(
                    f"{axis}_lead {lead} of {axis}_slices {slices}: a lead lies in 0..{axis}_slices, and "
                    f"there is at least one slice."
                )

    def slices(self, axis: Axis) -> int:
        return self.temporal_slices if axis == "temporal" else self.spatial_slices

    def lead(self, axis: Axis) -> int:
        return self.temporal_lead if axis == "temporal" else self.spatial_lead


DSP = Schedule(temporal_slices=1, spatial_slices=1, temporal_lead=0, spatial_lead=0)


def intra(slices: int) -> Schedule:
    """The intra-layer schedule alone."""
    return Schedule(temporal_slices=slices, spatial_slices=slices, temporal_lead=0, spatial_lead=0)


@dataclass(frozen=True, slots=True)
class SendPart:
    """The part (target slice of the layer, source slice of the layer before) goes on its way; backward its gradient."""

    layer: int
    target: int
    source: int


@dataclass(frozen=True, slots=True)
class RunSlice:
    """A slice of the layer runs, once its parts are there."""

    layer: int
    index: int


Instruction = SendPart | RunSlice


def axis_of(layer: int) -> Axis:
    """Along which axis the layer is sliced: even layers are spatial, odd ones temporal."""
    return "spatial" if layer % 2 else "temporal"


def forward_program(schedule: Schedule, layers: int) -> Iterator[Instruction]:
    """What every rank does, in order. A part's source is a slice of the layer before; layer 0's are the slices of S at
    rest."""
    for source in range(schedule.spatial_slices):
        yield from (SendPart(0, target, source) for target in range(schedule.temporal_lead))
    for layer in range(layers):
        axis, other = axis_of(layer), axis_of(layer + 1)
        for target in range(schedule.lead(axis), schedule.slices(axis)):
            yield from (SendPart(layer, target, source) for source in range(schedule.slices(other)))
        for index in range(schedule.slices(axis)):
            yield RunSlice(layer, index)
            if layer + 1 < layers:
                yield from (SendPart(layer + 1, target, index) for target in range(schedule.lead(other)))


def backward_program(schedule: Schedule, layers: int) -> Iterator[Instruction]:
    """The mirror of the forward: SendPart(layer, target, source) returns that part's gradient to its source."""
    for layer in range(layers - 1, -1, -1):
        for index in range(schedule.slices(axis_of(layer)) - 1, -1, -1):
            yield RunSlice(layer, index)
            yield from (SendPart(layer, index, source) for source in returned_at_once(schedule, layer))
        yield from (SendPart(layer, target, source) for target, source in returned_later(schedule, layer))


def returned_at_once(schedule: Schedule, layer: int) -> range:
    """Sources that get the gradient of a part as soon as its slice of `layer` has been run backward, in order."""
    below = axis_of(layer + 1)
    count = schedule.slices(below)
    return range(count - 1, count - 1 - schedule.lead(below), -1)


def returned_later(schedule: Schedule, layer: int) -> list[tuple[int, int]]:
    """(target, source) of the other parts' gradients, sent when all of `layer` has been run backward, in order."""
    below = axis_of(layer + 1)
    sources = range(schedule.slices(below) - 1 - schedule.lead(below), -1, -1)
    return [(target, source) for source in sources for target in range(schedule.slices(axis_of(layer)) - 1, -1, -1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Which frames and positions every rank holds in the two layouts: slice by slice, a chunk of each slice."""

    frames: int
    positions: int
    schedule: Schedule
    degree: int
    rank: int

    @property
    def positions_of_slices(self) -> list[slice]:
        """Positions that this rank holds at rest (all T, own S), one range per slice of S."""
        return [self.chunk("spatial", index, self.rank) for index in range(self.schedule.spatial_slices)]

    def part(self, axis: Axis, index: int) -> slice:
        """The index-th slice of T ("temporal") or S ("spatial")."""
        chunks = self._table(axis)[index]
        return slice(chunks[0].start, chunks[-1].stop)

    def chunks(self, axis: Axis, index: int) -> tuple[slice, ...]:
        """What each rank holds of the index-th slice."""
        return self._table(axis)[index]

    def chunk(self, axis: Axis, index: int, rank: int) -> slice:
        """What `rank` holds of the index-th slice."""
        return self._table(axis)[index][rank]

    def _table(self, axis: Axis) -> tuple[tuple[slice, ...], ...]:
        full = self.frames if axis == "temporal" else self.positions
        return _chunk_table(full, self.schedule.slices(axis), self.degree)


@lru_cache(maxsize=256)  # read for every part of every layer
def _chunk_table(rows: int, slices: int, degree: int) -> tuple[tuple[slice, ...], ...]:
    """[slice][rank]: a chunk of every slice for every rank. The longer chunks go round from slice to slice, so slices
    that the degree does not divide give no rank more than one row above another."""
    table, dealt = [], 0
    for index in range(slices):
        low, high = chunk_bounds(rows, slices, index)
        bounds = [chunk_bounds(high - low, degree, rank, dealt % degree) for rank in range(degree)]
        table.append(tuple(slice(low + a, low + b) for a, b in bounds))
        dealt += high - low
    return tuple(table)


def length_of(rows: slice) -> int:
    """Rows in a slice without a step."""
    length: int = rows.stop - rows.start
    return length
