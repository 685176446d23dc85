"""qk_norm_rope: what models call, the op heddle::qk_norm_rope with its derivative, and what it is compared with.

One op handles q and k, so that a launch covers both and the RoPE row is read once per token. Saved: q, k (the
projections' outputs), rstd and the weights; the rotation is undone on the gradient, not on saved tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.kernels.base.arguments import check_device, result_dtype, shaped, token_rows
from ops.kernels.base.autograd import Context, InputGradients
from ops.kernels.base.backend import use_kernels
from ops.kernels.base.dtypes import compute_dtype
from ops.kernels.base.measured import (
    EPS,
    HEAD_DIM,
    Contest,
    InputKind,
    MeasuredOp,
    OpCase,
    Outputs,
    RowLayout,
    Tensors,
)
from ops.kernels.base.registry import custom_op, refuse_double_backward, register_autograd
from ops.kernels.base.segments import Segments
from ops.kernels.qk_rope import cpu, reference
from ops.kernels.qk_rope.reference import QKBackwardCall, QKCall

SETTINGS_SCHEMA = "int head_dim, bool per_head"


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    wq: Tensor | None,
    wk: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    head_dim: int,
    per_head: bool = False,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of q and k, then rotation of the pairs (2i, 2i + 1) of every head.

    q, k [..., D] with D = heads * head_dim (flatten(-2) a [..., heads, head_dim] view of a packed qkv). The norm runs
    over D with weights [D] (Wan), or over each head with weights [head_dim] if per_head (FLUX, HunyuanVideo). A
    full-width norm needs all heads: call it before the Ulysses all-to-all.
    cos, sin [n, head_dim / 2] in fp32 or fp64; token r uses table row r % n, so n = N, or N = B * n. Without them only
    the norm, and q and k may have different numbers of tokens (cross attention).

    q and k come back in their shapes, in out_dtype (default: autocast's where that is on, else the dtype of q).
    Gradients for q, k and the weights; cos and sin take none. Raises ValueError for what does not fit.
    """
    q_ND, k_ND = token_rows(q), token_rows(k)
    width = q.shape[-1]
    check_device("k", k, q)
    if k.shape[-1] != width or head_dim < 2 or width % head_dim or head_dim % 2:
        raise ValueError(
            f"q and k are {width} and {k.shape[-1]} wide with head_dim {head_dim}; "
            "both must be the same multiple of an even head_dim, that of one head."
        )
    for name, weight in (("wq", wq), ("wk", wk)):
        if weight is not None and weight.shape != (head_dim if per_head else width,):
            raise ValueError(
                f"{name} has shape {tuple(weight.shape)}; a norm over {'each head' if per_head else 'D'} "
                f"needs ({head_dim if per_head else width},)."
            )
        if weight is not None:
            check_device(name, weight, q_ND)
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin come together; one of them is None.")
    if cos is not None and sin is not None:
        _check_rope(q_ND, k_ND, cos, sin, head_dim)
        _check_heads_are_flat(q, cos, head_dim)
        cos, sin = cos.contiguous(), sin.contiguous()
    q_out, k_out, _, _ = forward(q_ND, k_ND, wq, wk, cos, sin, head_dim, per_head, eps, result_dtype(q, out_dtype))
    return shaped(q_out, q), shaped(k_out, k)


class FusedQKNormRope(nn.Module):
    """RMSNorm of q and k with weights, then RoPE: forward(q, k, cos, sin), as `qk_norm_rope`.

    dim is the width of all heads together. weight_q and weight_k are [head_dim] with per_head, else [dim].
    """

    def __init__(
        self,
        dim: int,
        head_dim: int,
        per_head: bool = False,
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.head_dim, self.per_head, self.eps = dim, head_dim, per_head, eps
        size = head_dim if per_head else dim
        self.weight_q = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.weight_k = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights 1: also after `to_empty`, which gives a module from the meta device memory without values."""
        nn.init.ones_(self.weight_q)
        nn.init.ones_(self.weight_k)

    def extra_repr(self) -> str:
        return f"{self.dim}, head_dim={self.head_dim}, per_head={self.per_head}, eps={self.eps}"

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor | None = None, sin: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """q, k [..., D], cos, sin [n, head_dim / 2] -> q, k [..., D]."""
        return qk_norm_rope(
            q, k, self.weight_q, self.weight_k, cos, sin, head_dim=self.head_dim, per_head=self.per_head, eps=self.eps
        )


def _check_rope(q_ND: Tensor, k_ND: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> None:
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[1] != head_dim // 2:
        raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must both be [n, {head_dim // 2}].")
    if cos.requires_grad or sin.requires_grad:
        raise ValueError(
            "cos and sin get no gradient from the fused op; detach() them, or use ops.kernels.qk_rope.reference."
        )
    check_device("cos", cos, q_ND)
    check_device("sin", sin, q_ND)
    for name, x in (("q", q_ND), ("k", k_ND)):
        if x.shape[0] and (cos.shape[0] == 0 or x.shape[0] % cos.shape[0]):
            raise ValueError(f"{x.shape[0]} tokens of {name} are not a multiple of the {cos.shape[0]} rows of cos.")


def _check_heads_are_flat(q: Tensor, cos: Tensor, head_dim: int) -> None:
    """Rows of [B, L, heads, head_dim] are heads: what was made for L tokens would rotate each by another's angle."""
    if q.ndim < 4 or q.shape[-1] != head_dim:
        return
    if cos.shape[0] not in {math.prod(q.shape[first:-1]) for first in range(q.ndim - 1)}:
        raise ValueError(
            f"q {tuple(q.shape)} ends with one head, and the {cos.shape[0]} rows of cos fit no number of its last "
            "dimensions; flatten(-2) q and k to [..., heads * head_dim] first."
        )


def _unsupported_head(head_dim: int, cos: Tensor | None, per_head: bool) -> str | None:
    """What the kernels lack for this head size, if anything: heads are register tiles of a power of two."""
    if (per_head or cos is not None) and (head_dim & (head_dim - 1) or head_dim < 16):
        return f"head_dim {head_dim} is not a power of two of at least 16"
    return None


def fake_forward(call: QKCall) -> tuple[Tensor, ...]:
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
    fake_forward,
)
def forward(call: QKCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k [N, D] and rstd of each [N, G]."""
    lacking = _unsupported_head(call.head_dim, call.cos, call.per_head)
    if use_kernels(call.q, call.k, call.wq, call.wk, unsupported=lacking):
        from ops.kernels.qk_rope import triton  # which not every machine has

        return triton.forward(call)
    return cpu.forward(call)


def fake_backward(call: QKBackwardCall) -> tuple[Tensor, ...]:
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
    fake_backward,
)
def backward(call: QKBackwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk [N, D], and gradients of wq and wk [D] or [head_dim]."""
    lacking = _unsupported_head(call.head_dim, call.cos, call.per_head)
    if use_kernels(call.q, call.k, call.dqo, call.dko, call.wq, call.wk, unsupported=lacking):
        from ops.kernels.qk_rope import triton  # which not every machine has

        return triton.backward(call)
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
    dq, dk, dwq, dwk = backward(dqo, dko, *saved, ctx.head_dim, ctx.per_head)
    return (dq, dk, None if wq is None else dwq.to(wq.dtype), None if wk is None else dwk.to(wk.dtype), *(None,) * 6)


register_autograd(forward, _backward, _setup)
refuse_double_backward(backward, "qk_norm_rope")


def _case(name: str, per_head: bool) -> OpCase:
    def ours(t: Tensors, segments: Segments) -> Outputs:
        return qk_norm_rope(t["q"], t["k"], t["wq"], t["wk"], t["cos"], t["sin"], head_dim=HEAD_DIM, per_head=per_head)

    def meaning(t: Tensors, rows: Tensor) -> Outputs:
        def turned(x: Tensor, weight: Tensor) -> Tensor:
            return reference.qk_norm_rope(x, weight, t["cos"], t["sin"], head_dim=HEAD_DIM, per_head=per_head)

        return turned(t["q"], t["wq"]), turned(t["k"], t["wk"])

    weight: InputKind = "head" if per_head else "vector"
    inputs: dict[str, InputKind] = {"q": "tokens", "k": "tokens", "wq": weight, "wk": weight}
    return OpCase(name=name, inputs=inputs | {"cos": "cos", "sin": "sin"}, ours=ours, meaning=meaning)


def _eager_qk(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
    """RMSNorm and RoPE of Diffusers' Wan."""
    return tuple(
        _eager_rope(F.rms_norm(t[x].float(), t[x].shape[-1:], t[w], EPS).type_as(t[x]), t["cos"], t["sin"])
        for x, w in (("q", "wq"), ("k", "wk"))
    )


def _eager_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, HEAD_DIM // 2, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    out = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return out.flatten(1).type_as(x)


_FULL_WIDTH = _case("qk_norm_rope", per_head=False)


def _contests(liger: bool) -> tuple[Contest, ...]:
    others = {"eager": _eager_qk}
    return (Contest(name="qk_norm_rope", case=_FULL_WIDTH, turn=3, forward_T=4, backward_T=6, others=others),)


MEASURED = MeasuredOp(cases=(_FULL_WIDTH, _case("qk_norm_rope-per-head", per_head=True)), contests=_contests)
