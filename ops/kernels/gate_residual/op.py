"""heddle::gate_residual, heddle::gate_residual_ln_modulate and their backwards as torch.library custom ops.

The gradient of the gate needs the branch output y, which is therefore saved; x' is saved as the residual stream that is
alive anyway. The norm statistics are those of x' as rounded on its store, because that is what the backward reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from ops.kernels.base.autograd import Context, InputGradients
from ops.kernels.base.backend import use_kernels
from ops.kernels.base.dtypes import compute_dtype
from ops.kernels.base.registry import custom_op, refuse_double_backward, register_autograd
from ops.kernels.base.segments import INDEX_SCHEMA
from ops.kernels.gate_residual import cpu
from ops.kernels.gate_residual.call import GateBackwardCall, GateCall, GateNormBackwardCall, GateNormCall
from ops.kernels.norm_modulate.op import cast_wanted


def fake_gate_residual(call: GateCall) -> Tensor:
    """[N, D]"""
    return call.x.new_empty(call.x.shape, dtype=call.residual_dtype)


@custom_op(
    "gate_residual",
    f"(Tensor x, Tensor y, Tensor gate, {INDEX_SCHEMA}, ScalarType residual_dtype) -> Tensor",
    GateCall,
    fake_gate_residual,
)
def gate_residual(call: GateCall) -> Tensor:
    """[N, D]"""
    if use_kernels(call.x, call.y, call.gate):
        from ops.kernels.gate_residual import launch  # needs triton

        return launch.forward(call)
    return cpu.forward(call)


def fake_gate_residual_bwd(call: GateBackwardCall) -> tuple[Tensor, Tensor]:
    """dy [N, D], dgate [S, D] or [0, D]"""
    y, rows = call.y, call.gate.shape[0] if call.gate_sum else 0
    return y.new_empty(y.shape), y.new_empty(rows, y.shape[1], dtype=compute_dtype(y))


@custom_op(
    "gate_residual_bwd",
    f"(Tensor dxo, Tensor y, Tensor gate, {INDEX_SCHEMA}, bool gate_sum) -> (Tensor, Tensor)",
    GateBackwardCall,
    fake_gate_residual_bwd,
)
def gate_residual_bwd(call: GateBackwardCall) -> tuple[Tensor, Tensor]:
    """dy [N, D] and, with `gate_sum`, the gradient of the gate [S, D] (else it is empty)."""
    if use_kernels(call.y, call.dxo, call.gate):
        from ops.kernels.gate_residual import launch  # needs triton

        return launch.backward(call)
    return cpu.backward(call)


class GateContext(Context, Protocol):
    """The dtype of x beside the saved tensors."""

    x_dtype: torch.dtype


def _setup_gate(ctx: GateContext, inputs: Iterable[object], output: Tensor) -> None:
    call = GateCall._make(inputs)
    ctx.save_for_backward(call.y, call.gate, *call[3:8])
    ctx.x_dtype = call.x.dtype


def _backward_gate(ctx: GateContext, dxo: Tensor) -> InputGradients:
    y, gate, *index = ctx.saved_tensors
    wanted = ctx.needs_input_grad[2]
    dy, dgate = gate_residual_bwd(dxo, y, gate, *index, wanted)
    return dxo.to(ctx.x_dtype), dy, dgate.to(gate.dtype) if wanted else None, *(None,) * 6


register_autograd(gate_residual, _backward_gate, _setup_gate)
refuse_double_backward(gate_residual_bwd, "gate_residual")


def fake_gate_residual_ln_modulate(call: GateNormCall) -> tuple[Tensor, ...]:
    """x', h [N, D], mean [N] or [0], rstd [N]"""
    x, num_rows = call.x, call.x.shape[0]
    stats_dtype = compute_dtype(x.new_empty(0, dtype=call.residual_dtype))
    return (
        x.new_empty(x.shape, dtype=call.residual_dtype),
        x.new_empty(x.shape, dtype=call.out_dtype),
        x.new_empty(0 if call.rms else num_rows, dtype=stats_dtype),
        x.new_empty(num_rows, dtype=stats_dtype),
    )


@custom_op(
    "gate_residual_ln_modulate",
    f"(Tensor x, Tensor y, Tensor? gate, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, "
    f"{INDEX_SCHEMA}, float eps, bool rms, ScalarType residual_dtype, ScalarType out_dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    GateNormCall,
    fake_gate_residual_ln_modulate,
)
def gate_residual_ln_modulate(call: GateNormCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x' and its norm [N, D], mean [N] (empty for RMS) and rstd [N]."""
    if use_kernels(call.x, call.y, call.gate, call.weight, call.bias, call.scale, call.shift):
        from ops.kernels.gate_residual import launch  # needs triton

        return launch.norm_forward(call)
    return cpu.norm_forward(call)


def fake_gate_residual_ln_modulate_bwd(call: GateNormBackwardCall) -> tuple[Tensor, ...]:
    """As `gate_residual_ln_modulate_bwd`; [0, D] and [0] for what is not asked for."""
    xo, y, sums = call.xo, call.y, call.sums
    num_rows, width = xo.shape
    dtype = compute_dtype(xo, y)
    num_mods = 1 if call.mod_off is None else call.mod_off.shape[0] - 1
    table = xo.new_empty(num_mods if sums else 0, width, dtype=dtype)
    return (
        xo.new_empty(num_rows, width, dtype=call.x_dtype),
        y.new_empty(num_rows, width),
        xo.new_empty(num_mods if call.gate_sum else 0, width, dtype=dtype),
        table,
        torch.empty_like(table),
        xo.new_empty(width if sums and call.weight is not None else 0, dtype=dtype),
        xo.new_empty(width if sums and call.bias is not None else 0, dtype=dtype),
    )


@custom_op(
    "gate_residual_ln_modulate_bwd",
    f"(Tensor? dxo, Tensor dh, Tensor xo, Tensor y, Tensor? gate, Tensor? weight, Tensor? bias, Tensor? scale, "
    f"Tensor mean, Tensor rstd, {INDEX_SCHEMA}, bool rms, ScalarType x_dtype, bool sums, bool gate_sum) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    GateNormBackwardCall,
    fake_gate_residual_ln_modulate_bwd,
)
def gate_residual_ln_modulate_bwd(
    call: GateNormBackwardCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dy [N, D], then gradients of gate, scale, shift [S, D], weight, bias [D]; those not asked for are empty."""
    if use_kernels(call.xo, call.dxo, call.dh, call.y, call.gate, call.weight, call.bias, call.scale):
        from ops.kernels.gate_residual import launch  # needs triton

        return launch.norm_backward(call)
    return cpu.norm_backward(call)


class GateNormContext(Context, Protocol):
    """Flags and the dtypes of x and the tables beside the saved tensors."""

    rms: bool
    x_dtype: torch.dtype
    dtypes: list[torch.dtype | None]


def _setup_gate_norm(
    ctx: GateNormContext, inputs: Iterable[object], output: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    call = GateNormCall._make(inputs)
    xo, _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(xo, call.y, call.gate, call.weight, call.bias, call.scale, mean, rstd, *call[7:12])
    ctx.rms = call.rms
    ctx.x_dtype = call.x.dtype
    ctx.dtypes = [None if t is None else t.dtype for t in (call.gate, call.scale, call.shift, call.weight, call.bias)]


def _backward_gate_norm(ctx: GateNormContext, dxo: Tensor | None, dh: Tensor | None, *_stats: None) -> InputGradients:
    xo, y, gate, weight, bias, scale, mean, rstd, *index = ctx.saved_tensors
    _, _, gate_wanted, weight_wanted, bias_wanted, scale_wanted, shift_wanted, *_ = ctx.needs_input_grad
    tail = (None,) * 9
    if dh is None:  # the norm's output was not used
        if dxo is None:
            return (None,) * 16
        if gate is None:
            return dxo.to(ctx.x_dtype), dxo.to(y.dtype), *(None,) * 5, *tail
        dy, gate_sum = gate_residual_bwd(dxo, y, gate, *index, gate_wanted)
        return dxo.to(ctx.x_dtype), dy, gate_sum.to(gate.dtype) if gate_wanted else None, *(None,) * 4, *tail
    wanted = (gate_wanted, scale_wanted, shift_wanted, weight_wanted, bias_wanted)
    saved = dxo, dh, xo, y, gate, weight, bias, scale, mean, rstd, *index
    dx, dy, *grads = gate_residual_ln_modulate_bwd(*saved, ctx.rms, ctx.x_dtype, any(wanted[1:]), gate_wanted)
    dgate, dscale, dshift, dweight, dbias = cast_wanted(grads, wanted, ctx.dtypes)
    return dx, dy, dgate, dweight, dbias, dscale, dshift, *tail


register_autograd(gate_residual_ln_modulate, _backward_gate_norm, _setup_gate_norm)
refuse_double_backward(gate_residual_ln_modulate_bwd, "gate_residual_ln_modulate")
