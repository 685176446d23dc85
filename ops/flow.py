"""The loss of packed sequences: a weighted mean squared error whose parts of ranks, bags and cascades only add up."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.packing import Layout


def flow_loss(prediction: Tensor, target: Tensor, layout: Layout, weights: Tensor) -> Tensor:
    """This rank's part of sum_s weights[s] * mean squared error of sequence s.

    prediction, target [n, c] are the local rows, weights [S] are 1 / (samples of the whole step) for an average; the
    mean runs over all tokens of s on all ranks of the bag but those of clean frames. So parts of ranks, bags and
    cascades only add up. At least fp32. With n = 0 it is a zero that backward accepts.
    """
    return _row_losses(prediction, target, layout, weights).sum()


@torch.no_grad()
def sequence_losses(prediction: Tensor, target: Tensor, layout: Layout, weights: Tensor) -> Tensor:
    """This rank's part of `flow_loss` by sequence, fp64 [S]; for reports only."""
    rows = _row_losses(prediction, target, layout, weights).double()
    sums = torch.zeros(len(weights), dtype=torch.float64, device=rows.device)
    return sums.index_add_(0, layout.seq_index, rows)


def _row_losses(prediction: Tensor, target: Tensor, layout: Layout, weights: Tensor) -> Tensor:
    dtype = torch.promote_types(prediction.dtype, torch.float32)
    per_row = (weights.double() / (layout.token_counts * prediction.shape[-1])).to(dtype)[layout.seq_index]
    if layout.has_clean_frames:
        per_row = per_row * layout.noisy_rows
    error = (prediction.to(dtype) - target.to(dtype)).square().sum(dim=-1)
    return per_row * error
