"""scaled_dot_product_attention per sequence (one call where all lengths are equal): any device and dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.attention.lengths import Lengths, Pair
from ops.attention.names import BackendName


def leave_out_cudnn() -> None:
    """Keep PyTorch from choosing cuDNN for scaled_dot_product_attention by itself, in this process from now on.

    On GPUs of capability 9.0 it comes first, and its backward of a mask gives NaN for some lengths and magnitudes
    (PyTorch #196678). The backend `cudnn`, which has no masks, names it.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


class Sdpa:
    name: BackendName = "sdpa"

    def why_not(self, q: Tensor, lengths: Pair | None = None) -> str | None:
        return None

    def run(self, q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths) -> Tensor:
        return by_sequence(q, k, v, q_lengths, k_lengths)


Alike = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def alike(q: Tensor, k: Tensor, v: Tensor, count: int) -> Tensor:
    """`count` sequences of one length in one call: q [count * L, H, d], k and v alike -> [count * L, H, d]."""
    views = (rows.unflatten(0, (count, -1)).transpose(1, 2) for rows in (q, k, v))
    return F.scaled_dot_product_attention(*views).transpose(1, 2).flatten(0, 1)


def by_sequence(q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths, call: Alike = alike) -> Tensor:
    """As `ops.attention.varlen.attention`: one `call` where all lengths are equal, one for each sequence elsewhere."""
    if q_lengths.equal and k_lengths.equal:
        return call(q, k, v, len(q_lengths.host))
    pieces = zip(q.split(q_lengths.host), k.split(k_lengths.host), v.split(k_lengths.host), strict=True)
    return torch.cat([_one(*piece, call) for piece in pieces])


def _one(q: Tensor, k: Tensor, v: Tensor, call: Alike) -> Tensor:
    if not len(q) or not len(k):
        return q * 0  # zeros that stay in the graph, so that backward reaches every rank's collectives
    return call(q, k, v, 1)
