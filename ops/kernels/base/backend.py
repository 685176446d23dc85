"""Which implementation runs an op: library calls (CPU and fallback) or Triton kernels (CUDA).

The choice is made per call from device, dtypes and layout. What the kernels do not take goes to the library path with
one logged line per reason, never to a wrong answer.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import torch
from torch import Tensor

log = logging.getLogger(__name__)

PathChoice = Literal["auto", "library", "triton"]
MAX_WIDTH = 8192  # one row of fp32 accumulators per program must fit the register file
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_choice: PathChoice = "auto"


@contextmanager
def forced(choice: PathChoice) -> Iterator[None]:
    """Run the ops on one implementation: benchmarks compare them, tests run Triton's interpreter on CPU tensors."""
    global _choice
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


def use_kernels(x: Tensor, *others: Tensor | None, unsupported: str | None = None) -> bool:
    """Whether the Triton kernels run this call. `unsupported` names what they lack for it, if anything.

    x [N, D] sets width and device; `others` are the remaining floating point inputs.
    """
    if _choice == "library" or (_choice == "auto" and x.device.type != "cuda"):
        return False
    reason = unsupported or _unsupported(x, others)
    if reason is not None:
        _log_once(reason)
    return reason is None


def _unsupported(x: Tensor, others: tuple[Tensor | None, ...]) -> str | None:
    if not has_triton():
        return "triton is not installed"
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():  # Triton launches on the current one
        return f"the tensors are on {x.device} but cuda:{torch.cuda.current_device()} is current"
    width = x.shape[-1]
    if width % 8 or width > MAX_WIDTH:
        return f"width {width} is not a multiple of 8 up to {MAX_WIDTH}"
    for tensor in (x, *others):
        if tensor is not None and tensor.dtype not in FLOATS:
            return f"dtype {tensor.dtype} is none of bfloat16, float16, float32"
    return None


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _log_once(reason: str) -> None:
    log.warning("fused ops use library calls instead of Triton kernels: %s", reason)
