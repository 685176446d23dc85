"""What the ahead-of-time gate compiles of the gate ops: the kernels of ln_modulate with a gate."""

from __future__ import annotations

from collections.abc import Iterator

from ops.kernels.base.compile_case import CompileCase
from ops.kernels.base.tuning import Launch
from ops.kernels.norm_modulate.compile_cases import backward_cases, forward_cases

EXTRA: tuple[CompileCase, ...] = ()


def cases(kernel: str, width: int, launch: Launch, fp32_residual: bool) -> Iterator[CompileCase]:
    """Of one row of the table."""
    yield from (forward_cases if kernel == "gate_forward" else backward_cases)(kernel, width, launch, fp32_residual)
