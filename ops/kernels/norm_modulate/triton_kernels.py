"""Triton kernels of norm, modulation and gate. Traffic in units of T, the bytes of one [N, D] activation.

| kernel             | forward              | backward                          |
|--------------------|----------------------|-----------------------------------|
| ln_modulate        | 2T (read x, write y) | 3T (read x, dy; write dx)         |
| gate_residual      | 3T                   | 3T (read dx', y; write dy)        |
| gate + ln_modulate | 4T                   | 6T (read dh, dx', x', y; write 2) |

That is the minimum. The backward stays at it because it is one pass, whose column sums go to slots that a second kernel
adds (`ops/kernels/base/slots.py`).
(A second pass over x and dy, the D-tile reduction of AdaptiveLoad, costs 5T; see `ablations.py`.)

Offsets: int64 for the base of a row or run, int32 inside the loop; int64 in the loop costs 60 registers at D = 3072.
"""

# Triton code is no Python: tuples grow by +, and types are those of the compiler.
# ruff: noqa: RUF005
# mypy: ignore-errors

import triton
import triton.language as tl

from ops.kernels.base.rows import (
    add,
    axpy,
    load_row,
    multiply,
    normalise,
    one_plus,
    store_row,
    sum_row,
    sum_rows,
    to_fp32,
    zero_row,
)

# Sizes change with every micro-batch: compiled as plain integers, never as the constant 1 or for divisibility by 16.
SIZES = ["num_rows", "rows_per_program", "num_slots"]


@triton.jit
def forward_kernel(
    x_ptr,
    y_ptr,
    gate_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    run_ptr,
    run2mod_ptr,
    residual_ptr,
    out_ptr,
    mean_ptr,
    rstd_ptr,
    x_stride8,
    y_stride8,
    gate_stride8,
    scale_stride8,
    shift_stride8,
    eps,
    D: tl.constexpr,
    CH: tl.constexpr,
    NC: tl.constexpr,
    HAS_Y: tl.constexpr,
    HAS_GATE: tl.constexpr,
    NORM: tl.constexpr,
    RMS: tl.constexpr,
    AFFINE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    INDEX: tl.constexpr,
):
    """One row: residual = x + gate * y (HAS_Y), then out = norm(residual) * (1 + scale) + shift (NORM).

    INDEX says how a row finds its table row: "runs" through run and run2mod, "one" row 0, "token" its own number.
    """
    row = tl.program_id(0).to(tl.int64)
    mod = row * 0
    if INDEX == "runs":
        mod = tl.load(run2mod_ptr + tl.load(run_ptr + row)).to(tl.int64)
    elif INDEX == "token":
        mod = row
    x = to_fp32(load_row(x_ptr + row * (x_stride8 * 8), D, CH, NC, "evict_first"), NC)
    if HAS_Y:
        y = to_fp32(load_row(y_ptr + row * (y_stride8 * 8), D, CH, NC, "evict_first"), NC)
        if HAS_GATE:
            gate = to_fp32(load_row(gate_ptr + mod * (gate_stride8 * 8), D, CH, NC, "evict_last"), NC)
            x = axpy(gate, y, x, NC)
        else:
            x = add(x, y, NC)
        store_row(residual_ptr + row * D, x, D, CH, NC)
        rounded = ()  # statistics of x' as stored: the backward reads it back
        for c in tl.static_range(NC):
            rounded = rounded + (x[c].to(residual_ptr.dtype.element_ty).to(tl.float32),)
        x = rounded
    if NORM:
        h, mean, rstd = normalise(x, D, CH, NC, eps, RMS)
        if not RMS:
            tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)
        if AFFINE:
            h = multiply(h, to_fp32(load_row(weight_ptr, D, CH, NC, "evict_last"), NC), NC)
        if HAS_BIAS:
            h = add(h, to_fp32(load_row(bias_ptr, D, CH, NC, "evict_last"), NC), NC)
        if HAS_SCALE:
            scale = to_fp32(load_row(scale_ptr + mod * (scale_stride8 * 8), D, CH, NC, "evict_last"), NC)
            h = multiply(h, one_plus(scale, NC), NC)
        if HAS_SHIFT:
            h = add(h, to_fp32(load_row(shift_ptr + mod * (shift_stride8 * 8), D, CH, NC, "evict_last"), NC), NC)
        store_row(out_ptr + row * D, h, D, CH, NC)


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    dh_ptr,
    dxo_ptr,
    x_ptr,
    y_ptr,
    gate_ptr,
    weight_ptr,
    scale_ptr,
    mean_ptr,
    rstd_ptr,
    run_ptr,
    cu_ptr,
    run2mod_ptr,
    dx_ptr,
    dy_ptr,
    slots_ptr,
    num_rows,
    rows_per_program,
    num_slots,
    dh_stride8,
    dxo_stride8,
    x_stride8,
    y_stride8,
    gate_stride8,
    scale_stride8,
    D: tl.constexpr,
    CH: tl.constexpr,
    NC: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    RMS: tl.constexpr,
    AFFINE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SUMS: tl.constexpr,
    HAS_DXO: tl.constexpr,
    HAS_Y: tl.constexpr,
    HAS_GATE: tl.constexpr,
    GATE_SUM: tl.constexpr,
    INDEX: tl.constexpr,
):
    """total = dxo + norm'(dh); dx = total (NORM); dy = gate * total (HAS_Y); column sums to the slots.

    slots [SUMS ? 2 : 0 + GATE_SUM, num_slots, D] fp32: sum dh * xhat, sum dh (if SUMS), sum y * total (if GATE_SUM).
    Frozen tables need none: without SUMS and GATE_SUM there are no slots, and y is not read.
    """
    program = tl.program_id(0)
    row = program * rows_per_program
    last = tl.minimum(row + rows_per_program, num_rows)
    while row < last:
        run, mod, end = run_at(row, last, run_ptr, cu_ptr, run2mod_ptr, INDEX)
        base = row.to(tl.int64)
        x_base, dh_base = x_ptr + base * (x_stride8 * 8), dh_ptr + base * (dh_stride8 * 8)
        dxo_base, y_base = dxo_ptr + base * (dxo_stride8 * 8), y_ptr + base * (y_stride8 * 8)
        dx_base, dy_base = dx_ptr + base * D, dy_ptr + base * D
        # Table rows stay in registers in their own dtype for the whole run: the pipelined loads below bypass L1.
        if AFFINE:
            weight = load_row(weight_ptr, D, CH, NC, "evict_last")
        if HAS_SCALE:
            scale = load_row(scale_ptr + mod * (scale_stride8 * 8), D, CH, NC, "evict_last")
        if HAS_GATE:
            gate = load_row(gate_ptr + mod * (gate_stride8 * 8), D, CH, NC, "evict_last")
        sum_P = zero_row(CH, NC)
        sum_Q = zero_row(CH, NC)
        sum_G = zero_row(CH, NC)
        for i in tl.range(0, end - row, num_stages=STAGES):
            if NORM:
                x = load_row(x_base + i * (x_stride8 * 8), D, CH, NC, "evict_first")
                dh = load_row(dh_base + i * (dh_stride8 * 8), D, CH, NC, "evict_first")
            if HAS_DXO:
                dxo = load_row(dxo_base + i * (dxo_stride8 * 8), D, CH, NC, "evict_first")
            if GATE_SUM:
                y = load_row(y_base + i * (y_stride8 * 8), D, CH, NC, "evict_first")
            if NORM:
                mean = 0.0
                if not RMS:
                    mean = tl.load(mean_ptr + row + i)
                rstd = tl.load(rstd_ptr + row + i)
                xhat, wdy, sum_P, sum_Q = norm_products(x, dh, mean, rstd, sum_P, sum_Q, NC, SUMS)
                if AFFINE:
                    wdy = multiply(wdy, to_fp32(weight, NC), NC)
                if HAS_SCALE:
                    wdy = multiply(wdy, one_plus(to_fp32(scale, NC), NC), NC)
                total = norm_gradient(xhat, wdy, rstd, D, NC, RMS)
                if HAS_DXO:
                    total = add(total, to_fp32(dxo, NC), NC)
                store_row(dx_base + i * D, total, D, CH, NC)
            else:
                total = to_fp32(dxo, NC)
            if HAS_Y:
                if HAS_GATE:
                    store_row(dy_base + i * D, multiply(to_fp32(gate, NC), total, NC), D, CH, NC)
                    if GATE_SUM:
                        sum_G = axpy(total, to_fp32(y, NC), sum_G, NC)
                else:
                    store_row(dy_base + i * D, total, D, CH, NC)
        slot = slots_ptr + (program + run).to(tl.int64) * D
        store_sums(slot, num_slots.to(tl.int64) * D, sum_P, sum_Q, sum_G, D, CH, NC, SUMS, GATE_SUM)
        row = end


@triton.jit
def run_at(row, last, run_ptr, cu_ptr, run2mod_ptr, INDEX: tl.constexpr):
    """The run of a row, its table row, and where the run or the program's rows end."""
    run = row * 0
    mod = run.to(tl.int64)
    end = last
    if INDEX == "runs":
        run = tl.load(run_ptr + row)
        mod = tl.load(run2mod_ptr + run).to(tl.int64)
        end = tl.minimum(last, tl.load(cu_ptr + run + 1))
    return run, mod, end


@triton.jit
def norm_products(x, dh, mean, rstd, sum_P, sum_Q, NC: tl.constexpr, SUMS: tl.constexpr):
    """xhat and dh of a row in fp32, and the column sums with the row's part: dh * xhat and dh."""
    xhat = ()
    wdy = ()
    for c in tl.static_range(NC):
        value = (x[c].to(tl.float32) - mean) * rstd
        grad = dh[c].to(tl.float32)
        if SUMS:
            sum_P = sum_P[:c] + (sum_P[c] + grad * value,) + sum_P[c + 1 :]
            sum_Q = sum_Q[:c] + (sum_Q[c] + grad,) + sum_Q[c + 1 :]
        xhat = xhat + (value,)
        wdy = wdy + (grad,)
    return xhat, wdy, sum_P, sum_Q


@triton.jit
def norm_gradient(xhat, wdy, rstd, D: tl.constexpr, NC: tl.constexpr, RMS: tl.constexpr):
    """The gradient of a normalised row: (wdy - xhat * c1 - c2) * rstd, in two fused multiply-adds."""
    products = multiply(wdy, xhat, NC)
    if RMS:
        c1 = sum_row(products, NC) / D * rstd
        c2 = 0.0
    else:
        sum_products, sum_wdy = sum_rows(products, wdy, NC)
        c1 = sum_products / D * rstd
        c2 = sum_wdy / D * rstd
    total = ()
    for c in tl.static_range(NC):
        total = total + (wdy[c] * rstd - (xhat[c] * c1 + c2),)
    return total


@triton.jit
def store_sums(
    slot,
    plane,
    sum_P,
    sum_Q,
    sum_G,
    D: tl.constexpr,
    CH: tl.constexpr,
    NC: tl.constexpr,
    SUMS: tl.constexpr,
    GATE_SUM: tl.constexpr,
):
    """The column sums of a run to its slot, `plane` elements apart."""
    if SUMS:
        store_row(slot, sum_P, D, CH, NC)
        store_row(slot + plane, sum_Q, D, CH, NC)
        if GATE_SUM:
            store_row(slot + 2 * plane, sum_G, D, CH, NC)
    elif GATE_SUM:
        store_row(slot, sum_G, D, CH, NC)


@triton.jit
def token_backward_kernel(
    dh_ptr,
    x_ptr,
    scale_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dscale_ptr,
    dshift_ptr,
    dh_stride8,
    x_stride8,
    scale_stride8,
    D: tl.constexpr,
    CH: tl.constexpr,
    NC: tl.constexpr,
    RMS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Backward with one table row per token: nothing to reduce, 3T plus the table gradients."""
    row = tl.program_id(0).to(tl.int64)
    x = to_fp32(load_row(x_ptr + row * (x_stride8 * 8), D, CH, NC, "evict_first"), NC)
    dh = to_fp32(load_row(dh_ptr + row * (dh_stride8 * 8), D, CH, NC, "evict_first"), NC)
    mean = 0.0
    if not RMS:
        mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    xhat = ()
    for c in tl.static_range(NC):
        xhat = xhat + ((x[c] - mean) * rstd,)
    store_row(dscale_ptr + row * D, multiply(dh, xhat, NC), D, CH, NC)
    store_row(dshift_ptr + row * D, dh, D, CH, NC)
    wdy = dh
    if HAS_SCALE:
        scale = load_row(scale_ptr + row * (scale_stride8 * 8), D, CH, NC, "evict_first")
        wdy = multiply(wdy, one_plus(to_fp32(scale, NC), NC), NC)
    c1 = sum_row(multiply(wdy, xhat, NC), NC) / D
    c2 = 0.0
    if not RMS:
        c2 = sum_row(wdy, NC) / D
    dx = ()
    for c in tl.static_range(NC):
        dx = dx + ((wdy[c] - xhat[c] * c1 - c2) * rstd,)
    store_row(dx_ptr + row * D, dx, D, CH, NC)
