"""The attention backends of a GPU against float64. Imports nothing but torch and pytest, like all tests of a GPU."""

from __future__ import annotations

import pytest
import torch

from ops.attention.lengths import Lengths
from ops.attention.names import BACKEND_NAMES, BackendName
from ops.attention.varlen import attention, backend_of
from tests.ops.attention_cases import CASES, reference

BF16 = {"atol": 2e-2, "rtol": 2e-2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [name for name in BACKEND_NAMES if name != "sdpa"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backends_equal_softmax_on_cuda(name: BackendName, case: str) -> None:
    """bf16 against float64 of the same bf16 values, forward and backward."""
    lengths = [Lengths.of(n, "cuda") for n in CASES[case]]
    q, k, v = (
        torch.randn(n.total, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (lengths[0], lengths[1], lengths[1])
    )
    if name in ("flash", "flash3") and 0 in CASES[case][1]:
        pytest.skip("flash kernels say nothing of a sequence without keys beside others")
    if reason := backend_of(name).why_not(q, (lengths[0], lengths[1])):
        pytest.skip(reason)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = reference(*exact, *CASES[case])
    actual = attention(q, k, v, *lengths, backend=name)
    torch.testing.assert_close(actual.double(), expected, **BF16)
    seed = torch.randn_like(actual)
    given_ = torch.autograd.grad(actual, (q, k, v), seed, allow_unused=True)
    wanted = torch.autograd.grad(expected, exact, seed.double(), allow_unused=True)
    for got, want, leaf in zip(given_, wanted, exact):
        zero = torch.zeros_like(leaf)
        torch.testing.assert_close(zero if got is None else got.double(), zero if want is None else want, **BF16)
