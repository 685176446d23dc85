"""The fused ops by name: the folders beside this file, which are not loaded to be named.

Each holds `launch_table.py` (TABLE), `compile_cases.py` (cases, EXTRA) and `variants.py` (`contests`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from ops.kernels.base.compile_case import CompileCase
from ops.kernels.base.tuning import Launch, Table

if TYPE_CHECKING:
    from ops.kernels.base.contest import Contest  # needs torch, which the ahead-of-time gate does without

OPS = tuple(sorted(m.name for m in iter_modules([str(Path(__file__).parent)]) if m.ispkg and m.name != "base"))


@dataclass(frozen=True, slots=True)
class CompiledOp:
    """What the ahead-of-time gate compiles of one op: the rows of its launch table, and further cases."""

    table: Table
    cases: Callable[[str, int, Launch, bool], Iterator[CompileCase]]
    extra: tuple[CompileCase, ...]


def compiled_ops() -> list[CompiledOp]:
    """Of every op. Needs triton."""
    found = []
    for op in OPS:
        table = importlib.import_module(f"ops.kernels.{op}.launch_table")
        cases = importlib.import_module(f"ops.kernels.{op}.compile_cases")
        found.append(CompiledOp(table.TABLE, cases.cases, cases.EXTRA))
    return found


def contests(liger: bool) -> list[Contest]:
    """Of every op, in the order in which they are measured; `liger` adds what the package Liger has of them."""
    found: list[Contest] = []
    for op in OPS:
        found += importlib.import_module(f"ops.kernels.{op}.variants").contests(liger)
    return sorted(found, key=lambda contest: (contest.turn, contest.name))
