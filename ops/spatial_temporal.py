"""Spatial-temporal transformers over a bag with the all-to-all hidden behind compute (ScaleFusion, inference).

B samples, T frames, S positions of a frame, C width, P ranks. Spatial layers attend over S within a frame, temporal
layers over T at a position; between them the activations change from (all T, own S) to (own T, all S) and back.
Frames are independent in a spatial layer and positions in a temporal one, so both run slice by slice, exactly:

    schedule = Schedule(temporal_slices=4, spatial_slices=4, temporal_lead=1, spatial_lead=3)
    grid = Grid(frames=T, positions=S, schedule=schedule, degree=group.size, rank=group.rank)
    own = torch.cat([x[:, :, rows] for rows in grid.positions_of_slices], dim=2)        # [B, T, s, C]
    own = run_layers(own, [(spatial_0, temporal_0), (spatial_1, temporal_1), ...], grid, group)

- inside a layer, the exchange of the next slices runs while a slice computes;
- between layers, `lead` slices of the next layer get their part as soon as a slice of this layer is done, so the next
  layer's first slice waits for one part instead of all.
Neither T nor S needs to be a multiple of anything; slices and chunks may be empty. The degree is not bound to the
number of heads. (Algorithm 1 of the paper, whose loops over the remaining parts skip some blocks as printed: after a
lead of L target slices, all parts of the other target slices remain.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ops.comm import Group, Pending
from ops.packing import chunk_bounds

# (block [B, t, S, C] or [B, T, s, C], the frames or positions of the block [t] or [s]) -> a block of the same shape.
# A spatial layer must treat each frame by itself, a temporal one each position.
Layer = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How finely layers are sliced and how early the next layer's exchange begins; the paper's defaults."""

    temporal_slices: int = 4  # N_T: slices of T, in which spatial layers run
    spatial_slices: int = 4  # N_S: slices of S, in which temporal layers run
    temporal_lead: int = 1  # L_T: slices of a spatial layer that get their parts under the layer before
    spatial_lead: int = 3  # L_S: the same of a temporal layer

    def __post_init__(self) -> None:
        for name, lead, slices in (
            ("temporal", self.temporal_lead, self.temporal_slices),
            ("spatial", self.spatial_lead, self.spatial_slices),
        ):
            if not (slices >= 1 and 0 <= lead <= slices):
                raise ValueError(
                    f"{name}_lead {lead} of {name}_slices {slices}: a lead lies in 0..{name}_slices, and "
                    f"there is at least one slice."
                )


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

    def part(self, axis: str, index: int) -> slice:
        """The index-th slice of T ("temporal") or S ("spatial")."""
        full, count = self._axis(axis)
        return slice(*chunk_bounds(full, count, index))

    def chunk(self, axis: str, index: int, rank: int) -> slice:
        """What `rank` holds of the index-th slice. The longer chunks rotate from slice to slice."""
        whole = self.part(axis, index)
        low, high = chunk_bounds(whole.stop - whole.start, self.degree, rank, index)
        return slice(whole.start + low, whole.start + high)

    def _axis(self, axis: str) -> tuple[int, int]:
        if axis == "temporal":
            return self.frames, self.schedule.temporal_slices
        return self.positions, self.schedule.spatial_slices


@torch.no_grad()
def run_layers(x: Tensor, layers: Sequence[tuple[Layer, Layer]], grid: Grid, group: Group) -> Tensor:
    """x [B, T, s, C] (all frames, own positions in the order of grid.positions_of_slices) through pairs of a spatial
    and a temporal layer; the same shape back. Collective: all ranks of the group call it alike. Inference only."""
    own = sum(_size(rows) for rows in grid.positions_of_slices)
    if x.shape[1:3] != (grid.frames, own):
        raise ValueError(
            f"activations {tuple(x.shape)} do not fit {grid.frames} frames and {own} of {grid.positions} "
            f"positions on rank {grid.rank} of {grid.degree}."
        )
    if (group.size, group.rank) != (grid.degree, grid.rank):
        raise ValueError(
            f"the grid is for rank {grid.rank} of {grid.degree}, the group is rank {group.rank} of {group.size}."
        )
    if not layers:
        return x
    to_spatial, to_temporal = _Switch(grid, group, "temporal"), _Switch(grid, group, "spatial")
    sources = list(x.split([_size(rows) for rows in grid.positions_of_slices], dim=2))
    for index, source in enumerate(sources):
        to_spatial.lead(index, source)
    for number, (spatial, temporal) in enumerate(layers):
        sources = to_spatial.run(spatial, sources, then=to_temporal)
        last = number == len(layers) - 1
        sources = to_temporal.run(temporal, sources, then=None if last else to_spatial)
    return torch.cat(sources, dim=2)


class _Switch:
    """Exchanges into the layout in which `target` is sliced and owned in chunks and the other axis is whole."""

    def __init__(self, grid: Grid, group: Group, target: str) -> None:
        schedule = grid.schedule
        self.grid, self.group, self.target = grid, group, target
        self.source = "spatial" if target == "temporal" else "temporal"
        counts = {"temporal": schedule.temporal_slices, "spatial": schedule.spatial_slices}
        leads = {"temporal": schedule.temporal_lead, "spatial": schedule.spatial_lead}
        self.num_targets, self.num_sources, self.lead_count = counts[target], counts[self.source], leads[target]
        self.whole_dim = 2 if target == "temporal" else 1  # dimension that becomes whole
        self.cut_dim = 3 - self.whole_dim
        self.parts: dict[tuple[int, int], tuple[Pending, Tensor, Tensor, list[int]]] = {}

    def lead(self, source: int, block: Tensor) -> None:
        """A slice of the layer before is done: send its parts of the first target slices."""
        for target in range(self.lead_count):
            self._launch(target, source, block)

    def run(self, layer: Layer, sources: list[Tensor], then: _Switch | None) -> list[Tensor]:
        """The layer, slice by slice; `sources` are the slices of the layer before, `then` the switch after."""
        for target in range(self.lead_count, self.num_targets):
            for source, block in enumerate(sources):
                self._launch(target, source, block)
        results = []
        for target in range(self.num_targets):
            block = torch.cat([self._wait(target, source) for source in range(self.num_sources)], dim=self.whole_dim)
            own = self.grid.chunk(self.target, target, self.grid.rank)
            if _size(own):
                block = layer(block, torch.arange(own.start, own.stop, device=block.device))
            results.append(block)
            if then is not None:
                then.lead(target, block)
        return results

    def _launch(self, target: int, source: int, block: Tensor) -> None:
        """Starts the exchange of one (target slice, source slice) block; rows are (cut, whole) pairs of [B, C]."""
        ranks, mine = range(self.grid.degree), self.grid.rank
        chunks = [self.grid.chunk(self.target, target, rank) for rank in ranks]
        cut = block.movedim(0, 2) if self.cut_dim == 1 else block.permute(2, 1, 0, 3)  # [cut, own source, B, C]
        low, high = chunks[0].start, chunks[-1].stop  # chunks of a slice lie one after the other
        sent = cut[low:high].flatten(0, 1).contiguous()
        width = block.shape[self.whole_dim]
        own = _size(chunks[mine])
        widths = [_size(self.grid.chunk(self.source, source, rank)) for rank in ranks]
        received = sent.new_empty(own * sum(widths), *sent.shape[1:])
        pending = self.group.all_to_all_async(
            received, sent, [own * w for w in widths], [_size(chunk) * width for chunk in chunks]
        )
        self.parts[target, source] = (pending, received, sent, widths)  # `sent` lives until the exchange ends

    def _wait(self, target: int, source: int) -> Tensor:
        """[B, t, S_source, C] or [B, T_source, s, C] of one block."""
        pending, received, _, widths = self.parts.pop((target, source))
        pending.wait()
        own = _size(self.grid.chunk(self.target, target, self.grid.rank))
        pieces = received.split([own * w for w in widths])
        rows = torch.cat([piece.unflatten(0, (own, w)) for piece, w in zip(pieces, widths)], dim=1)  # [own, all, B, C]
        return rows.movedim(2, 0) if self.cut_dim == 1 else rows.permute(2, 1, 0, 3)


def _size(rows: slice) -> int:
    size: int = rows.stop - rows.start
    return size
