"""Frozen projections in 8 bits on a GPU: the same numbers as on the CPU, and the results of their wide weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ops.models.float8 import FrozenLinear, in_float8, widened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_rounds_as_the_cpu_does(dtype: torch.dtype) -> None:
    """Workers of both kinds compare digests of these bits."""
    weight = (torch.randn(300, 500) * torch.logspace(-12, 6, 300)[:, None]).to(dtype)
    weight[1] = 0
    for here, there in zip(in_float8(weight), in_float8(weight.cuda()), strict=True):
        assert torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))


@pytest.mark.parametrize("compiled", [False, True])
def test_results_and_gradients_are_those_of_the_wide_weight(compiled: bool) -> None:
    layer = FrozenLinear(nn.Linear(256, 512).requires_grad_(False), "float8").to("cuda", torch.bfloat16)
    assert layer.weight_scale is not None
    wide = widened(layer.weight, layer.weight_scale, torch.bfloat16)
    call = torch.compile(layer, dynamic=True) if compiled else layer
    found = []
    for product in (call, lambda x: nn.functional.linear(x, wide, layer.bias)):
        x = torch.randn(70, 256, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16).requires_grad_()
        out = product(x)
        out.square().sum().backward()
        found.append((out, x.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7 * float(theirs.abs().max()))
