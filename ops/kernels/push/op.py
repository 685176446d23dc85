"""One-sided addition of a gradient into fp32 memory that may belong to another GPU of the node.

The worker that adds makes no call on the other's side; any number of GPUs may add into the same memory at a time, in
any order.
"""

from __future__ import annotations

from torch import Tensor

from ops.kernels.base import backend
from ops.kernels.base.measured import MeasuredOp
from ops.kernels.push import reference
from ops.kernels.push.reference import ALIGN, ALIGN_BYTES, PROGRAMS


def push(gradient: Tensor, address: int, programs: int = PROGRAMS) -> None:
    """Add gradient [n], fp32, bf16 or fp16, contiguous and n a multiple of ALIGN, to fp32 memory [n] at `address`, a
    multiple of ALIGN_BYTES; on a GPU in the current stream, with `programs` programs. On the CPU it is the reference,
    no addition that several may do at a time.

    Raises ValueError for another length, layout or address, RuntimeError on a GPU without triton.
    """
    if gradient.dim() != 1 or gradient.numel() % ALIGN or not gradient.is_contiguous() or address % ALIGN_BYTES:
        raise ValueError(
            f"a gradient of shape {tuple(gradient.shape)} for address {address:#x} must be contiguous, [a multiple of "
            f"{ALIGN}], for a multiple of {ALIGN_BYTES}; pad it."
        )
    if backend.use_kernels(gradient.view(-1, ALIGN)):
        from ops.kernels.push import triton  # which not every machine has

        triton.push(gradient, address, programs)
    elif gradient.device.type == "cpu":
        reference.push(gradient, address)
    else:
        raise RuntimeError(f"adding into memory of another GPU needs triton; a gradient on {gradient.device} cannot.")


MEASURED = MeasuredOp()  # by app/bench/gpu/push.py: it is no op on rows, as those that `heddle bench ops` compares
