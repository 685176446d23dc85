"""One-sided addition of a gradient into fp32 memory that may belong to another GPU of the node.

Who adds makes no call on the other's side; any number of GPUs may add into the same memory at a time, in any order.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ops.kernels.base import backend
from ops.kernels.push.launch_table import LAUNCH, PROGRAMS

ALIGN = LAUNCH.chunk  # elements: what is added is a multiple of it
ALIGN_BYTES = 16  # of the address


def push(gradient: Tensor, address: int, programs: int = PROGRAMS) -> None:
    """Add gradient [n], fp32, bf16 or fp16, contiguous and n a multiple of ALIGN, to fp32 memory [n] at `address`, a
    multiple of ALIGN_BYTES; on a GPU in the current stream, with so many programs. The library path, which only the
    CPU has, is no addition that several may do at a time.

    Raises ValueError for another length, layout or address, RuntimeError on a GPU without triton.
    """
    if gradient.dim() != 1 or gradient.numel() % ALIGN or not gradient.is_contiguous() or address % ALIGN_BYTES:
        raise ValueError(
            f"a gradient of shape {tuple(gradient.shape)} for address {address:#x} must be contiguous, [a multiple of "
            f"{ALIGN}], for a multiple of {ALIGN_BYTES}; pad it."
        )
    if backend.use_kernels(gradient.view(-1, ALIGN)):
        from ops.kernels.push.triton_kernels import push_kernel

        push_kernel[(programs,)](
            gradient, address, gradient.numel() // ALIGN, BLOCK=LAUNCH.chunk, num_warps=LAUNCH.warps
        )
    elif gradient.device.type == "cpu":
        memory_at(address, gradient.numel()).add_(gradient)
    else:
        raise RuntimeError(f"adding into memory of another GPU needs triton; a gradient on {gradient.device} cannot.")


def memory_at(address: int, elements: int) -> Tensor:
    """fp32 [elements] of this process's memory at the address."""
    return torch.frombuffer((ctypes.c_float * elements).from_address(address), dtype=torch.float32)
