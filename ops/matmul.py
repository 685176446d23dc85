"""How fast this device multiplies matrices: the peak of a device that no table lists."""

from __future__ import annotations

import time

import torch

_SIZES = {"cpu": 256, "cuda": 4096}  # of a square product; on the CPU a start must not wait for it
_LEAST = 5


def matmul_tflops(device: torch.device, dtype: torch.dtype, seconds: float = 0.0) -> float:
    """TFLOP/s of the best of at least five products of random square matrices, of as many as fit into `seconds`: others
    on the machine only make a product slower. On the CPU with the threads that PyTorch has now."""
    size = _SIZES["cuda" if device.type == "cuda" else "cpu"]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.mm(a, b)  # the first one chooses a kernel
    best, until, done = float("inf"), time.perf_counter() + seconds, 0
    while done < _LEAST or time.perf_counter() < until:
        best, done = min(best, _seconds(a, b, out)), done + 1
    return 2.0 * size**3 / best / 1e12


def _seconds(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    if a.is_cuda:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        torch.mm(a, b, out=out)
        end.record()
        end.synchronize()
        return max(float(start.elapsed_time(end)) / 1e3, 1e-9)
    began = time.perf_counter()
    torch.mm(a, b, out=out)
    return max(time.perf_counter() - began, 1e-9)
