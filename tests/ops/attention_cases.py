"""Packs of lengths, and what attention over them means."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CASES = {
    "mixed": ((5, 1, 9), (5, 1, 9)),
    "cross": ((5, 1, 9), (2, 7, 3)),
    "equal": ((4, 4, 4), (4, 4, 4)),
    "equal cross": ((4, 4), (7, 7)),
    "no queries": ((0, 3), (4, 2)),
    "no rows at all": ((0, 0), (4, 2)),
    "no keys": ((2, 3), (0, 2)),
}


def reference(q: Tensor, k: Tensor, v: Tensor, q_lengths: tuple[int, ...], k_lengths: tuple[int, ...]) -> Tensor:
    out, q_start, k_start = [], 0, 0
    for nq, nk in zip(q_lengths, k_lengths):
        one_q, one_k, one_v = q[q_start : q_start + nq], k[k_start : k_start + nk], v[k_start : k_start + nk]
        scores = torch.einsum("qhd,khd->hqk", one_q, one_k) / math.sqrt(q.shape[-1])
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), one_v) if nk else torch.zeros_like(one_q))
        q_start, k_start = q_start + nq, k_start + nk
    return torch.cat(out)
