"""What modulates every activation is computed in fp32, whatever the weights are and wherever TF32 is allowed."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from app.export.parity import our_velocity, parity_sample
from ops import precision
from ops.models.load import build_dit
from ops.precision import allow_tf32, precise_linear, precise_product
from tests.families.registry import VARIANTS

FP32 = 1e-6
TABLES = ("scale", "shift", "gate")  # of the fused ops: what a row is modulated with


class ModulationTables(TorchDispatchMode):
    """Notes the tables that the fused ops are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "heddle" and "backward" not in func.__name__:
            named = zip((argument.name for argument in func._schema.arguments), args, strict=False)
            self.found += [value.detach().clone() for name, value in named if name in TABLES and value is not None]
        return func(*args, **(kwargs or {}))


def tables_of(module: nn.Module, case: str, autocast: bool) -> list[Tensor]:
    sample = parity_sample(VARIANTS[case])
    with ModulationTables() as seen, torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        our_velocity(module, sample)
    return seen.found


@pytest.mark.parametrize("autocast", [False, True], ids=["weights", "autocast"])
@pytest.mark.parametrize("case", VARIANTS)
def test_modulation_of_bf16_weights_is_that_of_fp32_arithmetic(case: str, autocast: bool) -> None:
    torch.manual_seed(0)
    module = build_dit(VARIANTS[case], seed=0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.08)
    module = module.bfloat16()
    found = tables_of(module, case, autocast)
    wanted = tables_of(copy.deepcopy(module).float(), case, False)
    assert len(found) == len(wanted) >= 5 and all(table.dtype == torch.float32 for table in found)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=FP32 * float(theirs.abs().max()), rtol=FP32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_precise_product_and_its_gradients_are_those_of_fp32(dtype: torch.dtype) -> None:
    """In parts of two rows, and a last one of one."""
    computed = torch.promote_types(dtype, torch.float32)
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(16, 5).to(dtype)
    x = torch.randn(3, 16, generator=generator, dtype=computed).requires_grad_()
    cotangent = torch.randn(3, 5, generator=generator, dtype=computed)
    with torch.autocast("cpu", torch.bfloat16):
        out = precise_linear(layer, x, part_elements=40)
        out.backward(cotangent)
    again = x.detach().clone().requires_grad_()
    weight, bias = (part.detach().to(computed).requires_grad_() for part in (layer.weight, layer.bias))
    wanted = nn.functional.linear(again, weight, bias)
    wanted.backward(cotangent)
    close = {"atol": FP32, "rtol": FP32}
    torch.testing.assert_close(out, wanted, **close)
    torch.testing.assert_close(x.grad, again.grad, **close)
    torch.testing.assert_close(
        layer.weight.grad, weight.grad.to(dtype), atol=0, rtol=8e-3 if dtype.itemsize < 4 else FP32
    )
    torch.testing.assert_close(layer.bias.grad, bias.grad.to(dtype), **close)


def test_no_copy_of_the_weight_is_kept_for_the_backward() -> None:
    weight = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        precise_product(torch.randn(2, 32), weight)
    assert any(tensor.data_ptr() == weight.data_ptr() for tensor in kept)
    assert all(tensor.dtype == torch.bfloat16 or tensor.numel() <= 64 for tensor in kept)


@pytest.fixture
def switches() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_allowed_for_products_and_convolutions_together(allowed: bool) -> None:
    allow_tf32(allowed)
    assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == allowed
    with precision._whole_products(torch.device("cuda")):
        assert not torch.backends.cuda.matmul.allow_tf32, "what is precise is never in TF32"
    assert torch.backends.cuda.matmul.allow_tf32 == allowed
