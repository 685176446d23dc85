"""Triton kernels of QK-norm with RoPE against float64, through the public function."""

from itertools import product

import pytest
import torch
from torch import Tensor

from ops.kernels.qk_rope import reference as qk_reference
from ops.kernels.qk_rope.op import qk_norm_rope
from tests.long import in_default_run

FP32_LIMIT, BF16_LIMIT, FP32_FROM_BF16 = 5e-6, 2.0e-3, 1e-5  # relative L2


def error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def make(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype).requires_grad_()


def check(
    given: list[Tensor],
    weights: list[Tensor | None],
    cos: Tensor | None,
    sin: Tensor | None,
    head_dim: int,
    per_head: bool,
) -> None:
    actual = qk_norm_rope(*given, *weights, cos, sin, head_dim=head_dim, per_head=per_head)
    wanted = [t.detach().double().requires_grad_() for t in given]
    wanted_weights = [None if w is None else w.detach().double().requires_grad_() for w in weights]
    expected = [
        qk_reference.qk_norm_rope(x, w, cos, sin, head_dim=head_dim, per_head=per_head)
        for x, w in zip(wanted, wanted_weights)
    ]
    cotangents = [torch.randn_like(out) for out in actual]
    got = torch.autograd.grad(actual, given + [w for w in weights if w is not None], cotangents)
    want = torch.autograd.grad(
        expected, wanted + [w for w in wanted_weights if w is not None], [c.double() for c in cotangents]
    )
    low = given[0].dtype == torch.bfloat16
    for a, b in zip([*actual, *got], [*expected, *want]):
        assert a.isfinite().all()
        limit = BF16_LIMIT if a.dtype == torch.bfloat16 else FP32_FROM_BF16 if low else FP32_LIMIT
        assert error(a, b) <= limit


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SMALL, WIDE = (5, 16), (12, 128)  # heads, and their size


@pytest.mark.parametrize(
    ("size", "per_head", "dtype"),
    in_default_run({(SMALL, False, "bf16"), (SMALL, True, "fp32")}, of=product((SMALL, WIDE), (False, True), DTYPES)),
)
def test_qk_norm_rope(device: str, size: tuple[int, int], per_head: bool, dtype: str) -> None:
    heads, head_dim = size
    torch.manual_seed(heads)
    tokens, batch, width = 5, 2, heads * head_dim
    packed = make(device, DTYPES[dtype], batch * tokens, 3 * width)  # q and k are views of a packed qkv
    given = [packed[:, :width], packed[:, width : 2 * width]]
    weights = [make(device, torch.float32, head_dim if per_head else width) for _ in "qk"]
    angles = torch.randn(tokens, head_dim // 2, device=device, dtype=torch.float64)
    check(given, weights, angles.cos().float(), angles.sin().float(), head_dim, per_head)


@pytest.mark.parametrize("per_head", [False, True], ids=["full width", "per head"])
def test_without_rope_keys_may_be_fewer_or_more_than_queries(device: str, per_head: bool) -> None:
    for num_q, num_k in ((3, 11), (11, 3), (5, 0)):
        given = [make(device, torch.float32, n, 96) for n in (num_q, num_k)]
        weights = [make(device, torch.float32, 32 if per_head else 96) for _ in "qk"]
        check(given, weights, None, None, 32, per_head)


def test_rope_without_weights(device: str) -> None:
    given = [make(device, torch.float32, 7, 64) for _ in "qk"]
    angles = torch.randn(7, 8, device=device)
    check(given, [None, None], angles.cos(), angles.sin(), 16, False)


@pytest.mark.parametrize("per_head", [False, True], ids=["full width", "per head"])
def test_weights_may_be_of_one_alone_or_views(device: str, per_head: bool) -> None:
    given = [make(device, torch.float32, 5, 64) for _ in "qk"]
    angles = torch.randn(5, 8, device=device)
    wide = make(device, torch.float32, 16 if per_head else 64, 2)
    dense = wide.detach()[:, 0].clone().requires_grad_()
    for weights in ([dense, None], [None, dense], [wide[:, 0], wide[:, 1]]):
        check(given, weights, angles.cos(), angles.sin(), 16, per_head)


def test_gradients_repeat_bit_by_bit(device: str) -> None:
    q, k = make(device, torch.bfloat16, 21, 64), make(device, torch.bfloat16, 21, 64)
    w = make(device, torch.float32, 64)
    runs = []
    for _ in range(2):
        out = qk_norm_rope(q, k, w, w, head_dim=16)
        runs.append(torch.autograd.grad([t.float().sum() for t in out], [q, k, w]))
    assert all(torch.equal(a, b) for a, b in zip(*runs))
