"""scaled_dot_product_attention per sequence (one call where all lengths are equal): any device and dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.attention.lengths import Lengths, Pair
from ops.attention.names import BackendName


class Sdpa:
    name: BackendName = "sdpa"

    def why_not(self, q: Tensor, lengths: Pair | None = None) -> str | None:
        return None

    def run(self, q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths) -> Tensor:
        if q_lengths.equal and k_lengths.equal:
            return batched(q, k, v, len(q_lengths.host))
        pieces = zip(q.split(q_lengths.host), k.split(k_lengths.host), v.split(k_lengths.host), strict=True)
        return torch.cat([_one(*piece) for piece in pieces])


def batched(q: Tensor, k: Tensor, v: Tensor, count: int) -> Tensor:
    """`count` sequences of one length in one call: q [count * L, H, d], k and v alike -> [count * L, H, d]."""
    views = (rows.unflatten(0, (count, -1)).transpose(1, 2) for rows in (q, k, v))
    return F.scaled_dot_product_attention(*views).transpose(1, 2).flatten(0, 1)


def _one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not len(q) or not len(k):
        return q * 0  # zeros that stay in the graph, so that backward reaches every rank's collectives
    q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)
