"""What the ahead-of-time gate compiles of qk_norm_rope."""

from __future__ import annotations

from collections.abc import Iterator

from ops.kernels.base.compile_case import CompileCase
from ops.kernels.base.tuning import Launch
from ops.kernels.qk_rope import triton_kernels

HEAD_DIM = 128
EXTRA: tuple[CompileCase, ...] = ()


def cases(kernel: str, width: int, launch: Launch, fp32_residual: bool) -> Iterator[CompileCase]:
    """Of one row of the table."""
    heads, per_tile = width // HEAD_DIM, launch.chunk // HEAD_DIM
    flags: dict[str, int] = {
        "HEADS": heads,
        "HD": HEAD_DIM,
        "HC": per_tile,
        "NC": -(-heads // per_tile),
        "WEIGHT": True,
        "ROPE": True,
    }
    function = triton_kernels.qk_forward_kernel
    if kernel == "qk_backward":
        function, flags["STAGES"] = triton_kernels.qk_backward_kernel, launch.stages
    for per_head in (False, True):
        tiles = flags["NC"] if per_head else 1
        # rstd of q and of k; in the backward one prologue load per stage that triton 3.6 unrolls once more, and the
        # weight slot
        scalars = 2 * tiles if kernel == "qk_forward" else 2 * (tiles * (launch.stages + 1) + 1)
        yield CompileCase(
            name=f"{kernel} {width} {'per head' if per_head else 'full width'}",
            kernel=function,
            constants=flags | {"PER_HEAD": per_head},
            launch=launch,
            scalars=scalars,
        )
