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
        return by_sequence(q, k, v, q_lengths, k_lengths)


def by_sequence(q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths) -> Tensor:
    """As `ops.attention.varlen.attention`, by PyTorch's own call."""
    if q_lengths.equal and k_lengths.equal:
        return _alike(q, k, v, len(q_lengths.host))
    pieces = zip(q.split(q_lengths.host), k.split(k_lengths.host), v.split(k_lengths.host), strict=True)
    return torch.cat([_one(*piece) for piece in pieces])


def _alike(q: Tensor, k: Tensor, v: Tensor, count: int) -> Tensor:
    """`count` sequences of one length: q [count * L, H, d], k and v alike -> [count * L, H, d]."""
    if len(k) == count:  # one key, whose share is 1; no case for cuDNN. All three stay in the graph, as anywhere
        alike: Tensor = q.unflatten(0, (count, -1)) * 0 + (v + k * 0).unsqueeze(1)
        return alike.flatten(0, 1)
    views = (rows.unflatten(0, (count, -1)).transpose(1, 2) for rows in (q, k, v))
    return F.scaled_dot_product_attention(*views).transpose(1, 2).flatten(0, 1)


def _one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not len(q) or not len(k):
        return q * 0  # zeros that stay in the graph, so that backward reaches every rank's collectives
    return _alike(q, k, v, 1)
