"""Packed attention against softmax(q k^T) v of each sequence, and the backends against each other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ops.attention.lengths import Lengths
from ops.attention.varlen import attention, choose

torch.set_num_threads(1)
FP64 = {"atol": 1e-12, "rtol": 1e-12}
BF16 = {"atol": 2e-2, "rtol": 2e-2}
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sdpa_equals_softmax_per_sequence(case: str) -> None:
    q_lengths, k_lengths = CASES[case]
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(sum(n), 3, 8, dtype=torch.float64, requires_grad=True) for n in (q_lengths, k_lengths, k_lengths)
    )
    expected = reference(q, k, v, q_lengths, k_lengths)
    actual = attention(q, k, v, Lengths.of(q_lengths), Lengths.of(k_lengths))
    torch.testing.assert_close(actual, expected, **FP64)
    seed = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), seed, allow_unused=True, retain_graph=True)
    given = torch.autograd.grad(actual, (q, k, v), seed, allow_unused=True)
    for got, want, leaf in zip(given, wanted, (q, k, v)):
        zero = torch.zeros_like(leaf)
        torch.testing.assert_close(zero if got is None else got, zero if want is None else want, **FP64)


def test_lengths_must_pair_up() -> None:
    q = torch.zeros(4, 1, 8)
    with pytest.raises(ValueError, match="2 sequences of queries and 1 of keys"):
        attention(q, q, q, Lengths.of((2, 2)), Lengths.of((4,)))


def test_backend_follows_device_and_dtype() -> None:
    assert choose(torch.zeros(1, 1, 8)) == "sdpa"
    assert choose(torch.zeros(1, 1, 8, dtype=torch.bfloat16)) == "sdpa"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", [case for case in CASES if case != "no keys"], ids=str)
def test_flash_equals_sdpa(case: str) -> None:
    q_lengths, k_lengths = (Lengths.of(n, "cuda") for n in CASES[case])
    q, k, v = (
        torch.randn(n.total, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (q_lengths, k_lengths, k_lengths)
    )
    assert choose(q) == "flash"
    flash = attention(q, k, v, q_lengths, k_lengths, backend="flash")
    plain = attention(q, k, v, q_lengths, k_lengths, backend="sdpa")
    torch.testing.assert_close(flash, plain, **BF16)
    seed = torch.randn_like(plain)
    given = torch.autograd.grad(flash, (q, k, v), seed)
    for got, want in zip(given, torch.autograd.grad(plain, (q, k, v), seed, allow_unused=True)):
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want, **BF16)
