"""What heddle::qk_norm_rope takes and means: its arguments, and the op in plain PyTorch.

The reference is differentiable, runs on any device and is exact in float64; it is the judge of every test.
The fields of a call stand in the order of the op's schema; no other list of them exists.

N tokens, D width, G = heads with per_head, else 1.

Calls are named tuples, because one is made per call of an op, and a frozen dataclass of 19 fields takes 5.4 us against
0.6 us.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ops.kernels.base.dtypes import compute_dtype


class QKCall(NamedTuple):
    """RMSNorm of q and k, then rotation of the pairs (2i, 2i + 1) of every head."""

    q: Tensor  # [N, D]
    k: Tensor  # [N or another number, D]
    wq: Tensor | None  # [D], or [head_dim] with per_head
    wk: Tensor | None
    cos: Tensor | None  # [n, head_dim / 2]; token r uses row r % n
    sin: Tensor | None
    head_dim: int
    per_head: bool
    eps: float
    out_dtype: torch.dtype


class QKBackwardCall(NamedTuple):
    """The gradients of both outputs, and what the forward saved."""

    dqo: Tensor  # [N, D]
    dko: Tensor
    q: Tensor  # [N, D]
    k: Tensor
    wq: Tensor | None
    wk: Tensor | None
    cos: Tensor | None  # [n, head_dim / 2]
    sin: Tensor | None
    rstd_q: Tensor  # [N, G]
    rstd_k: Tensor
    head_dim: int
    per_head: bool


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
    x_NHE: Tensor = x.to(dtype).unflatten(-1, (-1, head_dim))
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
