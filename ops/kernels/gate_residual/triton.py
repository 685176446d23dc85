"""The Triton path of the gate ops: the kernels of ln_modulate with a gate, and a launch table of their own.

N tokens, D width, S table rows. Nothing here reads a value from the device.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ops.kernels.base.blocks import is_per_token
from ops.kernels.base.compiled import CompileCase, CompiledOp
from ops.kernels.base.tuning import Launch, Table
from ops.kernels.gate_residual.reference import GateBackwardCall, GateCall, GateNormBackwardCall, GateNormCall
from ops.kernels.norm_modulate.triton import backward_cases, forward_cases, norm_grads, run_backward, run_forward

# (kernel, D, dtype of x, architecture)
TABLE: Table = {
    ("gate_forward", 1536, "bfloat16", "sm_90"): Launch(chunk=512, warps=2),
    ("gate_forward", 3072, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4),
    ("gate_forward", 5120, "bfloat16", "sm_90"): Launch(chunk=512, warps=4, load_bits=64),
    ("gate_backward", 1536, "bfloat16", "sm_90"): Launch(chunk=512, warps=4, stages=3, per_sm=3, load_bits=64),
    ("gate_backward", 3072, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4, stages=4, per_sm=1),
    ("gate_backward", 5120, "bfloat16", "sm_90"): Launch(chunk=1024, warps=8, stages=3, per_sm=1, load_bits=64),
    ("gate_forward", 1536, "float32", "sm_90"): Launch(chunk=512, warps=2),
    ("gate_forward", 3072, "float32", "sm_90"): Launch(chunk=1024, warps=4),
    ("gate_forward", 5120, "float32", "sm_90"): Launch(chunk=1024, warps=4),
    ("gate_backward", 1536, "float32", "sm_90"): Launch(chunk=512, warps=4, stages=3, per_sm=3, load_bits=64),
    ("gate_backward", 3072, "float32", "sm_90"): Launch(chunk=1024, warps=8, stages=3, per_sm=1, load_bits=64),
    ("gate_backward", 5120, "float32", "sm_90"): Launch(chunk=1024, warps=8, stages=2, per_sm=1, load_bits=64),
    # triton 3.7 spills 8 bytes with the launch of sm_90 where the norm is affine.
    ("gate_backward", 1536, "bfloat16", "sm_100"): Launch(chunk=512, warps=2, stages=3, per_sm=3),
}


def forward(call: GateCall) -> Tensor:
    """x + gate * y [N, D]."""
    residual, *_ = run_forward(
        call.x, table=TABLE, y=call.y, gate=call.gate, segments=call.segments, residual_dtype=call.residual_dtype
    )
    return residual


def backward(call: GateBackwardCall) -> tuple[Tensor, Tensor]:
    """dy [N, D] and dgate [S, D] (empty without gate_sum); dx is dxo itself."""
    dxo, y, gate, segments, gate_sum = call.dxo, call.y, call.gate, call.segments, call.gate_sum
    if is_per_token(y, gate, None, segments):
        dy = (gate.float() * dxo.float()).to(y.dtype)
        return dy, y.float() * dxo.float() if gate_sum else _no_gate_grad(y)
    _, dy, found = run_backward(
        table=TABLE, dxo=dxo, x=y, y=y, gate=gate, segments=segments, dx_dtype=y.dtype, gate_sum=gate_sum
    )
    return dy, found[0] if gate_sum else _no_gate_grad(y)


def norm_forward(call: GateNormCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x' = x + gate * y, its modulated norm [N, D], mean and rstd [N]."""
    return run_forward(
        call.x,
        table=TABLE,
        y=call.y,
        gate=call.gate,
        weight=call.weight,
        bias=call.bias,
        scale=call.scale,
        shift=call.shift,
        segments=call.segments,
        eps=call.eps,
        rms=call.rms,
        residual_dtype=call.residual_dtype,
        out_dtype=call.out_dtype,
    )


def norm_backward(call: GateNormBackwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dy [N, D], then the gradients of gate, scale, shift, weight and bias; those not asked for are empty."""
    dx, dy, found = run_backward(
        table=TABLE,
        dh=call.dh,
        dxo=call.dxo,
        x=call.xo,
        y=call.y,
        gate=call.gate,
        weight=call.weight,
        scale=call.scale,
        mean=call.mean,
        rstd=call.rstd,
        segments=call.segments,
        rms=call.rms,
        dx_dtype=call.x_dtype,
        sums=call.sums,
        gate_sum=call.gate_sum,
    )
    dgate = found[-1] if call.gate_sum else _no_gate_grad(call.y)
    return dx, dy, dgate, *norm_grads(found, call.sums, call.weight, call.bias, call.scale, call.xo)


def _no_gate_grad(y: Tensor) -> Tensor:
    return y.new_empty(0, y.shape[1], dtype=torch.float32)


def cases(kernel: str, width: int, launch: Launch, fp32_residual: bool) -> Iterator[CompileCase]:
    """Cases of one row of the launch table."""
    yield from (forward_cases if kernel == "gate_forward" else backward_cases)(kernel, width, launch, fp32_residual)


COMPILED = CompiledOp(table=TABLE, cases=cases)
