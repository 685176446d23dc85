"""torch.compile of transformer blocks: `model.dit.compile`.

    transformer.compiled = CompiledBlocks(transformer.block_parts)

Fused ops are calls in the compiled code; attention, with the exchanges of a bag, stays outside of it, and cuts a block
into pieces. One code serves any number of rows, text tokens and sequences; compiled apart are one sequence and several,
with a gradient and without. So compiling ends with the first cascades. Code also depends on whether autocast caches the
weights it has cast: here it never does, so that a pass that keeps attention takes the same code as one that does not.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar, cast

import torch

from ops.attention.opaque import leave_opaque
from ops.packed.kept_attention import casting_anew
from ops.packed.packing import Layout

R = TypeVar("R")

MOST_CODES = 64  # of one function: kinds of blocks, times what is compiled apart

_settled: ContextVar[bool] = ContextVar("settled", default=False)


class CompiledBlocks:
    """Blocks of one transformer as compiled calls, of which all blocks of a kind share one."""

    def __init__(self, parts: Sequence[str], backend: str = "inductor") -> None:
        """`parts`: names of what blocks use of a layout."""
        leave_opaque()
        self._parts = tuple(parts)
        self._rows = True  # whether this rank has rows of the pass at hand, of the video and of the text
        self._call: Callable[..., object] = torch.compile(_call, dynamic=True, backend=backend)

    def prepare(self, layout: Layout) -> None:
        """Make what blocks use of a layout: its index tensors are inputs of the compiled code, not made in it."""
        for part in self._parts:
            getattr(layout, part)
        self._rows = layout.local_tokens > 0 and layout.local_text_tokens > 0

    def __call__(self, block: Callable[..., R]) -> Callable[..., R]:
        """The block as a compiled call, or the block itself where this rank has no rows: compiled code takes at least
        one."""
        if not self._rows:
            return block

        def call(*inputs: object) -> R:
            if not _settled.get():
                _settle()
            with casting_anew():
                return cast(R, self._call(block, *inputs))

        return call


def _settle() -> None:
    """Settings of the compiler are those of a thread, and a backward on CUDA computes blocks again in another."""
    import torch.compiler.config as compiler
    import torch.fx.experimental._config as shapes

    shapes.use_duck_shape = False  # two numbers that happen to be equal stay two numbers
    shapes.backed_size_oblivious = True  # a number that happens to be 0 or 1 gets no code of its own
    compiler.recompile_limit = max(compiler.recompile_limit, MOST_CODES)
    _settled.set(True)


def _call(block: Callable[..., object], *inputs: object) -> object:
    return block(*inputs)


def codes_made() -> int:
    """Pieces of code that this process has compiled by now: blocks, a VAE, FlexAttention."""
    found = sys.modules.get("torch._dynamo.utils")  # importing it takes a second
    return int(found.counters["stats"]["unique_graphs"]) if found is not None else 0


def check_compiler(device: torch.device) -> None:
    """Raises ValueError where this machine cannot make compiled code for the device."""
    if lacking := _lacking(device):
        raise ValueError(
            f"model.dit.compile makes code on the machine of each worker, and {lacking}. Install that, or set compile: "
            f"false."
        )


def _lacking(device: torch.device) -> str:
    """What is missing to compile for the device, or ""."""
    if device.type == "cpu":
        if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
            return "for the CPU this one has no g++ or clang++"
    elif importlib.util.find_spec("triton") is None:
        return "for a GPU this one has no Triton (the package triton of the version that its torch asks for)"
    elif not any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))):
        return "Triton starts its kernels by C, for which this one has no gcc or clang"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"what starts kernels includes {header}, which this one does not have"
