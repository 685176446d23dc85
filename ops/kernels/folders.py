"""The fused ops by name: the folders beside this file, which are not loaded to be named.

Each holds `triton.py`, whose last statement is COMPILED, and `op.py`, whose last statement is MEASURED.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from pkgutil import iter_modules

from ops.kernels.base.compiled import CompiledOp
from ops.kernels.base.measured import Contest, MeasuredOp, OpCase

OPS = tuple(sorted(m.name for m in iter_modules([str(Path(__file__).parent)]) if m.ispkg and m.name != "base"))


def compiled_ops() -> list[CompiledOp]:
    """What the compile gate must know of every op. Needs triton."""
    return [importlib.import_module(f"ops.kernels.{op}.triton").COMPILED for op in OPS]


def measured_ops() -> list[MeasuredOp]:
    """What every op is checked and measured by; with that, all of them are registered."""
    return [importlib.import_module(f"ops.kernels.{op}.op").MEASURED for op in OPS]


def cases() -> dict[str, OpCase]:
    """Uses of every op, by their names."""
    return {case.name: case for op in measured_ops() for case in op.cases}


def contests(liger: bool) -> list[Contest]:
    """Contests of every op, in the order in which they are measured; `liger` adds what the package Liger has of
    them."""
    found = [contest for op in measured_ops() for contest in op.contests(liger)]
    return sorted(found, key=lambda contest: (contest.turn, contest.name))
