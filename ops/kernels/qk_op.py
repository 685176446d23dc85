"""heddle::qk_norm_rope and its backward as torch.library custom ops.

One op handles q and k, so that a launch covers both and the RoPE row is read once per token. Saved: q, k (the
projections' outputs), rstd and the weights; the rotation is undone on the gradient, not on saved tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops.kernels import backend
from ops.kernels.reference import compute_dtype
from ops.kernels.registry import custom_op, refuse_double_backward, register_autograd

SETTINGS_SCHEMA = "int head_dim, bool per_head"


def unsupported_head(head_dim: int, cos: Tensor | None, per_head: bool) -> str | None:
    """What the kernels lack for this head size, if anything: heads are register tiles of a power of two."""
    if (per_head or cos is not None) and (head_dim & (head_dim - 1) or head_dim < 16):
        return f"head_dim {head_dim} is not a power of two of at least 16"
    return None


def fake_qk_norm_rope(q, k, wq, wk, cos, sin, head_dim, per_head, eps, out_dtype):
    groups = q.shape[1] // head_dim if per_head else 1
    return (
        q.new_empty(q.shape, dtype=out_dtype),
        k.new_empty(k.shape, dtype=out_dtype),
        q.new_empty(q.shape[0], groups, dtype=compute_dtype(q)),
        k.new_empty(k.shape[0], groups, dtype=compute_dtype(k)),
    )


@custom_op(
    "qk_norm_rope",
    f"(Tensor q, Tensor k, Tensor? wq, Tensor? wk, Tensor? cos, Tensor? sin, {SETTINGS_SCHEMA}, float eps, "
    "ScalarType out_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    fake_qk_norm_rope,
)
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    wq: Tensor | None,
    wk: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    head_dim: int,
    per_head: bool,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    path = backend.implementation(q, k, wq, wk, unsupported=unsupported_head(head_dim, cos, per_head))
    return path.qk_norm_rope_fwd(q, k, wq, wk, cos, sin, head_dim, per_head, eps, out_dtype)


def fake_qk_norm_rope_bwd(dqo, dko, q, k, wq, wk, cos, sin, rstd_q, rstd_k, head_dim, per_head):
    size = head_dim if per_head else q.shape[1]
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
    fake_qk_norm_rope_bwd,
)
def qk_norm_rope_bwd(
    dqo: Tensor,
    dko: Tensor,
    q: Tensor,
    k: Tensor,
    wq: Tensor | None,
    wk: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rstd_q: Tensor,
    rstd_k: Tensor,
    head_dim: int,
    per_head: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    path = backend.implementation(q, k, dqo, dko, wq, wk, unsupported=unsupported_head(head_dim, cos, per_head))
    return path.qk_norm_rope_bwd(dqo, dko, q, k, wq, wk, cos, sin, rstd_q, rstd_k, head_dim, per_head)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, wq, wk, cos, sin, head_dim, per_head, _eps, _out_dtype = inputs
    _, _, rstd_q, rstd_k = output
    ctx.mark_non_differentiable(rstd_q, rstd_k)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, wq, wk, cos, sin, rstd_q, rstd_k)
    ctx.head_dim, ctx.per_head = head_dim, per_head


def _backward(ctx: Any, dqo: Tensor | None, dko: Tensor | None, *_stats: None) -> tuple[Tensor | None, ...]:
    q, k, wq, wk, cos, sin, rstd_q, rstd_k = ctx.saved_tensors
    if dqo is None and dko is None:
        return (None,) * 10
    dq, dk, dwq, dwk = qk_norm_rope_bwd(
        torch.zeros_like(q) if dqo is None else dqo,
        torch.zeros_like(k) if dko is None else dko,
        q,
        k,
        wq,
        wk,
        cos,
        sin,
        rstd_q,
        rstd_k,
        ctx.head_dim,
        ctx.per_head,
    )
    return (dq, dk, None if wq is None else dwq.to(wq.dtype), None if wk is None else dwk.to(wk.dtype), *(None,) * 6)


register_autograd(qk_norm_rope, _backward, _setup)
refuse_double_backward(qk_norm_rope_bwd, "qk_norm_rope")
