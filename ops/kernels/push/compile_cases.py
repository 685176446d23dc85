"""What the ahead-of-time gate compiles of the push: nodes of two and of eight GPUs, bf16 and fp32 gradients."""

from __future__ import annotations

from collections.abc import Iterator

from ops.kernels.base.compile_case import CompileCase
from ops.kernels.base.tuning import Launch
from ops.kernels.push.launch_table import LAUNCH
from ops.kernels.push.triton_kernels import push_kernel


def _case(gpus: int, fp32: bool) -> CompileCase:
    return CompileCase(
        name=f"push to {gpus} GPUs{', fp32' if fp32 else ''}",
        kernel=push_kernel,
        constants={"GPUS": gpus, "BLOCK": LAUNCH.chunk},
        launch=LAUNCH,
        scalars=0,
        fp32=frozenset({"grad_ptr"} if fp32 else ()),
        adds=True,
    )


EXTRA: tuple[CompileCase, ...] = tuple(_case(gpus, fp32) for gpus in (2, 8) for fp32 in (False, True))


def cases(kernel: str, width: int, launch: Launch, fp32_residual: bool) -> Iterator[CompileCase]:
    """Of one row of the table, which has none."""
    yield from ()
