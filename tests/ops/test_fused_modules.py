"""The modules around the fused ops: what the plain chain computes, with parameters where they are expected."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ops.kernels.base.segments import Segments
from ops.kernels.gate_residual import reference as gate_reference
from ops.kernels.gate_residual.op import FusedGateAdaLN, gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate import reference as norm_reference
from ops.kernels.norm_modulate.op import FusedAdaLN
from ops.kernels.qk_rope import reference as qk_reference
from ops.kernels.qk_rope.op import FusedQKNormRope, qk_norm_rope

SEGMENTS = Segments.packed([7, 0, 5], [1, 0, 2], num_mods=3)
ROWS = SEGMENTS.run2mod.long()[SEGMENTS.run.long()]
WIDTH = 32


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def same(actual: Tensor, expected: Tensor, wrt: list[Tensor]) -> None:
    cotangent = torch.randn_like(expected)
    torch.testing.assert_close(actual, expected)
    got, want = (torch.autograd.grad(out, wrt, cotangent, retain_graph=True) for out in (actual, expected))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("rms", [False, True], ids=["layer norm", "rms norm"])
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
def test_ada_ln_with_and_without_gate(rms: bool, affine: bool) -> None:
    x, y = leaf(12, WIDTH), leaf(12, WIDTH)
    gate, scale, shift = (leaf(3, WIDTH) for _ in range(3))
    for kind in (FusedAdaLN, FusedGateAdaLN):
        norm = kind(WIDTH, eps=1e-5, elementwise_affine=affine, rms=rms).double()
        assert list(norm.state_dict()) == (["weight"] + ["bias"] * (not rms) if affine else [])
        for parameter in norm.parameters():
            parameter.data.normal_()
        settings = {"weight": norm.weight, "bias": norm.bias, "eps": 1e-5, "rms": rms}
        if kind is FusedAdaLN:
            expected = norm_reference.ln_modulate(x, scale, shift, ROWS, **settings)
            same(norm(x, scale, shift, SEGMENTS), expected, [x, scale, shift, *norm.parameters()])
        else:
            residual = gate_reference.gate_residual(x, y, gate, ROWS)
            expected = norm_reference.ln_modulate(residual, scale, shift, ROWS, **settings)
            actual = norm(x, y, gate, scale, shift, SEGMENTS)
            torch.testing.assert_close(actual[0], residual)
            same(actual[1], expected, [x, y, gate, scale, shift, *norm.parameters()])


@pytest.mark.parametrize("per_head", [False, True], ids=["full width", "per head"])
def test_qk_norm_rope(per_head: bool) -> None:
    q, k = leaf(12, WIDTH), leaf(12, WIDTH)
    module = FusedQKNormRope(WIDTH, head_dim=8, per_head=per_head, eps=1e-5).double()
    for parameter in module.parameters():
        parameter.data.normal_()
    angles = torch.randn(12, 4, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    outs = module(q, k, cos, sin)
    for out, x, weight in zip(outs, (q, k), (module.weight_q, module.weight_k)):
        expected = qk_reference.qk_norm_rope(x, weight, cos, sin, head_dim=8, per_head=per_head, eps=1e-5)
        same(out, expected, [x, weight])


def saved_floats(call) -> int:
    """Numbers in distinct tensors that autograd keeps for the backward of the call."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        outs = call()
    del outs
    return sum(kept.values())


def test_gates_and_qk_norm_save_inputs_statistics_and_tables_only() -> None:
    size, stats, table = 12 * WIDTH, 12, 3 * WIDTH
    x, y = leaf(12, WIDTH, dtype=torch.float32), leaf(12, WIDTH, dtype=torch.float32)
    gate, scale, shift = (leaf(3, WIDTH, dtype=torch.float32) for _ in range(3))
    weight, cos, sin = leaf(WIDTH, dtype=torch.float32), torch.rand(12, 4), torch.rand(12, 4)
    assert saved_floats(lambda: gate_residual(x, y, gate, SEGMENTS)) == size + table  # y
    both = saved_floats(lambda: gate_residual_ln_modulate(x, y, gate, scale, shift, SEGMENTS))
    assert both == 2 * size + 2 * stats + 2 * table  # y and x', not x
    qk = saved_floats(lambda: qk_norm_rope(x, y, weight, weight, cos, sin, head_dim=8))
    assert qk == 2 * size + 2 * stats + WIDTH + 2 * 12 * 4
