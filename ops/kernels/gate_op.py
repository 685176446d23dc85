"""heddle::gate_residual, heddle::gate_residual_ln_modulate and their backwards as torch.library custom ops.

The gradient of the gate needs the branch output y, which is therefore saved; x' is saved as the residual stream that is
alive anyway. The norm statistics are those of x' as rounded on its store, because that is what the backward reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops.kernels import backend
from ops.kernels.norm_op import INDEX_SCHEMA, as_segments, cast_wanted
from ops.kernels.reference import compute_dtype
from ops.kernels.registry import custom_op, refuse_double_backward, register_autograd


def fake_gate_residual(x, y, gate, run, cu, run2mod, mod_off, mod_runs, residual_dtype):
    return x.new_empty(x.shape, dtype=residual_dtype)


@custom_op(
    "gate_residual",
    f"(Tensor x, Tensor y, Tensor gate, {INDEX_SCHEMA}, ScalarType residual_dtype) -> Tensor",
    fake_gate_residual,
)
def gate_residual(
    x: Tensor,
    y: Tensor,
    gate: Tensor,
    run: Tensor | None,
    cu: Tensor | None,
    run2mod: Tensor | None,
    mod_off: Tensor | None,
    mod_runs: Tensor | None,
    residual_dtype: torch.dtype,
) -> Tensor:
    segments = as_segments((run, cu, run2mod, mod_off, mod_runs))
    return backend.implementation(x, y, gate).gate_residual_fwd(x, y, gate, segments, residual_dtype)


def fake_gate_residual_bwd(dxo, y, gate, run, cu, run2mod, mod_off, mod_runs, gate_sum):
    return y.new_empty(y.shape), y.new_empty(gate.shape[0] if gate_sum else 0, y.shape[1], dtype=compute_dtype(y))


@custom_op(
    "gate_residual_bwd",
    f"(Tensor dxo, Tensor y, Tensor gate, {INDEX_SCHEMA}, bool gate_sum) -> (Tensor, Tensor)",
    fake_gate_residual_bwd,
)
def gate_residual_bwd(
    dxo: Tensor,
    y: Tensor,
    gate: Tensor,
    run: Tensor | None,
    cu: Tensor | None,
    run2mod: Tensor | None,
    mod_off: Tensor | None,
    mod_runs: Tensor | None,
    gate_sum: bool,
) -> tuple[Tensor, Tensor]:
    """dy and, with `gate_sum`, the gradient of the gate (else it is empty)."""
    segments = as_segments((run, cu, run2mod, mod_off, mod_runs))
    return backend.implementation(y, dxo, gate).gate_residual_bwd(dxo, y, gate, segments, gate_sum)


def _setup_gate(ctx: Any, inputs: Any, output: Any) -> None:
    x, y, gate, *index, _residual_dtype = inputs
    ctx.save_for_backward(y, gate, *index)
    ctx.x_dtype = x.dtype


def _backward_gate(ctx: Any, dxo: Tensor) -> tuple[Tensor | None, ...]:
    y, gate, *index = ctx.saved_tensors
    wanted = ctx.needs_input_grad[2]
    dy, dgate = gate_residual_bwd(dxo, y, gate, *index, wanted)
    return dxo.to(ctx.x_dtype), dy, dgate.to(gate.dtype) if wanted else None, *(None,) * 6


register_autograd(gate_residual, _backward_gate, _setup_gate)
refuse_double_backward(gate_residual_bwd, "gate_residual")


def fake_gate_residual_ln_modulate(
    x, y, gate, weight, bias, scale, shift, run, cu, run2mod, mod_off, mod_runs, eps, rms, residual_dtype, out_dtype
):
    num_rows, width = x.shape
    stats_dtype = compute_dtype(x.new_empty(0, dtype=residual_dtype))
    return (
        x.new_empty(num_rows, width, dtype=residual_dtype),
        x.new_empty(num_rows, width, dtype=out_dtype),
        x.new_empty(0 if rms else num_rows, dtype=stats_dtype),
        x.new_empty(num_rows, dtype=stats_dtype),
    )


@custom_op(
    "gate_residual_ln_modulate",
    f"(Tensor x, Tensor y, Tensor? gate, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, "
    f"{INDEX_SCHEMA}, float eps, bool rms, ScalarType residual_dtype, ScalarType out_dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    fake_gate_residual_ln_modulate,
)
def gate_residual_ln_modulate(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    run: Tensor | None,
    cu: Tensor | None,
    run2mod: Tensor | None,
    mod_off: Tensor | None,
    mod_runs: Tensor | None,
    eps: float,
    rms: bool,
    residual_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    segments = as_segments((run, cu, run2mod, mod_off, mod_runs))
    path = backend.implementation(x, y, gate, weight, bias, scale, shift)
    return path.gate_ln_modulate_fwd(
        x, y, gate, weight, bias, scale, shift, segments, eps, rms, residual_dtype, out_dtype
    )


def fake_gate_residual_ln_modulate_bwd(
    dxo,
    dh,
    xo,
    y,
    gate,
    weight,
    bias,
    scale,
    mean,
    rstd,
    run,
    cu,
    run2mod,
    mod_off,
    mod_runs,
    rms,
    x_dtype,
    sums,
    gate_sum,
):
    num_rows, width = xo.shape
    dtype = compute_dtype(xo, y)
    num_mods = 1 if mod_off is None else mod_off.shape[0] - 1
    table = xo.new_empty(num_mods if sums else 0, width, dtype=dtype)
    return (
        xo.new_empty(num_rows, width, dtype=x_dtype),
        y.new_empty(num_rows, width),
        xo.new_empty(num_mods if gate_sum else 0, width, dtype=dtype),
        table,
        torch.empty_like(table),
        xo.new_empty(width if sums and weight is not None else 0, dtype=dtype),
        xo.new_empty(width if sums and bias is not None else 0, dtype=dtype),
    )


@custom_op(
    "gate_residual_ln_modulate_bwd",
    f"(Tensor? dxo, Tensor dh, Tensor xo, Tensor y, Tensor? gate, Tensor? weight, Tensor? bias, Tensor? scale, "
    f"Tensor mean, Tensor rstd, {INDEX_SCHEMA}, bool rms, ScalarType x_dtype, bool sums, bool gate_sum) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake_gate_residual_ln_modulate_bwd,
)
def gate_residual_ln_modulate_bwd(
    dxo: Tensor | None,
    dh: Tensor,
    xo: Tensor,
    y: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    run: Tensor | None,
    cu: Tensor | None,
    run2mod: Tensor | None,
    mod_off: Tensor | None,
    mod_runs: Tensor | None,
    rms: bool,
    x_dtype: torch.dtype,
    sums: bool,
    gate_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`sums` and `gate_sum` ask for the gradients of the norm's tables and of the gate; else those are empty."""
    segments = as_segments((run, cu, run2mod, mod_off, mod_runs))
    path = backend.implementation(xo, dxo, dh, y, gate, weight, bias, scale)
    return path.gate_ln_modulate_bwd(
        dxo, dh, xo, y, gate, weight, bias, scale, mean, rstd, segments, rms, x_dtype, sums, gate_sum
    )


def _setup_gate_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, y, gate, weight, bias, scale, shift, *index, _eps, rms, _residual_dtype, _out_dtype = inputs
    xo, _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(xo, y, gate, weight, bias, scale, mean, rstd, *index)
    ctx.rms = rms
    ctx.x_dtype = x.dtype
    ctx.dtypes = [None if t is None else t.dtype for t in (gate, scale, shift, weight, bias)]


def _backward_gate_norm(ctx: Any, dxo: Tensor | None, dh: Tensor | None, *_stats: None) -> tuple[Tensor | None, ...]:
    xo, y, gate, weight, bias, scale, mean, rstd, *index = ctx.saved_tensors
    _, _, gate_wanted, weight_wanted, bias_wanted, scale_wanted, shift_wanted, *_ = ctx.needs_input_grad
    tail = (None,) * 9
    if dh is None:  # the norm's output was not used
        if dxo is None:
            return (None,) * 16
        if gate is None:
            return dxo.to(ctx.x_dtype), dxo.to(y.dtype), *(None,) * 5, *tail
        dy, dgate = gate_residual_bwd(dxo, y, gate, *index, gate_wanted)
        return dxo.to(ctx.x_dtype), dy, dgate.to(gate.dtype) if gate_wanted else None, *(None,) * 4, *tail
    wanted = (gate_wanted, scale_wanted, shift_wanted, weight_wanted, bias_wanted)
    dx, dy, *grads = gate_residual_ln_modulate_bwd(
        dxo,
        dh,
        xo,
        y,
        gate,
        weight,
        bias,
        scale,
        mean,
        rstd,
        *index,
        ctx.rms,
        ctx.x_dtype,
        any(wanted[1:]),
        gate_wanted,
    )
    dgate, dscale, dshift, dweight, dbias = cast_wanted(grads, wanted, ctx.dtypes)
    return dx, dy, dgate, dweight, dbias, dscale, dshift, *tail


register_autograd(gate_residual_ln_modulate, _backward_gate_norm, _setup_gate_norm)
refuse_double_backward(gate_residual_ln_modulate_bwd, "gate_residual_ln_modulate")
