"""The fused ops from library calls: the CPU path, and the fallback on a GPU for what the Triton kernels do not take.

Per run and block of rows, modulated LayerNorm *is* aten.native_layer_norm with weight 1 + scale and bias shift;
its backward returns dx, the scale gradient and the shift gradient at once. Blocks that stay in the L2 cache are
2 to 3 times faster than the chain over whole tensors. Reads the run boundaries on the host: on a GPU each call waits.

The backward's two column sums per table row, P = sum dy * xhat and Q = sum dy, are all that any table or affine
gradient needs (`table_grads`); the Triton kernels produce the same two.

N tokens, D width, S table rows. Inputs are [N, D] and [S, D], checked by the caller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.kernels.base.blocks import as_row, is_per_token, row, row_blocks
from ops.kernels.base.dtypes import compute_dtype
from ops.kernels.norm_modulate.reference import NormBackwardCall, NormCall

aten = torch.ops.aten


def forward(call: NormCall) -> tuple[Tensor, Tensor, Tensor]:
    """y [N, D] in out_dtype, mean [N] (empty for RMS) and rstd [N] in the compute dtype."""
    x, weight, bias, scale, shift = call[:5]
    segments, eps, rms, out_dtype = call.segments, call.eps, call.rms, call.out_dtype
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
    for lo, hi, s in row_blocks(num_rows, width, segments):
        block, gain, offset = x[lo:hi], row(mul, s), row(add, s)
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


def backward(call: NormBackwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx [N, D] in x's dtype; gradients of scale, shift [S, D], weight, bias [D] in fp32 or fp64 (or empty)."""
    dy, x, weight, bias, scale, mean, rstd = call[:7]
    segments, per_token, rms, sums = call.segments, call.per_token, call.rms, call.sums
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
    for lo, hi, s in row_blocks(num_rows, width, segments):
        block, dy_block = x[lo:hi].to(dtype), dy[lo:hi].to(dtype)
        if per_token:
            if sums:
                xhat = (block if rms else block - mean[lo:hi, None]) * rstd[lo:hi, None]
                dscale[lo:hi] = dy_block * _affine(xhat, weight, bias)
                dshift[lo:hi] = dy_block
            dy_block = dy_block if scale is None else dy_block * (1 + scale[lo:hi].to(dtype))
        dx_block, block_P, block_Q = norm_block_bwd(dy_block, block, mean[lo:hi], rstd[lo:hi], row(mul, s), rms, sums)
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
    if weight is None and bias is None:
        return sum_P, sum_Q, sum_P.new_empty(0), sum_P.new_empty(0)
    dtype = sum_P.dtype
    gain = 1 if scale is None else 1 + scale.to(dtype)
    dscale = _affine(sum_P, weight, None)
    if bias is not None:
        dscale = dscale + sum_Q * bias.to(dtype)
    dweight = (sum_P * gain).sum(0) if weight is not None else sum_P.new_empty(0)
    dbias = (sum_Q * gain).sum(0) if bias is not None else sum_P.new_empty(0)
    return dscale, sum_Q, dweight, dbias


def no_table_grads(width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What stands for the gradients of scale, shift [0, D], weight and bias [0] where none of them is wanted."""
    scale, shift = (torch.empty(0, width, dtype=dtype, device=device) for _ in range(2))
    weight, bias = (torch.empty(0, dtype=dtype, device=device) for _ in range(2))
    return scale, shift, weight, bias


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
        return _aten_layer_norm(block.to(dtype), width, gain, offset, eps)
    ones, zeros = block.new_ones(width, dtype=dtype), block.new_zeros(width, dtype=dtype)
    return _aten_layer_norm(block, width, ones if gain is None else gain, zeros if offset is None else offset, eps)


def _aten_layer_norm(
    x: Tensor, width: torch.Size, gain: Tensor | None, offset: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    outputs: tuple[Tensor, Tensor, Tensor] = aten.native_layer_norm(x, width, gain, offset, eps)
    return outputs


def norm_block_bwd(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, gain: Tensor | None, rms: bool, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx [n, D] of a block, column sums P and Q [D], in the compute dtype. Without `sums` P and Q mean nothing."""
    width = x.shape[-1]
    if not rms:
        weight = torch.ones(width, dtype=x.dtype, device=x.device) if gain is None else gain
        grads: tuple[Tensor, Tensor, Tensor] = aten.native_layer_norm_backward(
            dy, x, (width,), mean[:, None].to(x.dtype), rstd[:, None].to(x.dtype), weight, weight, (True, sums, sums)
        )
        return grads
    xhat = x * rstd[:, None]
    grad = dy if gain is None else dy * gain
    dx = (grad - xhat * (grad * xhat).mean(-1, keepdim=True)) * rstd[:, None]
    return (dx, (dy * xhat).sum(0), dy.sum(0)) if sums else (dx, dx, dx)
