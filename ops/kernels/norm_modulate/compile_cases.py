"""What the ahead-of-time gate compiles of ln_modulate: every row of its table with the flags that the op uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ops.kernels.base.compile_case import CompileCase, JITKernel
from ops.kernels.base.tuning import SUM_COLUMNS, SUM_SLOTS, SUM_WARPS, Launch
from ops.kernels.norm_modulate import triton_kernels

EXTRA = (
    CompileCase(
        name="sum_slots",
        kernel=triton_kernels.sum_slots_kernel,
        constants={"D": 3072, "BLOCK_SLOTS": SUM_SLOTS, "BLOCK_D": SUM_COLUMNS, "INDEX": "runs"},
        launch=Launch(chunk=SUM_COLUMNS, warps=SUM_WARPS),
        scalars=16,  # offsets and boundaries of runs, and the one row of sums of each plane
    ),
)


def cases(kernel: str, width: int, launch: Launch, fp32_residual: bool) -> Iterator[CompileCase]:
    """Of one row of the table."""
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
    """Of the forward kernel, with a gate where the name says so."""
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
    """Of the backward kernel, with a gate where the name says so."""
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
