"""The gate ops from library calls, as norm_modulate/cpu.py. N tokens, D width, S rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.kernels.base.blocks import is_per_token, row, row_blocks
from ops.kernels.base.dtypes import compute_dtype
from ops.kernels.base.segments import Segments
from ops.kernels.gate_residual.reference import GateBackwardCall, GateCall, GateNormBackwardCall, GateNormCall
from ops.kernels.norm_modulate import cpu as norm
from ops.kernels.norm_modulate.cpu import effective_tables, no_table_grads, norm_block_bwd, table_grads
from ops.kernels.norm_modulate.reference import NormCall


def forward(call: GateCall) -> Tensor:
    """x + gate * y [N, D]."""
    return _residual(call.x, call.y, call.gate, call.segments, call.residual_dtype)


def backward(call: GateBackwardCall) -> tuple[Tensor, Tensor]:
    """dy in y's dtype and dgate [S, D] in the compute dtype (empty without gate_sum); dx is dxo itself."""
    dxo, y, gate, segments, gate_sum = call.dxo, call.y, call.gate, call.segments, call.gate_sum
    dtype = compute_dtype(y)
    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    dgate = _gate_grad(gate, y, dtype, gate_sum)
    for lo, hi, s in row_blocks(y.shape[0], y.shape[1], segments):
        _gate_block_bwd(dxo[lo:hi].to(dtype), y, gate, segments, lo, hi, s, dy, dgate)
    return dy, dgate


def norm_forward(call: GateNormCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x' = x + gate * y [N, D], its modulated norm [N, D], mean and rstd [N]."""
    xo = _residual(call.x, call.y, call.gate, call.segments, call.residual_dtype)
    index = call.run, call.cu, call.run2mod, call.mod_off, call.mod_runs
    tables = call.weight, call.bias, call.scale, call.shift
    return xo, *norm.forward(NormCall(xo, *tables, *index, call.eps, call.rms, call.out_dtype))


def norm_backward(call: GateNormBackwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dy [N, D], then the gradients of gate (empty without gate_sum), scale, shift, weight and bias (without sums).

    No per-token tables here.
    """
    dxo, dh, xo, y, gate, weight, bias, scale, mean, rstd = call[:10]
    segments, rms, sums, gate_sum = call.segments, call.rms, call.sums, call.gate_sum
    dtype = compute_dtype(xo, y)
    num_rows, width = xo.shape
    dx = torch.empty(num_rows, width, dtype=call.x_dtype, device=xo.device)
    dy = torch.empty(num_rows, width, dtype=y.dtype, device=xo.device)
    dgate = _gate_grad(gate, y, dtype, gate_sum)
    num_mods = segments.num_mods if segments is not None else 1
    sum_P = torch.zeros(num_mods, width, dtype=dtype, device=xo.device)
    sum_Q = torch.zeros(num_mods, width, dtype=dtype, device=xo.device)
    mul, _ = effective_tables(weight, bias, scale, None, dtype)
    for lo, hi, s in row_blocks(num_rows, width, segments):
        total, block_P, block_Q = norm_block_bwd(
            dh[lo:hi].to(dtype), xo[lo:hi].to(dtype), mean[lo:hi], rstd[lo:hi], row(mul, s), rms, sums
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


def _residual(
    x: Tensor, y: Tensor, gate: Tensor | None, segments: Segments | None, residual_dtype: torch.dtype
) -> Tensor:
    dtype = compute_dtype(x, y)
    out = torch.empty(x.shape, dtype=residual_dtype, device=x.device)
    for lo, hi, s in row_blocks(x.shape[0], x.shape[1], segments):
        gain = _gate_rows(gate, s, lo, hi, x, segments)
        if gain is None:
            out[lo:hi] = x[lo:hi].to(dtype) + y[lo:hi]
        elif x.dtype == y.dtype == gain.dtype == residual_dtype:  # addcmul rounds once, whatever the dtype
            torch.addcmul(x[lo:hi], y[lo:hi], gain, out=out[lo:hi])
        else:
            out[lo:hi] = torch.addcmul(x[lo:hi].to(dtype), y[lo:hi].to(dtype), gain.to(dtype))
    return out


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
