"""heddle::qk_norm_rope and its backward as torch.library custom ops.

One op handles q and k, so that a launch covers both and the RoPE row is read once per token. Saved: q, k (the
projections' outputs), rstd and the weights; the rotation is undone on the gradient, not on saved tensors.
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
from ops.kernels.qk_rope import cpu
from ops.kernels.qk_rope.call import QKBackwardCall, QKCall

SETTINGS_SCHEMA = "int head_dim, bool per_head"


def unsupported_head(head_dim: int, cos: Tensor | None, per_head: bool) -> str | None:
    """What the kernels lack for this head size, if anything: heads are register tiles of a power of two."""
    if (per_head or cos is not None) and (head_dim & (head_dim - 1) or head_dim < 16):
        return f"head_dim {head_dim} is not a power of two of at least 16"
    return None


def fake_qk_norm_rope(call: QKCall) -> tuple[Tensor, ...]:
    """q, k [N, D], rstd of each [N, G]"""
    q, k = call.q, call.k
    groups = q.shape[1] // call.head_dim if call.per_head else 1
    return (
        q.new_empty(q.shape, dtype=call.out_dtype),
        k.new_empty(k.shape, dtype=call.out_dtype),
        q.new_empty(q.shape[0], groups, dtype=compute_dtype(q)),
        k.new_empty(k.shape[0], groups, dtype=compute_dtype(k)),
    )


@custom_op(
    "qk_norm_rope",
    f"(Tensor q, Tensor k, Tensor? wq, Tensor? wk, Tensor? cos, Tensor? sin, {SETTINGS_SCHEMA}, float eps, "
    "ScalarType out_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    QKCall,
    fake_qk_norm_rope,
)
def qk_norm_rope(call: QKCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k [N, D] and rstd of each [N, G]."""
    lacking = unsupported_head(call.head_dim, call.cos, call.per_head)
    if use_kernels(call.q, call.k, call.wq, call.wk, unsupported=lacking):
        from ops.kernels.qk_rope import launch  # needs triton

        return launch.forward(call)
    return cpu.forward(call)


def fake_qk_norm_rope_bwd(call: QKBackwardCall) -> tuple[Tensor, ...]:
    """dq, dk [N, D], dwq, dwk [D] or [head_dim]"""
    q, k = call.q, call.k
    size = call.head_dim if call.per_head else q.shape[1]
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        q.new_empty(size, dtype=compute_dtype(q)),
        k.new_empty(size, dtype=compute_dtype(k)),
    )


@custom_op(
    "qk_norm_rope_bwd",
    "(Tensor dqo, Tensor dko, Tensor q, Tensor k, Tensor? wq, Tensor? wk, Tensor? cos, Tensor? sin, "
    f"Tensor rstd_q, Tensor rstd_k, {SETTINGS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    QKBackwardCall,
    fake_qk_norm_rope_bwd,
)
def qk_norm_rope_bwd(call: QKBackwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk [N, D], and gradients of wq and wk [D] or [head_dim]."""
    lacking = unsupported_head(call.head_dim, call.cos, call.per_head)
    if use_kernels(call.q, call.k, call.dqo, call.dko, call.wq, call.wk, unsupported=lacking):
        from ops.kernels.qk_rope import launch  # needs triton

        return launch.backward(call)
    return cpu.backward(call)


class QKContext(Context, Protocol):
    """Sizes of heads beside the saved tensors."""

    head_dim: int
    per_head: bool


def _setup(ctx: QKContext, inputs: Iterable[object], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    call = QKCall._make(inputs)
    _, _, rstd_q, rstd_k = output
    ctx.mark_non_differentiable(rstd_q, rstd_k)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*call[:6], rstd_q, rstd_k)
    ctx.head_dim, ctx.per_head = call.head_dim, call.per_head


def _backward(ctx: QKContext, dqo: Tensor | None, dko: Tensor | None, *_stats: None) -> InputGradients:
    q, k, wq, wk, cos, sin, rstd_q, rstd_k = ctx.saved_tensors
    if dqo is None and dko is None:
        return (None,) * 10
    dqo = torch.zeros_like(q) if dqo is None else dqo
    dko = torch.zeros_like(k) if dko is None else dko
    saved = q, k, wq, wk, cos, sin, rstd_q, rstd_k
    dq, dk, dwq, dwk = qk_norm_rope_bwd(dqo, dko, *saved, ctx.head_dim, ctx.per_head)
    return (dq, dk, None if wq is None else dwq.to(wq.dtype), None if wk is None else dwk.to(wk.dtype), *(None,) * 6)


register_autograd(qk_norm_rope, _backward, _setup)
refuse_double_backward(qk_norm_rope_bwd, "qk_norm_rope")
