"""What each fused op means, in plain PyTorch. Differentiable, any device, exact in float64; the judge of every test.

N tokens, D width, S rows of the modulation tables. `rows` maps each token to its table row; None means one row for
all tokens (tables of one row) or one row per token (tables of N rows).
Arithmetic is float32 for inputs of up to 32 bits and float64 for float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 as soon as one input is float64, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


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
        h = h * (1 + _per_token(scale, rows).to(dtype))
    if shift is not None:
        h = h + _per_token(shift, rows).to(dtype)
    return h.to(out_dtype or x.dtype)


def gate_residual(
    x: Tensor, y: Tensor, gate: Tensor | None, rows: Tensor | None = None, residual_dtype: torch.dtype | None = None
) -> Tensor:
    """x + gate * y for x, y [N, D]; without a gate x + y."""
    dtype = compute_dtype(x, y)
    branch = y.to(dtype)
    if gate is not None:
        branch = branch * _per_token(gate, rows).to(dtype)
    return (x.to(dtype) + branch).to(residual_dtype or x.dtype)


def qk_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    head_dim: int,
    per_head: bool,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """RMSNorm of x [N, D] over D or over each head, then rotation of the pairs (2i, 2i + 1) of every head.

    cos, sin [n, head_dim / 2]; token r uses table row r % n. One of q and k: call it for each.
    """
    dtype = compute_dtype(x)
    x_NHE = x.to(dtype).unflatten(-1, (-1, head_dim))
    axes = (-1,) if per_head else (-2, -1)
    h = x_NHE * torch.rsqrt(x_NHE.square().mean(axes, keepdim=True) + eps)
    if weight is not None:
        h = h * weight.to(dtype).view(-1, head_dim)
    if cos is not None and sin is not None:
        h = _rotate(h, cos.to(dtype), sin.to(dtype))
    return h.flatten(-2).to(out_dtype or x.dtype)


def _rotate(h_NHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    repeats = h_NHE.shape[0] // cos.shape[0] if cos.shape[0] else 1
    cos, sin = (table.repeat(repeats, 1).unsqueeze(1) for table in (cos, sin))
    even, odd = h_NHE.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def _per_token(table: Tensor, rows: Tensor | None) -> Tensor:
    return table if rows is None else table.index_select(0, rows)
