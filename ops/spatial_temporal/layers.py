"""Spatial-temporal transformers over a bag, forward and backward, with the all-to-all hidden behind compute.

B samples, T frames, S positions of a frame, C width, P ranks. Spatial layers attend over S within a frame, temporal
layers over T at a position; between them the activations change from (all T, own S) to (own T, all S) and back.
Frames are independent in a spatial layer and positions in a temporal one, so both run slice by slice, exactly:

    schedule = Schedule(temporal_slices=4, spatial_slices=4, temporal_lead=1, spatial_lead=3)
    grid = Grid(frames=T, positions=S, schedule=schedule, degree=group.size, rank=group.rank)
    own = torch.cat([x[:, :, rows] for rows in grid.positions_of_slices], dim=2)        # [B, T, s, C]
    own = run_layers(own, [spatial_0, temporal_0, spatial_1, temporal_1, ...], grid, group)

`schedule.py` says what is sent and computed when. Neither T nor S needs to be a multiple of anything; slices and chunks
may be empty. The degree is not bound to the number of heads. (ScaleFusion, sections 4.2 to 4.4; the backward is ours.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ops.comm.collectives import Group
from ops.spatial_temporal.relayout import Relayout
from ops.spatial_temporal.schedule import Grid, SendPart, axis_of, forward_program, length_of

# (block [B, t, S, C] or [B, T, s, C], the frames or positions of the block [t] or [s]) -> a block of the same shape.
# A spatial layer must treat each frame by itself, a temporal one each position.
LayerFunction = Callable[[Tensor, Tensor], Tensor]


def run_layers(x: Tensor, layers: Sequence[LayerFunction], grid: Grid, group: Group) -> Tensor:
    """x [B, T, s, C] (all frames, own positions in the order of grid.positions_of_slices) through spatial and temporal
    layers in turn, a spatial one first; the same shape back.

    Collective, forward and backward: all ranks of the group call both alike, also without rows. What autograd keeps is
    the layers' affair (checkpoint a layer to keep its input alone); exchanges keep nothing.
    """
    own = sum(length_of(rows) for rows in grid.positions_of_slices)
    if x.shape[1:3] != (grid.frames, own):
        raise ValueError(
            f"activations {tuple(x.shape)} do not fit {grid.frames} frames and {own} of {grid.positions} "
            f"positions on rank {grid.rank} of {grid.degree}."
        )
    if (group.size, group.rank) != (grid.degree, grid.rank):
        raise ValueError(
            f"the grid is for rank {grid.rank} of {grid.degree}, the group is rank {group.rank} of {group.size}."
        )
    if len(layers) % 2:
        raise ValueError(f"{len(layers)} layers; spatial and temporal layers come in pairs.")
    if not layers:
        return x
    if group.size == 1:
        return _alone(x, layers)
    if torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()  # a rank without rows in a layer must exchange gradients like the others
    relayouts = [Relayout(grid, group, layer) for layer in range(len(layers))]
    finished: list[Tensor] = []
    for source, block in enumerate(x.split([length_of(rows) for rows in grid.positions_of_slices], dim=2)):
        relayouts[0].depart(source, block)
    del x
    for step in forward_program(grid.schedule, len(layers)):
        if isinstance(step, SendPart):
            relayouts[step.layer].send(step.target, step.source)
            continue
        block = relayouts[step.layer].arrive(step.index)
        own_rows = grid.chunk(axis_of(step.layer), step.index, grid.rank)
        if length_of(own_rows):
            block = layers[step.layer](block, torch.arange(own_rows.start, own_rows.stop, device=block.device))
        if step.layer + 1 < len(layers):
            relayouts[step.layer + 1].depart(step.index, block)
        else:
            finished.append(block)
    return torch.cat(finished, dim=2)


def _alone(x: Tensor, layers: Sequence[LayerFunction]) -> Tensor:
    """One device: whole layers, nothing to hide."""
    for number, layer in enumerate(layers):
        x = layer(x, torch.arange(x.shape[1 + number % 2], device=x.device))
    return x
