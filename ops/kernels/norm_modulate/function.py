"""ln_modulate as models call it: arguments checked, tokens as rows, then the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.kernels.base.arguments import check_affine, check_tables, result_dtype, token_rows
from ops.kernels.base.segments import Segments
from ops.kernels.norm_modulate import op


def ln_modulate(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    segments: Segments | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    rms: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """(norm(x) * weight + bias) * (1 + scale) + shift; LayerNorm, or RMSNorm with rms.

    x [..., D]; scale, shift [S, D] (other leading dimensions are flattened; chunks of a wider table are fine); weight,
    bias [D]. Without segments, tables of one row apply to all tokens and tables of N rows to one token each.
    """
    x_ND = token_rows(x)
    (scale, shift), index = check_tables(x_ND, segments, scale=scale, shift=shift)
    check_affine(x_ND, weight, bias)
    h, _, _ = op.ln_modulate(x_ND, weight, bias, scale, shift, *index, eps, rms, result_dtype(x, out_dtype))
    return h.view(x.shape)
