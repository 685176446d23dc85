"""What gate_residual means, in plain PyTorch. Differentiable, any device, exact in float64; the judge of every test.

N tokens, D width, S rows of the modulation tables. `rows` maps each token to its table row; None means one row for
all tokens (tables of one row) or one row per token (tables of N rows).
Arithmetic is float32 for inputs of up to 32 bits and float64 for float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.kernels.base.dtypes import compute_dtype
from ops.kernels.norm_modulate.reference import per_token


def gate_residual(
    x: Tensor, y: Tensor, gate: Tensor | None, rows: Tensor | None = None, residual_dtype: torch.dtype | None = None
) -> Tensor:
    """x + gate * y for x, y [N, D]; without a gate x + y."""
    dtype = compute_dtype(x, y)
    branch = y.to(dtype)
    if gate is not None:
        branch = branch * per_token(gate, rows).to(dtype)
    return (x.to(dtype) + branch).to(residual_dtype or x.dtype)
