"""What the ahead-of-time compile gate must know of an op's kernels: `COMPILED` of its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ops.kernels.base.tuning import Kernel, Launch, Table


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


def no_cases(kernel: Kernel, width: int, launch: Launch, fp32_residual: bool) -> Iterator[CompileCase]:
    """No case: an op whose launch table has no rows by width."""
    yield from ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledOp:
    """What the gate compiles of one op: `cases` (kernel, width, launch, whether the residual stream is fp32) of every
    row of its launch table, and `extra` ones."""

    table: Table = field(default_factory=dict)
    cases: Callable[[Kernel, int, Launch, bool], Iterator[CompileCase]] = no_cases
    extra: tuple[CompileCase, ...] = ()
