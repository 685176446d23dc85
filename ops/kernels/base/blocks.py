"""Blocks of rows that stay in the L2 cache, for the fused ops from library calls. N tokens, D width, S table rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ops.kernels.base.segments import Segments

BLOCK_ELEMENTS = 2**18  # 1 MB of fp32: a block and its temporaries stay in the L2 cache


def is_per_token(x: Tensor, scale: Tensor | None, shift: Tensor | None, segments: Segments | None) -> bool:
    """Whether the tables have one row per token (and there is more than one token)."""
    table = scale if scale is not None else shift
    return segments is None and table is not None and table.shape[0] == x.shape[0] and x.shape[0] != 1


def as_row(vector: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """[D] as a table of one row."""
    return None if vector is None else vector.to(dtype).view(1, -1)


def row(table: Tensor | None, s: int) -> Tensor | None:
    """Row s of a table [S, D], or the only one: [D]."""
    return None if table is None else table[s if table.shape[0] > 1 else 0]  # weight alone is a table of one row


def row_blocks(num_rows: int, width: int, segments: Segments | None) -> Iterator[tuple[int, int, int]]:
    """(first row, end, table row) of blocks of at most BLOCK_ELEMENTS of one run."""
    step = max(BLOCK_ELEMENTS // width, 1)
    bounds, mods = ([0, num_rows], [0]) if segments is None else (segments.cu.tolist(), segments.run2mod.tolist())
    for run, s in enumerate(mods):
        for lo in range(bounds[run], bounds[run + 1], step):
            yield lo, min(lo + step, bounds[run + 1]), s
