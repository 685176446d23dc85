"""What a push means: the addition of a gradient into memory, and which gradients and addresses it takes."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

ALIGN = 512  # elements: what is added is a multiple of it
ALIGN_BYTES = 16  # what an address is a multiple of
PROGRAMS = 16  # few: they run beside a backward pass, which needs the multiprocessors


def push(gradient: Tensor, address: int) -> None:
    """Add gradient [n] to fp32 memory [n] of this process; no addition that several may do at a time."""
    memory = torch.frombuffer((ctypes.c_float * gradient.numel()).from_address(address), dtype=torch.float32)
    memory.add_(gradient)
