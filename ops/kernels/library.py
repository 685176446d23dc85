"""The fused ops from library calls: the CPU path, and the fallback on a GPU for what the Triton kernels do not take.

Per run and block of rows, modulated LayerNorm *is* aten.native_layer_norm with weight 1 + scale and bias shift;
its backward returns dx, the scale gradient and the shift gradient at once. Blocks that stay in the L2 cache are
2 to 3 times faster than the chain over whole tensors. Reads the run boundaries on the host: on a GPU each call waits.

The backward's two column sums per table row, P = sum dy * xhat and Q = sum dy, are all that any table or affine
gradient needs (`table_grads`); the Triton kernels produce the same two.

N tokens, D width, S table rows. Inputs are [N, D] and [S, D], checked by the caller.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ops.kernels.reference import compute_dtype
from ops.kernels.segments import Segments

BLOCK_ELEMENTS = 2**18  # 1 MB of fp32: a block and its temporaries stay in the L2 cache
aten = torch.ops.aten


def ln_modulate_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    segments: Segments | None,
    eps: float,
    rms: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [N, D] in out_dtype, mean [N] (empty for RMS) and rstd [N] in the compute dtype."""
    dtype = compute_dtype(x)
    num_rows, width = x.shape
    y = torch.empty(num_rows, width, dtype=out_dtype, device=x.device)
    mean = torch.empty(0 if rms else num_rows, dtype=dtype, device=x.device)
    rstd = torch.empty(num_rows, dtype=dtype, device=x.device)
    per_token = is_per_token(x, scale, shift, segments)
    if per_token:
        mul, add = as_row(weight, dtype), as_row(bias, dtype)
    else:
        mul, add = effective_tables(weight, bias, scale, shift, dtype)
    for lo, hi, s in _blocks(num_rows, width, segments):
        block, gain, offset = x[lo:hi], _row(mul, s), _row(add, s)
        if rms:
            block = block.to(dtype)
            rstd[lo:hi] = torch.rsqrt(block.square().mean(-1) + eps)
            h = block * rstd[lo:hi, None]
            h = h if gain is None else h * gain
            h = h if offset is None else h + offset
        else:
            h, block_mean, block_rstd = _layer_norm(block, gain, offset, eps, dtype, dtype if per_token else out_dtype)
            mean[lo:hi], rstd[lo:hi] = block_mean.view(-1), block_rstd.view(-1)
        if per_token:
            h = h if scale is None else h * (1 + scale[lo:hi].to(dtype))
            h = h if shift is None else h + shift[lo:hi].to(dtype)
        y[lo:hi] = h
    return y, mean, rstd


def ln_modulate_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    segments: Segments | None,
    per_token: bool,
    rms: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx in x's dtype, then the gradients of scale, shift, weight and bias in fp32 or fp64 (empty without sums)."""
    dtype = compute_dtype(x)
    num_rows, width = x.shape
    dx = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    num_mods = segments.num_mods if segments is not None else 1
    sum_P = torch.zeros(num_mods, width, dtype=dtype, device=x.device)
    sum_Q = torch.zeros(num_mods, width, dtype=dtype, device=x.device)
    dscale, dshift = (
        torch.empty(num_rows if per_token and sums else 0, width, dtype=dtype, device=x.device) for _ in range(2)
    )
    mul, _ = effective_tables(weight, bias, None if per_token else scale, None, dtype)
    for lo, hi, s in _blocks(num_rows, width, segments):
        block, dy_block = x[lo:hi].to(dtype), dy[lo:hi].to(dtype)
        if per_token:
            if sums:
                xhat = (block if rms else block - mean[lo:hi, None]) * rstd[lo:hi, None]
                dscale[lo:hi] = dy_block * _affine(xhat, weight, bias)
                dshift[lo:hi] = dy_block
            dy_block = dy_block if scale is None else dy_block * (1 + scale[lo:hi].to(dtype))
        dx_block, block_P, block_Q = _norm_block_bwd(dy_block, block, mean[lo:hi], rstd[lo:hi], _row(mul, s), rms, sums)
        dx[lo:hi] = dx_block
        if sums:
            sum_P[s] += block_P
            sum_Q[s] += block_Q
    if not sums:
        return dx, *no_table_grads(width, dtype, x.device)
    if per_token:
        empty = dx.new_empty(0, dtype=dtype)
        return (
            dx,
            dscale,
            dshift,
            empty if weight is None else sum_P.view(-1),
            torch.empty_like(empty) if bias is None else sum_Q.view(-1),
        )
    return dx, *table_grads(sum_P, sum_Q, weight, bias, scale)


def gate_residual_fwd(
    x: Tensor, y: Tensor, gate: Tensor | None, segments: Segments | None, residual_dtype: torch.dtype
) -> Tensor:
    """x + gate * y [N, D]."""
    dtype = compute_dtype(x, y)
    out = torch.empty(x.shape, dtype=residual_dtype, device=x.device)
    for lo, hi, s in _blocks(x.shape[0], x.shape[1], segments):
        gain = _gate_rows(gate, s, lo, hi, x, segments)
        if gain is None:
            out[lo:hi] = x[lo:hi].to(dtype) + y[lo:hi]
        elif x.dtype == y.dtype == gain.dtype == residual_dtype:  # addcmul rounds once, whatever the dtype
            torch.addcmul(x[lo:hi], y[lo:hi], gain, out=out[lo:hi])
        else:
            out[lo:hi] = torch.addcmul(x[lo:hi].to(dtype), y[lo:hi].to(dtype), gain.to(dtype))
    return out


def gate_residual_bwd(
    dxo: Tensor, y: Tensor, gate: Tensor | None, segments: Segments | None, gate_sum: bool
) -> tuple[Tensor, Tensor]:
    """dy in y's dtype and dgate [S, D] in the compute dtype (empty without gate_sum); dx is dxo itself."""
    dtype = compute_dtype(y)
    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    dgate = _gate_grad(gate, y, dtype, gate_sum)
    for lo, hi, s in _blocks(y.shape[0], y.shape[1], segments):
        _gate_block_bwd(dxo[lo:hi].to(dtype), y, gate, segments, lo, hi, s, dy, dgate)
    return dy, dgate


def gate_ln_modulate_fwd(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    segments: Segments | None,
    eps: float,
    rms: bool,
    residual_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x' = x + gate * y, its modulated norm, mean and rstd."""
    xo = gate_residual_fwd(x, y, gate, segments, residual_dtype)
    return xo, *ln_modulate_fwd(xo, weight, bias, scale, shift, segments, eps, rms, out_dtype)


def gate_ln_modulate_bwd(
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
    segments: Segments | None,
    rms: bool,
    x_dtype: torch.dtype,
    sums: bool,
    gate_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dy, then the gradients of gate (empty without gate_sum), scale, shift, weight and bias (without sums).

    No per-token tables here.
    """
    dtype = compute_dtype(xo, y)
    num_rows, width = xo.shape
    dx = torch.empty(num_rows, width, dtype=x_dtype, device=xo.device)
    dy = torch.empty(num_rows, width, dtype=y.dtype, device=xo.device)
    dgate = _gate_grad(gate, y, dtype, gate_sum)
    num_mods = segments.num_mods if segments is not None else 1
    sum_P = torch.zeros(num_mods, width, dtype=dtype, device=xo.device)
    sum_Q = torch.zeros(num_mods, width, dtype=dtype, device=xo.device)
    mul, _ = effective_tables(weight, bias, scale, None, dtype)
    for lo, hi, s in _blocks(num_rows, width, segments):
        total, block_P, block_Q = _norm_block_bwd(
            dh[lo:hi].to(dtype), xo[lo:hi].to(dtype), mean[lo:hi], rstd[lo:hi], _row(mul, s), rms, sums
        )
        if sums:
            sum_P[s] += block_P
            sum_Q[s] += block_Q
        if dxo is not None:
            total = total + dxo[lo:hi].to(dtype)
        dx[lo:hi] = total
        _gate_block_bwd(total, y, gate, segments, lo, hi, s, dy, dgate)
    if not sums:
        return dx, dy, dgate, *no_table_grads(width, dtype, xo.device)
    return dx, dy, dgate, *table_grads(sum_P, sum_Q, weight, bias, scale)


def qk_norm_rope_fwd(
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
    """Normalised and rotated q and k [N, D]; rstd of each [N, groups], groups = heads if per_head else 1."""
    q_out, rstd_q = _qk_fwd(q, wq, cos, sin, head_dim, per_head, eps, out_dtype)
    k_out, rstd_k = _qk_fwd(k, wk, cos, sin, head_dim, per_head, eps, out_dtype)
    return q_out, k_out, rstd_q, rstd_k


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
    """dq, dk in the inputs' dtypes; dwq, dwk in the compute dtype."""
    dq, dwq = _qk_bwd(dqo, q, wq, cos, sin, rstd_q, head_dim, per_head)
    dk, dwk = _qk_bwd(dko, k, wk, cos, sin, rstd_k, head_dim, per_head)
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
    for lo, hi, table in _table_blocks(num_rows, width, cos):
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
    for lo, hi, table in _table_blocks(num_rows, width, cos):
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


def effective_tables(
    weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """weight * (1 + scale) and bias * (1 + scale) + shift, [S, D] in the compute dtype; None stands for 1 and 0."""
    gain = None if scale is None else 1 + scale.to(dtype)
    mul = as_row(weight, dtype) if gain is None else gain if weight is None else gain * weight.to(dtype)
    add = as_row(bias, dtype)
    if add is not None and gain is not None:
        add = add * gain
    if shift is not None:
        add = shift.to(dtype) if add is None else add + shift.to(dtype)
    if mul is not None and add is not None and mul.shape != add.shape:
        mul, add = torch.broadcast_tensors(mul, add)
    return mul, add


def table_grads(
    sum_P: Tensor, sum_Q: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of scale, shift [S, D] and weight, bias [D] from P = sum dy * xhat and Q = sum dy per table row."""
    dtype = sum_P.dtype
    gain = 1 if scale is None else 1 + scale.to(dtype)
    dscale = _affine(sum_P, weight, None)
    if bias is not None:
        dscale = dscale + sum_Q * bias.to(dtype)
    dweight = (sum_P * gain).sum(0) if weight is not None else sum_P.new_empty(0)
    dbias = (sum_Q * gain).sum(0) if bias is not None else sum_P.new_empty(0)
    return dscale, sum_Q, dweight, dbias


def no_table_grads(width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What stands for the gradients of scale, shift, weight and bias where none of them is wanted."""
    scale, shift = (torch.empty(0, width, dtype=dtype, device=device) for _ in range(2))
    weight, bias = (torch.empty(0, dtype=dtype, device=device) for _ in range(2))
    return scale, shift, weight, bias


def is_per_token(x: Tensor, scale: Tensor | None, shift: Tensor | None, segments: Segments | None) -> bool:
    """Whether the tables have one row per token (and there is more than one token)."""
    table = scale if scale is not None else shift
    return segments is None and table is not None and table.shape[0] == x.shape[0] and x.shape[0] != 1


def as_row(vector: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """[D] as a table of one row."""
    return None if vector is None else vector.to(dtype).view(1, -1)


def _affine(xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    h = xhat if weight is None else xhat * weight.to(xhat.dtype)
    return h if bias is None else h + bias.to(xhat.dtype)


def _layer_norm(
    block: Tensor, gain: Tensor | None, offset: Tensor | None, eps: float, dtype: torch.dtype, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd. With fp32 weights aten reads and writes bf16 itself, in fp32 arithmetic with one rounding.

    (Its backward does not: on bf16 tokens it sums the weight gradient in bf16, 1.4e-2 off over 300 rows.)
    """
    width = block.shape[-1:]
    if block.dtype != out_dtype or block.dtype == dtype or not (block.is_contiguous() and block.device.type == "cpu"):
        return aten.native_layer_norm(block.to(dtype), width, gain, offset, eps)
    ones, zeros = block.new_ones(width, dtype=dtype), block.new_zeros(width, dtype=dtype)
    return aten.native_layer_norm(
        block, width, ones if gain is None else gain, zeros if offset is None else offset, eps
    )


def _norm_block_bwd(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, gain: Tensor | None, rms: bool, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx of one block and its column sums P and Q, all in the compute dtype. Without `sums` P and Q mean nothing."""
    width = x.shape[-1]
    if not rms:
        weight = torch.ones(width, dtype=x.dtype, device=x.device) if gain is None else gain
        return aten.native_layer_norm_backward(
            dy, x, (width,), mean[:, None], rstd[:, None], weight, weight, (True, sums, sums)
        )
    xhat = x * rstd[:, None]
    grad = dy if gain is None else dy * gain
    dx = (grad - xhat * (grad * xhat).mean(-1, keepdim=True)) * rstd[:, None]
    return (dx, (dy * xhat).sum(0), dy.sum(0)) if sums else (dx, dx, dx)


def _gate_rows(gate: Tensor | None, s: int, lo: int, hi: int, x: Tensor, segments: Segments | None) -> Tensor | None:
    if gate is None:
        return None
    return gate[lo:hi] if is_per_token(x, gate, None, segments) else gate[s]


def _gate_grad(gate: Tensor | None, y: Tensor, dtype: torch.dtype, gate_sum: bool) -> Tensor:
    rows = gate.shape[0] if gate is not None and gate_sum else 0
    return torch.zeros(rows, y.shape[1], dtype=dtype, device=y.device)


def _gate_block_bwd(
    total: Tensor,
    y: Tensor,
    gate: Tensor | None,
    segments: Segments | None,
    lo: int,
    hi: int,
    s: int,
    dy: Tensor,
    dgate: Tensor,
) -> None:
    """Write dy of one block and add its part of dgate; `total` is the gradient of x + gate * y."""
    gain = _gate_rows(gate, s, lo, hi, y, segments)
    dy[lo:hi] = total if gain is None else total * gain.to(total.dtype)
    if gate is None or not dgate.shape[0]:
        return
    product = total * y[lo:hi].to(total.dtype)
    if is_per_token(y, gate, None, segments):
        dgate[lo:hi] = product
    else:
        dgate[s] += product.sum(0)


def _row(table: Tensor | None, s: int) -> Tensor | None:
    return None if table is None else table[s if table.shape[0] > 1 else 0]  # weight alone is a table of one row


def _blocks(num_rows: int, width: int, segments: Segments | None) -> Iterator[tuple[int, int, int]]:
    """(first row, end, table row) of blocks of at most BLOCK_ELEMENTS of one run."""
    step = max(BLOCK_ELEMENTS // width, 1)
    bounds, mods = ([0, num_rows], [0]) if segments is None else (segments.cu.tolist(), segments.run2mod.tolist())
    for run, s in enumerate(mods):
        for lo in range(bounds[run], bounds[run + 1], step):
            yield lo, min(lo + step, bounds[run + 1]), s


def _table_blocks(num_rows: int, width: int, cos: Tensor | None) -> Iterator[tuple[int, int, slice]]:
    """(first row, end, rows of the RoPE table) of blocks that do not cross a repetition of the table."""
    period = num_rows if cos is None else cos.shape[0]
    step = max(BLOCK_ELEMENTS // width, 1)
    for start in range(0, num_rows, max(period, 1)):
        for lo in range(0, period, step):
            hi = min(lo + step, period)
            yield start + lo, start + hi, slice(lo, hi)
