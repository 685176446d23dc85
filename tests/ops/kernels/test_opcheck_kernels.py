"""What the Triton launches return has the shapes, dtypes and strides that the fake kernels promise."""

import pytest
import torch

import ops.kernels.gate_residual.op
import ops.kernels.norm_modulate.op
import ops.kernels.qk_rope.op  # noqa: F401  (registers the ops)
from ops.kernels.base.segments import Segments

heddle = torch.ops.heddle
SEGMENTS = Segments.packed([3, 0, 2], [1, 0, 1], num_mods=2)
CHECKS = ("test_schema", "test_faketensor")


def leaf(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype).requires_grad_()


@pytest.mark.parametrize("affine", [False, True], ids=["tables", "affine"])
def test_norm_and_gate(device: str, affine: bool) -> None:
    bf16 = torch.bfloat16
    x, y = leaf(device, 5, 64), leaf(device, 5, 64, dtype=bf16)
    vector = leaf(device, 64) if affine else None
    table = None if affine else leaf(device, 2, 64)
    index = (None,) * 5 if affine else SEGMENTS.to(device).tensors()
    tables = (vector, vector, table, table)
    torch.library.opcheck(heddle.ln_modulate.default, (x, *tables, *index, 1e-6, False, bf16), test_utils=CHECKS)
    call = (x, y, table, *tables, *index, 1e-6, True, torch.float32, bf16)
    torch.library.opcheck(heddle.gate_residual_ln_modulate.default, call, test_utils=CHECKS)
    stats = (torch.empty(0, device=device), torch.rand(5, device=device))
    call = (x, y, x, y, table, vector, vector, table, *stats, *index, True, bf16, True, not affine)
    torch.library.opcheck(heddle.gate_residual_ln_modulate_bwd.default, call, test_utils=CHECKS)
    stats = (torch.rand(5, device=device), torch.rand(5, device=device))
    call = (y, x, vector, vector, table, *stats, *index, False, False, True)
    torch.library.opcheck(heddle.ln_modulate_bwd.default, call, test_utils=CHECKS)


def test_qk(device: str) -> None:
    q, k = leaf(device, 4, 64), leaf(device, 4, 64)
    angles = torch.randn(4, 8, device=device)
    for per_head in (False, True):
        weight = leaf(device, 16 if per_head else 64)
        call = (q, k, weight, weight, angles.cos(), angles.sin(), 16, per_head, 1e-6, torch.bfloat16)
        torch.library.opcheck(heddle.qk_norm_rope.default, call, test_utils=CHECKS)
        rstd = torch.rand(4, 4 if per_head else 1, device=device)
        call = (q, k, q, k, weight, weight, angles.cos(), angles.sin(), rstd, rstd, 16, per_head)
        torch.library.opcheck(heddle.qk_norm_rope_bwd.default, call, test_utils=CHECKS)
