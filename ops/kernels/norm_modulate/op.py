"""heddle::ln_modulate and its backward as torch.library custom ops.

The backward is an op of its own, so torch.compile traces through it and selective checkpointing policies can name
both. Saved: x, mean, rstd (8 bytes a row) and the tables as they came; shift is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ops.kernels.base.autograd import Context, InputGradients
from ops.kernels.base.backend import use_kernels
from ops.kernels.base.blocks import is_per_token
from ops.kernels.base.dtypes import compute_dtype
from ops.kernels.base.registry import custom_op, refuse_double_backward, register_autograd
from ops.kernels.base.segments import INDEX_SCHEMA
from ops.kernels.norm_modulate import cpu
from ops.kernels.norm_modulate.call import NormBackwardCall, NormCall


def cast_wanted(
    grads: Sequence[Tensor], wanted: Sequence[bool], dtypes: Sequence[torch.dtype | None]
) -> list[Tensor | None]:
    """Table gradients in the dtypes of their tables; None for what needs no gradient."""
    return [
        grad.to(dtype) if want and dtype is not None else None
        for grad, want, dtype in zip(grads, wanted, dtypes, strict=True)
    ]


def per_token_with_weight(per_token: bool, weight: Tensor | None) -> str | None:
    return "per-token tables together with an affine norm" if per_token and weight is not None else None


def fake_ln_modulate(call: NormCall) -> tuple[Tensor, ...]:
    """h [N, D], mean [N] or [0], rstd [N]"""
    x, num_rows, dtype = call.x, call.x.shape[0], compute_dtype(call.x)
    return (
        x.new_empty(x.shape, dtype=call.out_dtype),
        x.new_empty(0 if call.rms else num_rows, dtype=dtype),
        x.new_empty(num_rows, dtype=dtype),
    )


@custom_op(
    "ln_modulate",
    f"(Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, {INDEX_SCHEMA}, "
    "float eps, bool rms, ScalarType out_dtype) -> (Tensor, Tensor, Tensor)",
    NormCall,
    fake_ln_modulate,
)
def ln_modulate(call: NormCall) -> tuple[Tensor, Tensor, Tensor]:
    """h [N, D], mean [N] (empty for RMS) and rstd [N]."""
    lacking = per_token_with_weight(is_per_token(call.x, call.scale, call.shift, call.segments), call.weight)
    if use_kernels(call.x, call.weight, call.bias, call.scale, call.shift, unsupported=lacking):
        from ops.kernels.norm_modulate import launch  # needs triton

        return launch.forward(call)
    return cpu.forward(call)


def fake_ln_modulate_bwd(call: NormBackwardCall) -> tuple[Tensor, ...]:
    """As `ln_modulate_bwd`; [0, D] and [0] for what is not asked for."""
    x, sums, dtype = call.x, call.sums, compute_dtype(call.x)
    num_rows, width = x.shape
    num_mods = num_rows if call.per_token else 1 if call.mod_off is None else call.mod_off.shape[0] - 1
    table = x.new_empty(num_mods if sums else 0, width, dtype=dtype)
    return (
        x.new_empty(num_rows, width),
        table,
        torch.empty_like(table),
        x.new_empty(width if sums and call.weight is not None else 0, dtype=dtype),
        x.new_empty(width if sums and call.bias is not None else 0, dtype=dtype),
    )


@custom_op(
    "ln_modulate_bwd",
    f"(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor mean, Tensor rstd, {INDEX_SCHEMA}, "
    "bool per_token, bool rms, bool sums) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    NormBackwardCall,
    fake_ln_modulate_bwd,
)
def ln_modulate_bwd(call: NormBackwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx [N, D], gradients of scale, shift [S, D], weight, bias [D]; without `sums` these are empty."""
    lacking = per_token_with_weight(call.per_token, call.weight)
    if use_kernels(call.x, call.dy, call.weight, call.bias, call.scale, unsupported=lacking):
        from ops.kernels.norm_modulate import launch  # needs triton

        return launch.backward(call)
    return cpu.backward(call)


class NormContext(Context, Protocol):
    """Flags and the dtypes of the tables beside the saved tensors."""

    rms: bool
    per_token: bool
    dtypes: list[torch.dtype | None]


def _setup(ctx: NormContext, inputs: Iterable[object], output: tuple[Tensor, Tensor, Tensor]) -> None:
    call = NormCall._make(inputs)
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(call.x, call.weight, call.bias, call.scale, mean, rstd, *call[5:10])
    ctx.rms = call.rms
    ctx.per_token = is_per_token(call.x, call.scale, call.shift, call.segments)
    ctx.dtypes = [None if t is None else t.dtype for t in (call.scale, call.shift, call.weight, call.bias)]


def _backward(ctx: NormContext, dy: Tensor | None, *_stats: None) -> InputGradients:
    if dy is None:
        return (None,) * 13
    x, weight, bias, scale, mean, rstd, *index = ctx.saved_tensors
    _, weight_wanted, bias_wanted, scale_wanted, shift_wanted, *_ = ctx.needs_input_grad
    wanted = (scale_wanted, shift_wanted, weight_wanted, bias_wanted)
    dx, *grads = ln_modulate_bwd(dy, x, weight, bias, scale, mean, rstd, *index, ctx.per_token, ctx.rms, any(wanted))
    dscale, dshift, dweight, dbias = cast_wanted(grads, wanted, ctx.dtypes)
    return dx, dweight, dbias, dscale, dshift, *(None,) * 8


register_autograd(ln_modulate, _backward, _setup)
refuse_double_backward(ln_modulate_bwd, "ln_modulate")
