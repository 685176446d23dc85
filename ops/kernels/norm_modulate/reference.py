"""What heddle::ln_modulate takes and means: its arguments, and the op in plain PyTorch.

The reference is differentiable, runs on any device and is exact in float64; it is the judge of every test.
The fields of a call stand in the order of the op's schema; no other list of them exists.

N tokens, D width, S rows of the modulation tables. `rows` maps each token to its table row; None means one row for
all tokens (tables of one row) or one row per token (tables of N rows).
Arithmetic is float32 for inputs of up to 32 bits and float64 for float64.

Calls are named tuples, because one is made per call of an op, and a frozen dataclass of 19 fields takes 5.4 us against
0.6 us.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ops.kernels.base.dtypes import compute_dtype
from ops.kernels.base.segments import Segments, as_segments


class NormCall(NamedTuple):
    """(norm(x) * weight + bias) * (1 + scale) + shift."""

    x: Tensor  # [N, D]
    weight: Tensor | None  # [D]
    bias: Tensor | None  # [D]
    scale: Tensor | None  # [S, D]
    shift: Tensor | None  # [S, D]
    run: Tensor | None
    cu: Tensor | None
    run2mod: Tensor | None
    mod_off: Tensor | None
    mod_runs: Tensor | None
    eps: float
    rms: bool
    out_dtype: torch.dtype

    @property
    def segments(self) -> Segments | None:
        """None: the tables have one row, or one row per token."""
        return as_segments(self.run, self.cu, self.run2mod, self.mod_off, self.mod_runs)


class NormBackwardCall(NamedTuple):
    """Without `sums` no table needs a gradient."""

    dy: Tensor  # [N, D]
    x: Tensor  # [N, D]
    weight: Tensor | None  # [D]
    bias: Tensor | None  # [D]
    scale: Tensor | None  # [S, D], or [N, D] with per_token
    mean: Tensor  # [N]; empty for RMS
    rstd: Tensor  # [N]
    run: Tensor | None
    cu: Tensor | None
    run2mod: Tensor | None
    mod_off: Tensor | None
    mod_runs: Tensor | None
    per_token: bool
    rms: bool
    sums: bool

    @property
    def segments(self) -> Segments | None:
        """None: the tables have one row, or one row per token."""
        return as_segments(self.run, self.cu, self.run2mod, self.mod_off, self.mod_runs)


def ln_modulate(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    rms: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """(norm(x) * weight + bias) * (1 + scale) + shift for x [N, D]; LayerNorm, or RMSNorm with rms."""
    dtype = compute_dtype(x)
    centred = x.to(dtype)
    if not rms:
        centred = centred - centred.mean(-1, keepdim=True)
    h = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        h = h * weight.to(dtype)
    if bias is not None:
        h = h + bias.to(dtype)
    if scale is not None:
        h = h * (1 + per_token(scale, rows).to(dtype))
    if shift is not None:
        h = h + per_token(shift, rows).to(dtype)
    return h.to(out_dtype or x.dtype)


def per_token(table: Tensor, rows: Tensor | None) -> Tensor:
    """The table row of each token: [S, D] and rows [N] -> [N, D]; without `rows` the table as it is."""
    return table if rows is None else table.index_select(0, rows)
