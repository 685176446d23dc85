"""gate_residual and gate_residual_ln_modulate: what models call, the ops of heddle:: with their derivatives, and what
they are compared with.

The gradient of the gate needs the branch output y, which is therefore saved; x' is saved as the residual stream that is
alive anyway. The norm statistics are those of x' as rounded on its store, because that is what the backward reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from ops.kernels.base.arguments import (
    check_affine,
    check_same_shape,
    check_tables,
    num_rows,
    result_dtype,
    shaped,
    token_rows,
)
from ops.kernels.base.autograd import Context, InputGradients
from ops.kernels.base.backend import use_kernels
from ops.kernels.base.dtypes import compute_dtype
from ops.kernels.base.measured import Contest, MeasuredOp, OpCase, Outputs, RowLayout, Tensors, modulation, samples
from ops.kernels.base.registry import custom_op, refuse_double_backward, register_autograd
from ops.kernels.base.segments import INDEX_SCHEMA, Segments
from ops.kernels.gate_residual import cpu, reference
from ops.kernels.gate_residual.reference import GateBackwardCall, GateCall, GateNormBackwardCall, GateNormCall
from ops.kernels.norm_modulate import reference as norm_reference
from ops.kernels.norm_modulate.op import FusedAdaLN, cast_wanted, eager_ln, ln_modulate


def gate_residual(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None = None,
    segments: Segments | None = None,
    *,
    residual_dtype: torch.dtype | None = None,
) -> Tensor:
    """x + gate * y in residual_dtype (default: x's dtype, also under autocast), rounded once.

    x, y [..., D]; gate [S, D] as the tables of `ln_modulate`; without a gate x + y. ValueError for what does not fit.
    """
    check_same_shape(x, y)
    dtype = residual_dtype or x.dtype
    if gate is None:
        wide = torch.promote_types(torch.promote_types(x.dtype, y.dtype), dtype)
        return (x.to(wide) + y.to(wide)).to(dtype)
    x_ND, y_ND = token_rows(x), token_rows(y)
    (gate,), index = check_tables(x_ND, segments, gate=gate)
    assert gate is not None
    return shaped(forward(x_ND, y_ND, gate, *index, dtype), x)


def gate_residual_ln_modulate(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    segments: Segments | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    rms: bool = False,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """x' = x + gate * y and ln_modulate(x', scale, shift): one pass over memory instead of two.

    x, y [..., D]; gate, scale, shift [S, D], each optional. x' has residual_dtype (default: x's dtype, so an fp32
    residual stream stays fp32 beside a bf16 branch y); the norm is that of x' as stored. Tables, weights, dtypes, the
    second result and errors are those of `ln_modulate`. x' is saved for the backward: do not change it in place.
    """
    check_same_shape(x, y)
    x_ND, y_ND = token_rows(x), token_rows(y)
    dtype = residual_dtype or x.dtype
    given = [t for t in (gate, scale, shift) if t is not None]
    if segments is None and any(num_rows(t) != 1 for t in given):
        # Per-token tables leave nothing to sum up; the two ops move the same gradients.
        residual = gate_residual(x, y, gate, residual_dtype=dtype)
        out = result_dtype(residual, out_dtype)
        return residual, ln_modulate(residual, scale, shift, weight=weight, bias=bias, eps=eps, rms=rms, out_dtype=out)
    (gate, scale, shift), index = check_tables(x_ND, segments, gate=gate, scale=scale, shift=shift)
    check_affine(x_ND, weight, bias)
    residual, h, _, _ = norm_forward(
        x_ND, y_ND, gate, weight, bias, scale, shift, *index, eps, rms, dtype, result_dtype(x, out_dtype)
    )
    return residual.view(x.shape), shaped(h, x)  # x' is saved: as a view it is seen when it is changed in place


class FusedGateAdaLN(FusedAdaLN):
    """Gate, residual and norm with modulation: forward(x, y, gate, scale, shift, segments) -> (x', h)."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        y: Tensor,
        gate: Tensor | None = None,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        segments: Segments | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x, y [..., D], tables [S, D] -> x' and its norm [..., D]."""
        return gate_residual_ln_modulate(
            x,
            y,
            gate,
            scale,
            shift,
            segments,
            weight=self.weight,
            bias=self.bias,
            eps=self.eps,
            rms=self.rms,
            out_dtype=out_dtype,
        )


def fake_forward(call: GateCall) -> Tensor:
    """[N, D]"""
    return call.x.new_empty(call.x.shape, dtype=call.residual_dtype)


@custom_op(
    "gate_residual",
    f"(Tensor x, Tensor y, Tensor gate, {INDEX_SCHEMA}, ScalarType residual_dtype) -> Tensor",
    GateCall,
    fake_forward,
)
def forward(call: GateCall) -> Tensor:
    """[N, D]"""
    if use_kernels(call.x, call.y, call.gate):
        from ops.kernels.gate_residual import triton  # which not every machine has

        return triton.forward(call)
    return cpu.forward(call)


def fake_backward(call: GateBackwardCall) -> tuple[Tensor, Tensor]:
    """dy [N, D], dgate [S, D] or [0, D]"""
    y, rows = call.y, call.gate.shape[0] if call.gate_sum else 0
    return y.new_empty(y.shape), y.new_empty(rows, y.shape[1], dtype=compute_dtype(y))


@custom_op(
    "gate_residual_bwd",
    f"(Tensor dxo, Tensor y, Tensor gate, {INDEX_SCHEMA}, bool gate_sum) -> (Tensor, Tensor)",
    GateBackwardCall,
    fake_backward,
)
def backward(call: GateBackwardCall) -> tuple[Tensor, Tensor]:
    """dy [N, D] and, with `gate_sum`, the gradient of the gate [S, D] (else it is empty)."""
    if use_kernels(call.y, call.dxo, call.gate):
        from ops.kernels.gate_residual import triton  # which not every machine has

        return triton.backward(call)
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
    dy, dgate = backward(dxo, y, gate, *index, wanted)
    return dxo.to(ctx.x_dtype), dy, dgate.to(gate.dtype) if wanted else None, *(None,) * 6


register_autograd(forward, _backward_gate, _setup_gate)
refuse_double_backward(backward, "gate_residual")


def fake_norm_forward(call: GateNormCall) -> tuple[Tensor, ...]:
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
    fake_norm_forward,
)
def norm_forward(call: GateNormCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x' and its norm [N, D], mean [N] (empty for RMS) and rstd [N]."""
    if use_kernels(call.x, call.y, call.gate, call.weight, call.bias, call.scale, call.shift):
        from ops.kernels.gate_residual import triton  # which not every machine has

        return triton.norm_forward(call)
    return cpu.norm_forward(call)


def fake_norm_backward(call: GateNormBackwardCall) -> tuple[Tensor, ...]:
    """As `norm_backward`; [0, D] and [0] for what is not asked for."""
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
    fake_norm_backward,
)
def norm_backward(
    call: GateNormBackwardCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dy [N, D], then gradients of gate, scale, shift [S, D], weight, bias [D]; those not asked for are empty."""
    if use_kernels(call.xo, call.dxo, call.dh, call.y, call.gate, call.weight, call.bias, call.scale):
        from ops.kernels.gate_residual import triton  # which not every machine has

        return triton.norm_backward(call)
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
        dy, gate_sum = backward(dxo, y, gate, *index, gate_wanted)
        return dxo.to(ctx.x_dtype), dy, gate_sum.to(gate.dtype) if gate_wanted else None, *(None,) * 4, *tail
    wanted = (gate_wanted, scale_wanted, shift_wanted, weight_wanted, bias_wanted)
    saved = dxo, dh, xo, y, gate, weight, bias, scale, mean, rstd, *index
    dx, dy, *grads = norm_backward(*saved, ctx.rms, ctx.x_dtype, any(wanted[1:]), gate_wanted)
    dgate, dscale, dshift, dweight, dbias = cast_wanted(grads, wanted, ctx.dtypes)
    return dx, dy, dgate, dweight, dbias, dscale, dshift, *tail


register_autograd(norm_forward, _backward_gate_norm, _setup_gate_norm)
refuse_double_backward(norm_backward, "gate_residual_ln_modulate")


def _eager_gate(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
    return (samples(t["x"], layout) + modulation(t["gate"], layout, rows) * samples(t["y"], layout),)


def _eager_gate_ln(t: Tensors, layout: RowLayout, segments: Segments, rows: Tensor) -> Outputs:
    (residual,) = _eager_gate(t, layout, segments, rows)
    return residual, *eager_ln(t | {"x": residual.view(t["x"].shape)}, layout, segments, rows)


def _normed(t: Tensors, rows: Tensor) -> Outputs:
    residual = reference.gate_residual(t["x"], t["y"], t["gate"], rows)
    return residual, norm_reference.ln_modulate(residual, t["scale"], t["shift"], rows)


_GATE_NORM = OpCase(
    name="gate_residual_ln_modulate",
    # x is a stream, fp32 where asked for: the norm of a rounded x' differs by the rounding, which is no fault
    inputs={"x": "stream", "y": "tokens", "gate": "table", "scale": "table", "shift": "table"},
    ours=lambda t, segments: gate_residual_ln_modulate(
        t["x"], t["y"], t["gate"], t["scale"], t["shift"], segments, out_dtype=t["y"].dtype
    ),
    meaning=_normed,
)
_GATE = OpCase(
    name="gate_residual",
    inputs={"x": "tokens", "y": "tokens", "gate": "table"},
    ours=lambda t, segments: (gate_residual(t["x"], t["y"], t["gate"], segments),),
    meaning=lambda t, rows: (reference.gate_residual(t["x"], t["y"], t["gate"], rows),),
)


def _contests(liger: bool) -> tuple[Contest, ...]:
    normed = {"eager": _eager_gate_ln}
    return (
        Contest(name="gate_residual_ln_modulate", case=_GATE_NORM, turn=1, forward_T=4, backward_T=6, others=normed),
        Contest(name="gate_residual", case=_GATE, turn=2, forward_T=3, backward_T=3, others={"eager": _eager_gate}),
    )


MEASURED = MeasuredOp(cases=(_GATE_NORM, _GATE), contests=_contests)
