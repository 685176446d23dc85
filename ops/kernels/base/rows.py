"""Triton helpers: one row of D values held in registers as a tuple of NC chunks of CH values.

Power-of-two chunks instead of one padded block: 3072 = 3 * 1024 and 5120 = 5 * 1024 waste no lanes, where blocks of
4096 and 8192 would idle 25 and 37 % of them. Row strides are passed in units of 8 elements, so that the compiler sees
the 16-byte alignment of every row of a multiple-of-8 width and emits 128-bit accesses.
"""

# Triton code is no Python: tuples grow by +, and types are those of the compiler.
# ruff: noqa: RUF005
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def load_row(ptr, D: tl.constexpr, CH: tl.constexpr, NC: tl.constexpr, POLICY: tl.constexpr):
    """The row at ptr as NC chunks of CH values in its own dtype; lanes beyond D are zero."""
    row = ()
    for c in tl.static_range(NC):
        columns = c * CH + tl.arange(0, CH)
        if D % CH == 0:
            row = row + (tl.load(ptr + columns, eviction_policy=POLICY),)
        else:
            row = row + (tl.load(ptr + columns, mask=columns < D, other=0.0, eviction_policy=POLICY),)
    return row


@triton.jit
def store_row(ptr, row, D: tl.constexpr, CH: tl.constexpr, NC: tl.constexpr):
    """Write NC chunks at ptr, rounded once to its dtype."""
    for c in tl.static_range(NC):
        columns = c * CH + tl.arange(0, CH)
        value = row[c].to(ptr.dtype.element_ty)
        if D % CH == 0:
            tl.store(ptr + columns, value)
        else:
            tl.store(ptr + columns, value, mask=columns < D)


@triton.jit
def zero_row(CH: tl.constexpr, NC: tl.constexpr):
    row = ()
    for _c in tl.static_range(NC):
        row = row + (tl.zeros((CH,), tl.float32),)
    return row


@triton.jit
def to_fp32(row, NC: tl.constexpr):
    out = ()
    for c in tl.static_range(NC):
        out = out + (row[c].to(tl.float32),)
    return out


@triton.jit
def sum_row(row, NC: tl.constexpr):
    """Sum over all D values: chunks first (no communication), one cross-lane reduction at the end."""
    total = row[0]
    for c in tl.static_range(1, NC):
        total = total + row[c]
    return tl.sum(total, axis=0)


@triton.jit
def sum_rows(row, other, NC: tl.constexpr):
    """The sums of two rows by one cross-lane reduction: warps exchange both totals at once and wait once."""
    total = row[0]
    total_other = other[0]
    for c in tl.static_range(1, NC):
        total = total + row[c]
        total_other = total_other + other[c]
    return tl.reduce((total, total_other), 0, _add_pairs)


@triton.jit
def _add_pairs(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def axpy(scalar_row, row, other, NC: tl.constexpr):
    """scalar_row * row + other, chunk by chunk."""
    out = ()
    for c in tl.static_range(NC):
        out = out + (scalar_row[c] * row[c] + other[c],)
    return out


@triton.jit
def multiply(a, b, NC: tl.constexpr):
    out = ()
    for c in tl.static_range(NC):
        out = out + (a[c] * b[c],)
    return out


@triton.jit
def add(a, b, NC: tl.constexpr):
    out = ()
    for c in tl.static_range(NC):
        out = out + (a[c] + b[c],)
    return out


@triton.jit
def normalise(row, D: tl.constexpr, CH: tl.constexpr, NC: tl.constexpr, eps, RMS: tl.constexpr):
    """xhat, mean and rstd of an fp32 row. Two-pass variance in registers, never E[x^2] - mean^2."""
    mean = 0.0
    if not RMS:
        mean = sum_row(row, NC) / D
    centred = ()
    for c in tl.static_range(NC):
        value = row[c] - mean
        if D % CH != 0:
            value = tl.where(c * CH + tl.arange(0, CH) < D, value, 0.0)
        centred = centred + (value,)
    rstd = 1.0 / tl.sqrt(sum_row(multiply(centred, centred, NC), NC) / D + eps)
    xhat = ()
    for c in tl.static_range(NC):
        xhat = xhat + (centred[c] * rstd,)
    return xhat, mean, rstd


@triton.jit
def one_plus(row, NC: tl.constexpr):
    out = ()
    for c in tl.static_range(NC):
        out = out + (1.0 + row[c],)
    return out
