"""Attention over packed sequences: one interface, chosen by device and dtype.

N rows, H heads, d head size. Each query sees the keys of its own sequence only; there is no mask and no padding.
- `flash`: PyTorch's variable-length flash kernel; CUDA, half precision.
- `sdpa`: scaled_dot_product_attention per sequence (one call when all lengths are equal); any device and dtype.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.attention.lengths import Lengths

Backend = Literal["flash", "sdpa"]


def attention(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths, backend: Backend | None = None
) -> Tensor:
    """q [Nq, H, d], k and v [Nk, H, d] -> [Nq, H, d]. A sequence without keys gives zeros, without queries no rows."""
    if len(q_lengths.host) != len(k_lengths.host):
        raise ValueError(f"{len(q_lengths.host)} sequences of queries and {len(k_lengths.host)} of keys; they pair up.")
    run = _flash if (backend or choose(q)) == "flash" else _sdpa
    return run(q, k, v, q_lengths, k_lengths)


def choose(q: Tensor) -> Backend:
    """The fastest backend that takes this device, dtype and head size."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return "flash" if q.is_cuda and half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 else "sdpa"


def _flash(q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # imports the CUDA kernel's registrations

    if not q_lengths.longest or not k_lengths.longest:  # nothing to launch
        return q * 0
    out = varlen_attn(q, k, v, q_lengths.offsets, k_lengths.offsets, q_lengths.longest, k_lengths.longest)
    assert isinstance(out, Tensor)  # a tuple only with return_aux
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths) -> Tensor:
    if len(set(q_lengths.host)) == 1 and len(set(k_lengths.host)) == 1 and k_lengths.longest and q_lengths.longest:
        count = len(q_lengths.host)
        batched = (rows.unflatten(0, (count, -1)).transpose(1, 2) for rows in (q, k, v))
        return F.scaled_dot_product_attention(*batched).transpose(1, 2).flatten(0, 1)
    pieces = zip(q.split(q_lengths.host), k.split(k_lengths.host), v.split(k_lengths.host), strict=True)
    return torch.cat([_one(*piece) for piece in pieces])


def _one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not len(q) or not len(k):
        return q * 0  # zeros that stay in the graph, so that backward reaches every rank's collectives
    q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)
