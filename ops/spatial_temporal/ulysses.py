"""Ulysses for spatial-temporal transformers: the baseline that ScaleFusion is compared with.

Positions stay where they are: temporal layers need no exchange, spatial attention trades positions for heads and back.
(Open-Sora 1.2 does so for the spatial cross-attention, too, whose keys every rank has; here it stays local.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ops.chunks import chunk_bounds
from ops.packed.packing import Exchange, exchange_of
from ops.spatial_temporal.layers import LayerFunction


def run_in_place(x: Tensor, layers: Sequence[LayerFunction], positions: Tensor) -> Tensor:
    """x [B, T, s, C] (all frames, own `positions` [s]) through spatial and temporal layers in turn, a spatial one
    first; the same shape back. A spatial layer exchanges rows with the other ranks itself, and so is called on every
    rank, also on one without rows."""
    frames = torch.arange(x.shape[1], device=x.device)
    for number, layer in enumerate(layers):
        x = layer(x, positions if number % 2 else frames)
    return x


@lru_cache(maxsize=8)  # all spatial blocks of a forward share it, and so do a sampler's steps
def frames_exchange(
    batch: int,
    frames: int,
    positions: int,
    degree: int,
    rank: int,
    device: torch.device | str = "cpu",
    in_halves: bool | None = None,
) -> Exchange:
    """The exchange for `sequence_parallel_attention` over the rows of x [B, T, s, C] in their order: every frame is a
    sequence of S positions, of which each rank holds the same contiguous chunk in all frames."""
    bounds = [chunk_bounds(positions, degree, one) for one in range(degree)]
    rows = np.array([high - low for low, high in bounds])[:, None, None]
    return exchange_of(np.broadcast_to(rows, (degree, 1, batch * frames)), rank, device, in_halves=in_halves)
