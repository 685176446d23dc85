"""One-sided addition of a gradient into accumulators that the GPUs of a node own.

Each GPU owns one piece of every gradient and has an fp32 accumulator for it. A GPU whose backward has made a gradient
adds piece g to the accumulator of GPU g, without a call on the other's side, in any order and from all GPUs at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.kernels.base import backend
from ops.kernels.push.launch_table import LAUNCH, PROGRAMS

ALIGN = LAUNCH.chunk  # elements: a piece is a multiple of it


class Push:
    """Adds the gradients of one GPU. Accumulators are fp32 of one length, [piece]; on a GPU the device must be able to
    write to each: its own, or its peers' mapped memory.

    Raises ValueError for accumulators of unequal lengths, of another dtype, or whose piece is no multiple of ALIGN.
    """

    def __init__(self, accumulators: Sequence[Tensor], me: int, programs: int = PROGRAMS) -> None:
        """`me` is this GPU's place among the accumulators; `programs` are launched at a time."""
        sizes = {one.numel() for one in accumulators}
        if len(sizes) != 1 or any(one.dtype != torch.float32 or not one.is_contiguous() for one in accumulators):
            raise ValueError(
                f"accumulators of {[tuple(one.shape) for one in accumulators]} elements and "
                f"{sorted({str(one.dtype) for one in accumulators})} must be contiguous fp32 of one length."
            )
        (self.piece,) = sizes
        if self.piece % ALIGN:
            raise ValueError(f"a piece of {self.piece} elements must be a multiple of {ALIGN}; pad it.")
        self._accumulators, self._me, self._programs = tuple(accumulators), me, programs
        self._addresses: Tensor | None = None

    def __call__(self, gradient: Tensor) -> None:
        """Add gradient [GPUs * piece], fp32, bf16 or fp16 and contiguous; on a GPU in the current stream."""
        if gradient.shape != (len(self._accumulators) * self.piece,) or not gradient.is_contiguous():
            raise ValueError(
                f"a gradient of shape {tuple(gradient.shape)} must be contiguous, [{len(self._accumulators)} pieces of "
                f"{self.piece}]."
            )
        if backend.use_kernels(gradient.view(-1, ALIGN)):
            self._launch(gradient)
            return
        for turn in range(len(self._accumulators)):
            owner = (self._me + 1 + turn) % len(self._accumulators)
            self._accumulators[owner].add_(gradient[owner * self.piece : (owner + 1) * self.piece])

    def _launch(self, gradient: Tensor) -> None:
        from ops.kernels.push.triton_kernels import push_kernel

        if self._addresses is None:
            addresses = [one.data_ptr() for one in self._accumulators]
            self._addresses = torch.tensor(addresses, dtype=torch.int64, device=gradient.device)
        push_kernel[(self._programs,)](
            gradient,
            self._addresses,
            self.piece // LAUNCH.chunk,
            self._me,
            GPUS=len(self._accumulators),
            BLOCK=LAUNCH.chunk,
            num_warps=LAUNCH.warps,
        )
