"""Ulysses for spatial-temporal transformers, as Open-Sora runs it: the baseline that ScaleFusion is compared with.

Positions stay where they are: temporal layers need no exchange, spatial attention trades positions for heads and back.
"""

from __future__ import annotations

import numpy as np
import torch

from ops.chunks import chunk_bounds
from ops.packing import Exchange, exchange_of


def frames_exchange(
    batch: int, frames: int, positions: int, degree: int, rank: int, device: torch.device | str = "cpu"
) -> Exchange:
    """For `sequence_parallel_attention` over the rows of x [B, T, s, C] in their order: every frame is a sequence of S
    positions, of which each rank holds the same contiguous chunk in all frames."""
    bounds = [chunk_bounds(positions, degree, one) for one in range(degree)]
    rows = np.array([high - low for low, high in bounds])[:, None, None]
    return exchange_of(np.broadcast_to(rows, (degree, 1, batch * frames)), rank, device)
