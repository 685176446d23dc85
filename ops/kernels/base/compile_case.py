"""What the ahead-of-time gate is told of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ops.kernels.base.tuning import Launch


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCase:
    """One kernel with its flags and launch configuration. `fp32` names the activations and tables held in fp32.

    `scalars` counts the accesses of 32 bits that belong to statistics, run indices and their prefetch, not to rows.
    """

    name: str
    kernel: Any
    constants: dict[str, Any]
    launch: Launch
    scalars: int
    fp32: frozenset[str] = frozenset()
    variant: bool = False  # flags other than the op's usual ones
