"""What the ahead-of-time gate compiles of the push: bf16 and fp32 gradients."""

from __future__ import annotations

from collections.abc import Iterator

from ops.kernels.base.compile_case import CompileCase
from ops.kernels.base.tuning import Launch
from ops.kernels.push.launch_table import LAUNCH
from ops.kernels.push.triton_kernels import push_kernel


def _case(fp32: bool) -> CompileCase:
    return CompileCase(
        name=f"push{', fp32' if fp32 else ''}",
        kernel=push_kernel,
        constants={"BLOCK": LAUNCH.chunk},
        launch=LAUNCH,
        scalars=0,
        fp32=frozenset({"grad_ptr"} if fp32 else ()),
        adds=True,
    )


EXTRA: tuple[CompileCase, ...] = (_case(False), _case(True))


def cases(kernel: str, width: int, launch: Launch, fp32_residual: bool) -> Iterator[CompileCase]:
    """Of one row of the table, which has none."""
    yield from ()
