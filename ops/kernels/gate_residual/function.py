"""gate_residual and gate_residual_ln_modulate as models call them: arguments checked, tokens as rows, then the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.kernels.base.arguments import check_affine, check_same_shape, check_tables, num_rows, result_dtype, token_rows
from ops.kernels.base.segments import Segments
from ops.kernels.gate_residual import op
from ops.kernels.norm_modulate.function import ln_modulate


def gate_residual(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None = None,
    segments: Segments | None = None,
    *,
    residual_dtype: torch.dtype | None = None,
) -> Tensor:
    """x + gate * y in residual_dtype (default: x's dtype). x, y [..., D]; gate [S, D]; without a gate x + y."""
    check_same_shape(x, y)
    dtype = residual_dtype or x.dtype
    if gate is None:
        wide = torch.promote_types(torch.promote_types(x.dtype, y.dtype), dtype)
        return (x.to(wide) + y.to(wide)).to(dtype)
    x_ND, y_ND = token_rows(x), token_rows(y)
    (gate,), index = check_tables(x_ND, segments, gate=gate)
    assert gate is not None
    return op.gate_residual(x_ND, y_ND, gate, *index, dtype).view(x.shape)


def gate_residual_ln_modulate(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    segments: Segments | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    rms: bool = False,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """x' = x + gate * y and ln_modulate(x', scale, shift): one pass over memory instead of two.

    x, y [..., D]; gate, scale, shift [S, D], each optional. x' has residual_dtype (default: x's dtype, so an fp32
    residual stream stays fp32 beside a bf16 branch y); the norm is that of x' as stored.
    """
    check_same_shape(x, y)
    x_ND, y_ND = token_rows(x), token_rows(y)
    dtype = residual_dtype or x.dtype
    given = [t for t in (gate, scale, shift) if t is not None]
    if segments is None and any(num_rows(t) != 1 for t in given):
        # Per-token tables leave nothing to sum up; the two ops move the same gradients.
        residual = gate_residual(x, y, gate, residual_dtype=dtype)
        out = result_dtype(residual, out_dtype)
        return residual, ln_modulate(residual, scale, shift, weight=weight, bias=bias, eps=eps, rms=rms, out_dtype=out)
    (gate, scale, shift), index = check_tables(x_ND, segments, gate=gate, scale=scale, shift=shift)
    check_affine(x_ND, weight, bias)
    residual, h, _, _ = op.gate_residual_ln_modulate(
        x_ND, y_ND, gate, weight, bias, scale, shift, *index, eps, rms, dtype, result_dtype(x, out_dtype)
    )
    return residual.view(x.shape), h.view(x.shape)
