"""Masks of text encoders as Transformers takes them without looking: four axes, and numbers that are added to logits.

From a mask with two axes, and from positions without a mask, its models read back whether anything is hidden at all:
each such read makes the host wait until the device has done all that is queued. Four axes go to attention as they are.

B captions, L rows of the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def padding_mask(lengths: Sequence[int], rows: int, dtype: torch.dtype) -> Tensor | None:
    """[B, 1, 1, L] on the host, which hides what follows each caption in `rows` rows. None where nothing does: then
    attention needs no mask, as the host knows by the lengths."""
    if min(lengths) == rows:
        return None
    mask = torch.zeros(len(lengths), 1, 1, rows, dtype=dtype)
    for row, length in enumerate(lengths):
        mask[row, ..., length:] = torch.finfo(dtype).min
    return mask


def causal_mask(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[1, 1, L, L] made on the device, which hides what follows each row."""
    return torch.full((1, 1, rows, rows), torch.finfo(dtype).min, dtype=dtype, device=device).triu_(1)
