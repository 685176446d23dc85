"""Norm, modulation, gate and QK-norm with RoPE of diffusion transformers, fused and trainable.

    h = ln_modulate(x, scale, shift, segments)                      # norm(x) * (1 + scale) + shift
    x, h = gate_residual_ln_modulate(x, attn, gate, scale, shift, segments)
    q, k = qk_norm_rope(q, k, wq, wk, cos, sin, head_dim=128)

Tokens are packed [N, D] (any leading dimensions are flattened); `segments` says which row of the [S, D] tables each
token uses. On CUDA the Triton kernels run, elsewhere library calls; both mean what `reference.py` in the op's folder
under ops/kernels/ says.

dtypes: activations bf16, fp16, fp32 or fp64, tables independently. Arithmetic, statistics and table gradients are fp32
(fp64 for fp64 inputs), with one rounding at each store. Results have the autocast dtype under autocast (except fp64
inputs), else x's dtype, unless out_dtype is given. Gradients of tables are sums over the local tokens, zero for rows
without tokens: summing them over sequence-parallel shards gives the gradient of the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ops.kernels.base.segments import Index, Segments
from ops.kernels.gate_residual import op as gate_op
from ops.kernels.norm_modulate import op as norm_op
from ops.kernels.qk_rope import op as qk_op

NO_INDEX: Index = (None, None, None, None, None)


def ln_modulate(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    segments: Segments | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    rms: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """(norm(x) * weight + bias) * (1 + scale) + shift; LayerNorm, or RMSNorm with rms.

    x [..., D]; scale, shift [S, D] (other leading dimensions are flattened; chunks of a wider table are fine); weight,
    bias [D]. Without segments, tables of one row apply to all tokens and tables of N rows to one token each.
    """
    x_ND = _rows(x)
    scale, shift, index = _tables(x_ND, segments, scale=scale, shift=shift)
    _check_affine(x_ND, weight, bias)
    h, _, _ = norm_op.ln_modulate(x_ND, weight, bias, scale, shift, *index, eps, rms, _out_dtype(x, out_dtype))
    return h.view(x.shape)


def gate_residual(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None = None,
    segments: Segments | None = None,
    *,
    residual_dtype: torch.dtype | None = None,
) -> Tensor:
    """x + gate * y in residual_dtype (default: x's dtype). x, y [..., D]; gate [S, D]; without a gate x + y."""
    _check_same_shape(x, y)
    dtype = residual_dtype or x.dtype
    if gate is None:
        wide = torch.promote_types(torch.promote_types(x.dtype, y.dtype), dtype)
        return (x.to(wide) + y.to(wide)).to(dtype)
    x_ND, y_ND = _rows(x), _rows(y)
    gate, index = _tables(x_ND, segments, gate=gate)
    assert gate is not None
    return gate_op.gate_residual(x_ND, y_ND, gate, *index, dtype).view(x.shape)


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
    residual stream stays fp32 beside a bf16 branch y); the norm is that of x' as stored.
    """
    _check_same_shape(x, y)
    x_ND, y_ND = _rows(x), _rows(y)
    dtype = residual_dtype or x.dtype
    given = [t for t in (gate, scale, shift) if t is not None]
    if segments is None and any(_num_rows(t) != 1 for t in given):
        # Per-token tables leave nothing to sum up; the two ops move the same gradients.
        residual = gate_residual(x, y, gate, residual_dtype=dtype)
        out = _out_dtype(residual, out_dtype)
        return residual, ln_modulate(residual, scale, shift, weight=weight, bias=bias, eps=eps, rms=rms, out_dtype=out)
    gate, scale, shift, index = _tables(x_ND, segments, gate=gate, scale=scale, shift=shift)
    _check_affine(x_ND, weight, bias)
    residual, h, _, _ = gate_op.gate_residual_ln_modulate(
        x_ND, y_ND, gate, weight, bias, scale, shift, *index, eps, rms, dtype, _out_dtype(x, out_dtype)
    )
    return residual.view(x.shape), h.view(x.shape)


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
    q_ND, k_ND = _rows(q), _rows(k)
    width = q.shape[-1]
    _check_device("k", k, q)
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
            _check_device(name, weight, q_ND)
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin come together; one of them is None.")
    if cos is not None and sin is not None:
        _check_rope(q_ND, k_ND, cos, sin, head_dim)
        cos, sin = cos.contiguous(), sin.contiguous()
    q_out, k_out, _, _ = qk_op.qk_norm_rope(
        q_ND, k_ND, wq, wk, cos, sin, head_dim, per_head, eps, _out_dtype(q, out_dtype)
    )
    return q_out.view(q.shape), k_out.view(k.shape)


class FusedAdaLN(nn.Module):
    """Norm with optional affine weights and modulation: forward(x, scale, shift, segments)."""

    def __init__(self, dim: int, eps: float = 1e-6, elementwise_affine: bool = False, rms: bool = False) -> None:
        super().__init__()
        self.eps, self.rms = eps, rms
        self.weight = nn.Parameter(torch.ones(dim)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(dim)) if elementwise_affine and not rms else None

    def forward(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        segments: Segments | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x [..., D], tables [S, D] -> [..., D]."""
        return ln_modulate(
            x,
            scale,
            shift,
            segments,
            weight=self.weight,
            bias=self.bias,
            eps=self.eps,
            rms=self.rms,
            out_dtype=out_dtype,
        )


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


class FusedQKNormRope(nn.Module):
    """RMSNorm of q and k with weights, then RoPE: forward(q, k, cos, sin)."""

    def __init__(self, dim: int, head_dim: int, per_head: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        self.head_dim, self.per_head, self.eps = head_dim, per_head, eps
        self.weight_q = nn.Parameter(torch.ones(head_dim if per_head else dim))
        self.weight_k = nn.Parameter(torch.ones(head_dim if per_head else dim))

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor | None = None, sin: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """q, k [..., D], cos, sin [n, head_dim / 2] -> q, k [..., D]."""
        return qk_norm_rope(
            q, k, self.weight_q, self.weight_k, cos, sin, head_dim=self.head_dim, per_head=self.per_head, eps=self.eps
        )


def _rows(x: Tensor) -> Tensor:
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(f"expected floating point tokens [..., N, D], got {x.dtype} {tuple(x.shape)}.")
    if x.shape[-1] == 0:
        raise ValueError(f"tokens {tuple(x.shape)} have width 0; a norm needs at least one value per token.")
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _num_rows(table: Tensor) -> int:
    return table.numel() // table.shape[-1]


def _tables(x_ND: Tensor, segments: Segments | None, **tables: Tensor | None) -> tuple[Any, ...]:
    """The tables as [S, D] views, then the index tensors of the op; ValueError if they do not fit the tokens."""
    num_rows, width = x_ND.shape
    flat: list[Tensor | None] = []
    for name, table in tables.items():
        if table is None:
            flat.append(None)
            continue
        _check_device(name, table, x_ND)
        if table.shape[-1] != width:
            raise ValueError(f"{name} has width {table.shape[-1]}, the tokens {width}; tables are [S, D].")
        table = table if table.ndim == 2 else table.reshape(-1, width)
        if segments is not None and table.shape[0] != segments.num_mods:
            raise ValueError(
                f"{name} has {table.shape[0]} rows but the segments address {segments.num_mods}; "
                "build the segments with num_mods = rows of the table."
            )
        if segments is None and table.shape[0] not in (1, num_rows):
            raise ValueError(
                f"{name} has {table.shape[0]} rows for {num_rows} tokens; without segments a table has "
                "one row, or one row per token. Pass Segments."
            )
        flat.append(table)
    if segments is not None and segments.num_rows != num_rows:
        raise ValueError(
            f"the segments cover {segments.num_rows} tokens, x has {num_rows}; rebuild them for this micro-batch."
        )
    if segments is not None:
        _check_device("segments", segments.run, x_ND)
    _check_same_rows(flat)
    used = segments is not None and any(table is not None for table in flat)
    return *flat, segments.tensors() if segments is not None and used else NO_INDEX


def _check_device(name: str, tensor: Tensor, x_ND: Tensor) -> None:
    if tensor.device != x_ND.device:
        raise ValueError(f"{name} on {tensor.device}, the tokens on {x_ND.device}; move it with .to().")


def _check_same_rows(tables: list[Tensor | None]) -> None:
    rows = {table.shape[0] for table in tables if table is not None}
    if len(rows) > 1:
        raise ValueError(f"tables have {sorted(rows)} rows; scale, shift and gate share one index.")


def _check_affine(x_ND: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            continue
        _check_device(name, vector, x_ND)
        if vector.shape != x_ND.shape[1:]:
            raise ValueError(f"{name} has shape {tuple(vector.shape)}; the tokens need ({x_ND.shape[1]},).")
    if bias is not None and weight is None:
        raise ValueError("bias without weight; an affine norm has both (give shift for a modulation).")


def _check_rope(q_ND: Tensor, k_ND: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> None:
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[1] != head_dim // 2:
        raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must both be [n, {head_dim // 2}].")
    if cos.requires_grad or sin.requires_grad:
        raise ValueError(
            "cos and sin get no gradient from the fused op; detach() them, or use ops.kernels.qk_rope.reference."
        )
    _check_device("cos", cos, q_ND)
    _check_device("sin", sin, q_ND)
    for name, x in (("q", q_ND), ("k", k_ND)):
        if x.shape[0] and (cos.shape[0] == 0 or x.shape[0] % cos.shape[0]):
            raise ValueError(f"{x.shape[0]} tokens of {name} are not a multiple of the {cos.shape[0]} rows of cos.")


def _check_same_shape(x: Tensor, y: Tensor) -> None:
    if x.shape != y.shape:
        raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)} must have the same shape.")
    _check_device("y", y, x)


def _out_dtype(x: Tensor, requested: torch.dtype | None) -> torch.dtype:
    if requested is not None:
        return requested
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype
