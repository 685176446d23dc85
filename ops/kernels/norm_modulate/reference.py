"""What ln_modulate means, in plain PyTorch. Differentiable, any device, exact in float64; the judge of every test.

N tokens, D width, S rows of the modulation tables. `rows` maps each token to its table row; None means one row for
all tokens (tables of one row) or one row per token (tables of N rows).
Arithmetic is float32 for inputs of up to 32 bits and float64 for float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.kernels.base.dtypes import compute_dtype


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
