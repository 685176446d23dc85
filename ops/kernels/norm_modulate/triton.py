"""The Triton path of ln_modulate: launch table, launches, and what the compile gate compiles of the kernels.

The kernels are in `triton_kernels.py`; the gate ops run them, too, by `run_forward` and `run_backward`.

N tokens, D width, S table rows. Nothing here reads a value from the device.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ops.kernels.base import host
from ops.kernels.base.blocks import is_per_token
from ops.kernels.base.compiled import CompileCase, CompiledOp, JITKernel
from ops.kernels.base.segments import Segments
from ops.kernels.base.slots import COMPILE_CASE, sum_slots
from ops.kernels.base.tuning import Launch, Table, configuration
from ops.kernels.norm_modulate import triton_kernels
from ops.kernels.norm_modulate.cpu import no_table_grads, table_grads
from ops.kernels.norm_modulate.reference import NormBackwardCall, NormCall

# (kernel, D, dtype of x, architecture)
TABLE: Table = {
    ("forward", 1536, "bfloat16", "sm_90"): Launch(chunk=256, warps=2, load_bits=64),
    ("forward", 3072, "bfloat16", "sm_90"): Launch(chunk=512, warps=4, load_bits=64),
    ("forward", 5120, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4),
    ("backward", 1536, "bfloat16", "sm_90"): Launch(chunk=512, warps=4, stages=4, per_sm=3, load_bits=64),
    ("backward", 3072, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4, stages=3, per_sm=2),
    ("backward", 5120, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4, stages=4, per_sm=1),
    ("token_backward", 1536, "bfloat16", "sm_90"): Launch(chunk=512, warps=2),
    ("token_backward", 3072, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4),
    ("token_backward", 5120, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4),
    # fp32 residual stream, bf16 branches and gradients. The norm backward takes twice the warps of bf16: with 24
    # columns per thread triton 3.9 converts layouts in the row loop and 3.6 uses 240 registers.
    ("forward", 1536, "float32", "sm_90"): Launch(chunk=512, warps=2),
    ("forward", 3072, "float32", "sm_90"): Launch(chunk=1024, warps=4),
    ("forward", 5120, "float32", "sm_90"): Launch(chunk=1024, warps=4),
    ("backward", 1536, "float32", "sm_90"): Launch(chunk=512, warps=4, stages=3, per_sm=4, load_bits=64),
    ("backward", 3072, "float32", "sm_90"): Launch(chunk=1024, warps=8, stages=3, per_sm=2, load_bits=64),
    ("backward", 5120, "float32", "sm_90"): Launch(chunk=1024, warps=8, stages=3, per_sm=1, load_bits=64),
    ("token_backward", 1536, "float32", "sm_90"): Launch(chunk=512, warps=4, load_bits=64),
    ("token_backward", 3072, "float32", "sm_90"): Launch(chunk=1024, warps=8, load_bits=64),
    ("token_backward", 5120, "float32", "sm_90"): Launch(chunk=1024, warps=8, load_bits=64),
    # triton 3.6 spills 8 bytes with the launch of sm_90 where the norm is affine.
    ("backward", 5120, "bfloat16", "sm_100"): Launch(chunk=1024, warps=8, stages=3, per_sm=2, load_bits=64),
}


def forward(call: NormCall) -> tuple[Tensor, Tensor, Tensor]:
    """h [N, D], mean [N] (empty for RMS) and rstd [N]."""
    _, out, mean, rstd = run_forward(
        call.x,
        table=TABLE,
        weight=call.weight,
        bias=call.bias,
        scale=call.scale,
        shift=call.shift,
        segments=call.segments,
        eps=call.eps,
        rms=call.rms,
        residual_dtype=call.x.dtype,
        out_dtype=call.out_dtype,
    )
    return out, mean, rstd


def backward(call: NormBackwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx [N, D], then the gradients of scale, shift, weight and bias (empty without sums)."""
    x = call.x
    if call.per_token:
        dx, dscale, dshift = _token_backward(call.dy, x, call.scale, call.mean, call.rstd, call.rms)
        if not call.sums:
            return dx, *no_table_grads(x.shape[1], torch.float32, x.device)
        return dx, dscale, dshift, call.rstd.new_empty(0), call.rstd.new_empty(0)
    dx, _, found = run_backward(
        table=TABLE,
        dh=call.dy,
        x=x,
        weight=call.weight,
        scale=call.scale,
        mean=call.mean,
        rstd=call.rstd,
        segments=call.segments,
        rms=call.rms,
        dx_dtype=x.dtype,
        sums=call.sums,
    )
    return dx, *norm_grads(found, call.sums, call.weight, call.bias, call.scale, x)


def run_forward(
    x: Tensor,
    *,
    table: Table,
    y: Tensor | None = None,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    segments: Segments | None,
    eps: float = 0.0,
    rms: bool = False,
    residual_dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N, D], tables [S, D] or [D]; `table` is the op's launch table.

    x' (x itself without y), out (empty without out_dtype), mean, rstd.
    """
    num_rows, width = x.shape
    norm = out_dtype is not None
    residual = x if y is None else torch.empty(num_rows, width, dtype=residual_dtype, device=x.device)
    out = torch.empty(num_rows if norm else 0, width, dtype=out_dtype or x.dtype, device=x.device)
    mean = torch.empty(num_rows if norm and not rms else 0, dtype=torch.float32, device=x.device)
    rstd = torch.empty(num_rows if norm else 0, dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return residual, out, mean, rstd
    first = next((t for t in (gate, scale, shift) if t is not None), None)
    x, y = host.rows(x), None if y is None else host.rows(y)
    gate, scale, shift, weight, bias = (host.table(t) for t in (gate, scale, shift, weight, bias))
    config = configuration(table, "forward" if y is None else "gate_forward", width, host.name(x), host.arch(x.device))
    index = _index(x, first, segments)
    triton_kernels.forward_kernel[(num_rows,)](
        x,
        host.or_else(y, x),
        host.or_else(gate, x),
        host.or_else(weight, x),
        host.or_else(bias, x),
        host.or_else(scale, x),
        host.or_else(shift, x),
        *((segments.run, segments.run2mod) if segments is not None else (x, x)),
        residual,
        out if norm else x,
        mean if mean.numel() else x,
        rstd if norm else x,
        host.stride8(x),
        host.stride8(y),
        host.stride8(gate),
        host.stride8(scale),
        host.stride8(shift),
        eps,
        D=width,
        CH=config.chunk,
        NC=config.chunks(width),
        HAS_Y=y is not None,
        HAS_GATE=gate is not None,
        NORM=norm,
        RMS=rms,
        AFFINE=weight is not None,
        HAS_BIAS=bias is not None,
        HAS_SCALE=scale is not None,
        HAS_SHIFT=shift is not None,
        INDEX=index,
        **host.options(config),
    )
    return residual, out, mean, rstd


def run_backward(
    *,
    table: Table,
    dh: Tensor | None = None,
    dxo: Tensor | None = None,
    x: Tensor,
    y: Tensor | None = None,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    segments: Segments | None,
    rms: bool = False,
    dx_dtype: torch.dtype,
    sums: bool = False,
    gate_sum: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """dx (empty without dh), dy (empty without y), and column sums [S, D] per table row.

    The sums: of dh * xhat and of dh with `sums`, then of y * total with `gate_sum`.
    """
    num_rows, width = x.shape
    norm = dh is not None
    dx = torch.empty(num_rows if norm else 0, width, dtype=dx_dtype, device=x.device)
    dy = torch.empty(0 if y is None else num_rows, width, dtype=x.dtype if y is None else y.dtype, device=x.device)
    num_mods = 1 if segments is None else segments.num_mods
    planes = 2 * sums + gate_sum
    if num_rows == 0:
        return dx, dy, [torch.zeros(num_mods, width, dtype=torch.float32, device=x.device) for _ in range(planes)]
    x = host.rows(x)
    dh, dxo, y = (None if t is None else host.rows(t) for t in (dh, dxo, y))
    gate, scale, weight = (host.table(t) for t in (gate, scale, weight))
    config = configuration(
        table, "backward" if y is None else "gate_backward", width, host.name(x), host.arch(x.device)
    )
    programs = host.num_programs(num_rows, host.num_sms(x.device) * config.per_sm)
    rows_per_program = -(-num_rows // programs)
    num_slots = programs + (0 if segments is None else segments.num_runs)
    slots = torch.empty(planes, num_slots, width, dtype=torch.float32, device=x.device)
    triton_kernels.backward_kernel[(programs,)](
        host.or_else(dh, x),
        host.or_else(dxo, x),
        x,
        host.or_else(y, x),
        host.or_else(gate, x),
        host.or_else(weight, x),
        host.or_else(scale, x),
        mean if mean is not None and mean.numel() else x,
        host.or_else(rstd, x),
        *((segments.run, segments.cu, segments.run2mod) if segments is not None else (x, x, x)),
        dx if norm else x,
        dy if y is not None else x,
        slots if planes else x,
        num_rows,
        rows_per_program,
        num_slots,
        host.stride8(dh),
        host.stride8(dxo),
        host.stride8(x),
        host.stride8(y),
        host.stride8(gate),
        host.stride8(scale),
        D=width,
        CH=config.chunk,
        NC=config.chunks(width),
        STAGES=config.stages,
        NORM=norm,
        RMS=rms,
        AFFINE=weight is not None,
        HAS_SCALE=scale is not None,
        SUMS=sums,
        HAS_DXO=dxo is not None,
        HAS_Y=y is not None,
        HAS_GATE=gate is not None,
        GATE_SUM=gate_sum,
        INDEX="one" if segments is None else "runs",
        **host.options(config),
    )
    return dx, dy, sum_slots(slots, segments, rows_per_program, num_mods)


def _token_backward(
    dh: Tensor, x: Tensor, scale: Tensor | None, mean: Tensor, rstd: Tensor, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, width = x.shape
    dx = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    dscale, dshift = (torch.empty(num_rows, width, dtype=torch.float32, device=x.device) for _ in range(2))
    if num_rows:
        x, dh, scale = host.rows(x), host.rows(dh), host.table(scale)
        config = configuration(TABLE, "token_backward", width, host.name(x), host.arch(x.device))
        triton_kernels.token_backward_kernel[(num_rows,)](
            dh,
            x,
            host.or_else(scale, x),
            mean if mean.numel() else x,
            rstd,
            dx,
            dscale,
            dshift,
            host.stride8(dh),
            host.stride8(x),
            host.stride8(scale),
            D=width,
            CH=config.chunk,
            NC=config.chunks(width),
            RMS=rms,
            HAS_SCALE=scale is not None,
            **host.options(config),
        )
    return dx, dscale, dshift


def norm_grads(
    found: list[Tensor], sums: bool, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, x: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of scale, shift [S, D], weight and bias [D] from the two column sums; empty ones without `sums`."""
    if not sums:
        return no_table_grads(x.shape[1], torch.float32, x.device)
    return table_grads(found[0], found[1], weight, bias, scale)


def _index(x: Tensor, table: Tensor | None, segments: Segments | None) -> str:
    if segments is not None:
        return "runs"
    return "token" if is_per_token(x, table, None, None) else "one"


def cases(kernel: str, width: int, launch: Launch, fp32_residual: bool) -> Iterator[CompileCase]:
    """Cases of one row of the launch table."""
    if kernel == "token_backward":
        tiles = {"D": width, "CH": launch.chunk, "NC": launch.chunks(width), "RMS": False, "HAS_SCALE": True}
        yield CompileCase(
            name=f"{kernel} {width}{' fp32' if fp32_residual else ''}",
            constants=tiles,
            launch=launch,
            scalars=2,  # mean, rstd
            kernel=triton_kernels.token_backward_kernel,
            fp32=frozenset({"x_ptr", "dx_ptr"} if fp32_residual else ()),
        )
    else:
        yield from (forward_cases if kernel == "forward" else backward_cases)(kernel, width, launch, fp32_residual)


def forward_cases(kernel: str, width: int, launch: Launch, fp32_residual: bool) -> Iterator[CompileCase]:
    """Cases of the forward kernel, with a gate where the name says so."""
    has_y = kernel.startswith("gate")
    flags: dict[str, int | str] = {
        "D": width,
        "CH": launch.chunk,
        "NC": launch.chunks(width),
        "HAS_Y": has_y,
        "HAS_GATE": has_y,
        "NORM": True,
        "RMS": False,
        "AFFINE": False,
        "HAS_BIAS": False,
        "HAS_SCALE": True,
        "HAS_SHIFT": True,
        "INDEX": "runs",
    }
    variants: dict[str, dict[str, int | str]] = {
        "": {},
        " affine": {
            "AFFINE": True,
            "HAS_BIAS": True,
            "HAS_SCALE": False,
            "HAS_SHIFT": False,
            "HAS_GATE": False,
            "INDEX": "one",
        },
    }
    if not has_y:
        variants[" rms"] = {"RMS": True}
    if has_y:
        variants[" without norm"] = {"NORM": False, "HAS_SCALE": False, "HAS_SHIFT": False}
    yield from _variants(
        kernel,
        width,
        launch,
        triton_kernels.forward_kernel,
        4,  # run, run2mod, mean, rstd
        flags,
        variants,
        {"x_ptr", "residual_ptr"} if fp32_residual else set(),
    )


def backward_cases(kernel: str, width: int, launch: Launch, fp32_residual: bool) -> Iterator[CompileCase]:
    """Cases of the backward kernel, with a gate where the name says so."""
    has_y = kernel.startswith("gate")
    flags: dict[str, int | str] = {
        "D": width,
        "CH": launch.chunk,
        "NC": launch.chunks(width),
        "STAGES": launch.stages,
        "NORM": True,
        "RMS": False,
        "AFFINE": False,
        "HAS_SCALE": True,
        "SUMS": True,
        "HAS_DXO": has_y,
        "HAS_Y": has_y,
        "HAS_GATE": has_y,
        "GATE_SUM": has_y,
        "INDEX": "runs",
    }
    variants: dict[str, dict[str, int | str]] = {
        "": {},
        " frozen tables": {"SUMS": False, "GATE_SUM": False},
        " affine": {"AFFINE": True, "HAS_SCALE": False, "HAS_GATE": False, "GATE_SUM": False, "INDEX": "one"},
    }
    if has_y:
        variants[" without norm"] = {"NORM": False, "SUMS": False, "HAS_SCALE": False}
    yield from _variants(
        kernel,
        width,
        launch,
        triton_kernels.backward_kernel,
        3 + 2 * launch.stages,  # run, run2mod, cu; mean and rstd once per stage
        flags,
        variants,
        {"x_ptr", "dxo_ptr", "dx_ptr"} if fp32_residual else set(),
    )


def _variants(
    kernel: str,
    width: int,
    launch: Launch,
    function: JITKernel,
    scalars: int,
    flags: Mapping[str, int | str],
    variants: Mapping[str, Mapping[str, int | str]],
    fp32: set[str],
) -> Iterator[CompileCase]:
    for suffix, changes in variants.items():
        name = f"{kernel} {width}{' fp32' if fp32 else ''}{suffix}"
        yield CompileCase(
            name=name,
            kernel=function,
            constants={**flags, **changes},
            launch=launch,
            scalars=scalars,
            fp32=frozenset(fp32),
            variant=bool(changes),
        )


COMPILED = CompiledOp(table=TABLE, cases=cases, extra=(COMPILE_CASE,))
