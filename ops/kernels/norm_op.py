"""heddle::ln_modulate and its backward as torch.library custom ops.

The backward is an op of its own, so torch.compile traces through it and selective checkpointing policies can name
both. Saved: x, mean, rstd (8 bytes a row) and the tables as they came; shift is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ops.kernels import backend
from ops.kernels.library import is_per_token
from ops.kernels.reference import compute_dtype
from ops.kernels.registry import custom_op, refuse_double_backward, register_autograd
from ops.kernels.segments import Segments

INDEX_SCHEMA = "Tensor? run, Tensor? cu, Tensor? run2mod, Tensor? mod_off, Tensor? mod_runs"
Index = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def as_segments(index: Any) -> Segments | None:
    """The five index arguments of an op as Segments; None when the tables have one row or one row per token."""
    return None if index[0] is None else Segments(*index)


def cast_wanted(grads: Sequence[Tensor], wanted: Sequence[bool], dtypes: Sequence[Any]) -> list[Tensor | None]:
    """Table gradients in the dtypes of their tables; None for what needs no gradient."""
    return [grad.to(dtype) if want else None for grad, want, dtype in zip(grads, wanted, dtypes, strict=True)]


def per_token_with_weight(per_token: bool, weight: Tensor | None) -> str | None:
    return "per-token tables together with an affine norm" if per_token and weight is not None else None


def fake_ln_modulate(x, weight, bias, scale, shift, run, cu, run2mod, mod_off, mod_runs, eps, rms, out_dtype):
    num_rows, width = x.shape
    dtype = compute_dtype(x)
    return (
        x.new_empty(num_rows, width, dtype=out_dtype),
        x.new_empty(0 if rms else num_rows, dtype=dtype),
        x.new_empty(num_rows, dtype=dtype),
    )


@custom_op(
    "ln_modulate",
    f"(Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, {INDEX_SCHEMA}, "
    "float eps, bool rms, ScalarType out_dtype) -> (Tensor, Tensor, Tensor)",
    fake_ln_modulate,
)
def ln_modulate(
    x: Tensor,
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
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    segments = as_segments((run, cu, run2mod, mod_off, mod_runs))
    lacking = per_token_with_weight(is_per_token(x, scale, shift, segments), weight)
    path = backend.implementation(x, weight, bias, scale, shift, unsupported=lacking)
    return path.ln_modulate_fwd(x, weight, bias, scale, shift, segments, eps, rms, out_dtype)


def fake_ln_modulate_bwd(
    dy, x, weight, bias, scale, mean, rstd, run, cu, run2mod, mod_off, mod_runs, per_token, rms, sums
):
    num_rows, width = x.shape
    dtype = compute_dtype(x)
    num_mods = num_rows if per_token else 1 if mod_off is None else mod_off.shape[0] - 1
    table = x.new_empty(num_mods if sums else 0, width, dtype=dtype)
    return (
        x.new_empty(num_rows, width),
        table,
        torch.empty_like(table),
        x.new_empty(width if sums and weight is not None else 0, dtype=dtype),
        x.new_empty(width if sums and bias is not None else 0, dtype=dtype),
    )


@custom_op(
    "ln_modulate_bwd",
    f"(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor mean, Tensor rstd, {INDEX_SCHEMA}, "
    "bool per_token, bool rms, bool sums) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake_ln_modulate_bwd,
)
def ln_modulate_bwd(
    dy: Tensor,
    x: Tensor,
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
    per_token: bool,
    rms: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Without `sums` (no table needs a gradient) dx alone; the other outputs are empty."""
    segments = as_segments((run, cu, run2mod, mod_off, mod_runs))
    path = backend.implementation(x, dy, weight, bias, scale, unsupported=per_token_with_weight(per_token, weight))
    return path.ln_modulate_bwd(dy, x, weight, bias, scale, mean, rstd, segments, per_token, rms, sums)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, scale, shift, *index, _eps, rms, _out_dtype = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, scale, mean, rstd, *index)
    ctx.rms = rms
    ctx.per_token = is_per_token(x, scale, shift, as_segments(index))
    ctx.dtypes = [None if t is None else t.dtype for t in (scale, shift, weight, bias)]


def _backward(ctx: Any, dy: Tensor | None, *_stats: None) -> tuple[Tensor | None, ...]:
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
