"""The arguments of heddle::qk_norm_rope and its backward.

The one list of them; fields stand in the order of the op's schema.

N tokens, D width, G = heads with per_head, else 1.

Named tuples, because one is made per call of an op, and a frozen dataclass of 19 fields takes 5.4 us against 0.6 us.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
