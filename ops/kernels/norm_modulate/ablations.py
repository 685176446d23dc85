"""Two other ways to reduce the table gradients of ln_modulate, kept so that the benchmark can show what each costs.

`dtile`: AdaptiveLoad's backward. One kernel for dx (3T), then a second pass over x and dy (2T) on a grid of (column
tile, row tile) in which a warp reads consecutive columns, and a second stage over the row tiles: 5T.
`atomic`: Liger's backward. One pass, but every row adds its D products to the table gradient with fp32 atomics: the
sums depend on the order of arrival, so two runs differ.

Not used by any op.
"""

# Triton code is no Python: tuples grow by +, and types are those of the compiler.
# ruff: noqa: RUF005
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.kernels.base.rows import load_row, multiply, one_plus, store_row, sum_row, to_fp32
from ops.kernels.base.segments import Segments
from ops.kernels.base.slots import sum_slots
from ops.kernels.base.tuning import configuration
from ops.kernels.norm_modulate.triton import TABLE

COLUMNS = 128  # AdaptiveLoad's d_tile: one feature per thread
ROWS = 256  # its n_tile


@triton.jit
def dx_kernel(
    dh_ptr,
    x_ptr,
    scale_ptr,
    mean_ptr,
    rstd_ptr,
    run_ptr,
    run2mod_ptr,
    dx_ptr,
    dscale_ptr,
    dshift_ptr,
    dh_stride8,
    x_stride8,
    scale_stride8,
    D: tl.constexpr,
    CH: tl.constexpr,
    NC: tl.constexpr,
    ATOMIC: tl.constexpr,
):
    """dx of one row; ATOMIC also adds the row's products to the table gradients."""
    row = tl.program_id(0).to(tl.int64)
    mod = tl.load(run2mod_ptr + tl.load(run_ptr + row)).to(tl.int64)
    x = to_fp32(load_row(x_ptr + row * (x_stride8 * 8), D, CH, NC, "evict_first"), NC)
    dh = to_fp32(load_row(dh_ptr + row * (dh_stride8 * 8), D, CH, NC, "evict_first"), NC)
    scale = to_fp32(load_row(scale_ptr + mod * (scale_stride8 * 8), D, CH, NC, "evict_last"), NC)
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    xhat = ()
    for c in tl.static_range(NC):
        xhat = xhat + ((x[c] - mean) * rstd,)
    wdy = multiply(dh, one_plus(scale, NC), NC)
    c1, c2 = sum_row(multiply(wdy, xhat, NC), NC) / D, sum_row(wdy, NC) / D
    dx = ()
    for c in tl.static_range(NC):
        dx = dx + ((wdy[c] - xhat[c] * c1 - c2) * rstd,)
        if ATOMIC:
            columns = c * CH + tl.arange(0, CH)
            tl.atomic_add(dscale_ptr + mod * D + columns, dh[c] * xhat[c], mask=columns < D)
            tl.atomic_add(dshift_ptr + mod * D + columns, dh[c], mask=columns < D)
    store_row(dx_ptr + row * D, dx, D, CH, NC)


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def dtile_kernel(
    dh_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    run_ptr,
    cu_ptr,
    slots_ptr,
    num_rows,
    num_slots,
    dh_stride8,
    x_stride8,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Column sums of one (row tile, column tile); slots as in base/slots.py, with the row tile as the program."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < D
    tile = tl.program_id(1)
    row = tile * ROWS
    last = tl.minimum(row + ROWS, num_rows)
    while row < last:
        run = tl.load(run_ptr + row)
        end = tl.minimum(last, tl.load(cu_ptr + run + 1))
        sum_P = tl.zeros((COLUMNS,), tl.float32)
        sum_Q = tl.zeros((COLUMNS,), tl.float32)
        base = row.to(tl.int64)
        for i in tl.range(0, end - row, num_stages=4):
            x = tl.load(x_ptr + (base + i) * (x_stride8 * 8) + columns, mask=inside, other=0.0).to(tl.float32)
            dh = tl.load(dh_ptr + (base + i) * (dh_stride8 * 8) + columns, mask=inside, other=0.0).to(tl.float32)
            sum_P += dh * (x - tl.load(mean_ptr + base + i)) * tl.load(rstd_ptr + base + i)
            sum_Q += dh
        slot = slots_ptr + (tile + run).to(tl.int64) * D + columns
        tl.store(slot, sum_P, mask=inside)
        tl.store(slot + num_slots.to(tl.int64) * D, sum_Q, mask=inside)
        row = end


def dtile_bwd(
    dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor, segments: Segments, tile_rows: int = ROWS
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dscale, dshift of LayerNorm-modulate by AdaptiveLoad's two-pass reduction, in tiles of `tile_rows` rows."""
    num_rows, width = x.shape
    dx = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    _launch_dx(dy, x, scale, mean, rstd, segments, dx, None)
    tiles = -(-num_rows // tile_rows)
    num_slots = tiles + segments.num_runs
    slots = torch.empty(2, num_slots, width, dtype=torch.float32, device=x.device)
    dtile_kernel[(-(-width // COLUMNS), tiles)](
        dy,
        x,
        mean,
        rstd,
        segments.run,
        segments.cu,
        slots,
        num_rows,
        num_slots,
        dy.stride(0) // 8,
        x.stride(0) // 8,
        D=width,
        COLUMNS=COLUMNS,
        ROWS=tile_rows,
        num_warps=COLUMNS // 32,
    )
    dscale, dshift = sum_slots(slots, segments, tile_rows, segments.num_mods)
    return dx, dscale, dshift


def atomic_bwd(
    dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dscale, dshift of LayerNorm-modulate by atomic additions. Not deterministic."""
    num_rows, width = x.shape
    dx = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    sums = torch.zeros(2, segments.num_mods, width, dtype=torch.float32, device=x.device)
    _launch_dx(dy, x, scale, mean, rstd, segments, dx, sums)
    return dx, *sums.unbind()


def _launch_dx(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    mean: Tensor,
    rstd: Tensor,
    segments: Segments,
    dx: Tensor,
    sums: Tensor | None,
) -> None:
    num_rows, width = x.shape
    config = configuration(TABLE, "forward", width)
    dscale, dshift = (dx, dx) if sums is None else sums.unbind()
    dx_kernel[(num_rows,)](
        dy,
        x,
        scale,
        mean,
        rstd,
        segments.run,
        segments.run2mod,
        dx,
        dscale,
        dshift,
        dy.stride(0) // 8,
        x.stride(0) // 8,
        scale.stride(0) // 8,
        D=width,
        CH=config.chunk,
        NC=config.chunks(width),
        ATOMIC=sums is not None,
        num_warps=config.warps,
    )
