"""qk_norm_rope from library calls, as norm_modulate/cpu.py. N tokens, D width."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ops.kernels.base.blocks import BLOCK_ELEMENTS
from ops.kernels.base.dtypes import compute_dtype
from ops.kernels.qk_rope.reference import QKBackwardCall, QKCall

_DEVICE_ELEMENTS = 2**23  # of a block on a GPU, which takes longer to launch a smaller one than to compute it


def forward(call: QKCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised and rotated q and k [N, D]; rstd of each [N, groups], groups = heads if per_head else 1."""
    settings = call.cos, call.sin, call.head_dim, call.per_head, call.eps, call.out_dtype
    q_out, rstd_q = _qk_fwd(call.q, call.wq, *settings)
    k_out, rstd_k = _qk_fwd(call.k, call.wk, *settings)
    return q_out, k_out, rstd_q, rstd_k


def backward(call: QKBackwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk [N, D] in the inputs' dtypes; dwq, dwk [D] or [head_dim] in the compute dtype."""
    dq, dwq = _qk_bwd(call.dqo, call.q, call.wq, call.cos, call.sin, call.rstd_q, call.head_dim, call.per_head)
    dk, dwk = _qk_bwd(call.dko, call.k, call.wk, call.cos, call.sin, call.rstd_k, call.head_dim, call.per_head)
    return dq, dk, dwq, dwk


def _qk_fwd(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    head_dim: int,
    per_head: bool,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(x)
    num_rows, width = x.shape
    y = torch.empty(num_rows, width, dtype=out_dtype, device=x.device)
    groups = width // head_dim if per_head else 1
    rstd = torch.empty(num_rows, groups, dtype=dtype, device=x.device)
    cos, sin = _repeated(cos, x), _repeated(sin, x)
    for lo, hi, table in _table_blocks(x, cos):
        x_NGE = x[lo:hi].to(dtype).unflatten(-1, (groups, -1))
        rstd[lo:hi] = torch.rsqrt(x_NGE.square().mean(-1) + eps)
        h = x_NGE * rstd[lo:hi, :, None]
        h = h if weight is None else h * weight.to(dtype)
        if cos is not None and sin is not None:
            h = rotate(h.flatten(-2).unflatten(-1, (-1, head_dim)), cos[table].to(dtype), sin[table].to(dtype))
        y[lo:hi] = h.flatten(-2)
    return y, rstd


def _qk_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rstd: Tensor,
    head_dim: int,
    per_head: bool,
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(x)
    num_rows, width = x.shape
    groups = width // head_dim if per_head else 1
    dx = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    dweight = torch.zeros(head_dim if per_head else width, dtype=dtype, device=x.device)
    cos, sin = _repeated(cos, x), _repeated(sin, x)
    for lo, hi, table in _table_blocks(x, cos):
        grad = dy[lo:hi].to(dtype)
        if cos is not None and sin is not None:  # the inverse rotation
            grad = rotate(grad.unflatten(-1, (-1, head_dim)), cos[table].to(dtype), -sin[table].to(dtype)).flatten(-2)
        grad, r = grad.unflatten(-1, (groups, -1)), rstd[lo:hi, :, None]
        xhat = x[lo:hi].to(dtype).unflatten(-1, (groups, -1)) * r
        dweight += (grad * xhat).sum((0, 1))
        grad = grad if weight is None else grad * weight.to(dtype)
        dx[lo:hi] = ((grad - xhat * (grad * xhat).mean(-1, keepdim=True)) * r).flatten(-2)
    return dx, dweight


def rotate(h_NHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of every head by the angles of cos, sin [N, head_dim / 2]."""
    even, odd = h_NHE.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def _repeated(table: Tensor | None, x: Tensor) -> Tensor | None:
    """A table that is shorter than a block (frames, for attention over time), as often as a block has room for it."""
    if table is None:
        return None
    times = min(_block_rows(x), x.shape[0]) // max(table.shape[0], 1)
    return table.repeat(times, 1) if times > 1 else table


def _table_blocks(x: Tensor, cos: Tensor | None) -> Iterator[tuple[int, int, slice]]:
    """(first row, end, rows of the RoPE table) of blocks that do not cross a repetition of the table."""
    num_rows, step = x.shape[0], _block_rows(x)
    period = num_rows if cos is None else cos.shape[0]
    for start in range(0, num_rows, max(period, 1)):
        end = min(start + period, num_rows)
        for lo in range(start, end, step):
            hi = min(lo + step, end)
            yield lo, hi, slice(lo - start, hi - start)


def _block_rows(x: Tensor) -> int:
    return max((BLOCK_ELEMENTS if x.device.type == "cpu" else _DEVICE_ELEMENTS) // x.shape[1], 1)
