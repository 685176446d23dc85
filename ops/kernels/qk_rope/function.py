"""qk_norm_rope as models call it: arguments checked, tokens as rows, then the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.kernels.base.arguments import check_device, result_dtype, token_rows
from ops.kernels.qk_rope import op


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
    """
    q_ND, k_ND = token_rows(q), token_rows(k)
    width = q.shape[-1]
    check_device("k", k, q)
    if k.shape[-1] != width or width % head_dim or head_dim % 2:
        raise ValueError(
            f"q and k are {width} and {k.shape[-1]} wide with head_dim {head_dim}; "
            "both must be the same multiple of an even head_dim."
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
        cos, sin = cos.contiguous(), sin.contiguous()
    q_out, k_out, _, _ = op.qk_norm_rope(
        q_ND, k_ND, wq, wk, cos, sin, head_dim, per_head, eps, result_dtype(q, out_dtype)
    )
    return q_out.view(q.shape), k_out.view(k.shape)


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
