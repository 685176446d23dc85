"""What the ahead-of-time compile gate must know of a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ops.kernels.base.tuning import Launch


class JITKernel(Protocol):
    """A function under @triton.jit."""

    @property
    def arg_names(self) -> list[str]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCase:
    """One kernel with its flags and launch configuration. `fp32` names the activations and tables held in fp32.

    `scalars` counts the accesses of 32 bits that belong to statistics, run indices and their prefetch, not to rows.
    """

    name: str
    kernel: JITKernel
    constants: Mapping[str, int | str]
    launch: Launch
    scalars: int
    fp32: frozenset[str] = frozenset()
    variant: bool = False  # flags other than the op's usual ones
    adds: bool = False  # adds into memory of others: in units of 128 bits, and without an answer
