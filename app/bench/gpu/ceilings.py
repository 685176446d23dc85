"""The most that the device can do: bytes per second of a copy and a triad, FLOP per second of bf16 products."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.bench.gpu.measurement import Earlier, NamedFigures, Place, RunsAnywhere
from app.bench.timing import Closure, ceilings, measure

COPY, MATMUL = "copy GB/s", "bf16 matmul TFLOP/s"


H200_COPY, H200_PEAK = 4.2e12, 0.75e15  # docs/results.md


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings(RunsAnywhere):
    """Copy and triad of bf16 tensors far larger than the cache; a product of random square matrices."""

    name: str = "ceilings"
    estimate_s: float = 7.0

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        speeds = ceilings(place.device, place.pick(30, 2))
        figures = {f"{name} GB/s": speed / 1e9 for name, speed in speeds.items()}
        size = place.pick(8192, 256)
        square = matmul_tflops(place, size, size, size)
        # the widest product of Wan2.1-1.3B at 480p81
        tall = matmul_tflops(place, *place.pick((32760, 1536, 8960), (256, 64, 128)))
        return {**figures, MATMUL: max(square, tall), f"{size} square": square, "tokens x MLP of 1.3B": tall}


def matmul_tflops(place: Place, rows: int, inner: int, columns: int) -> float:
    """TFLOP/s of [rows, inner] times [inner, columns] on random data (on zeros a GPU clocks higher)."""

    def make(index: int) -> Closure:
        a = torch.randn(rows, inner, device=place.device, dtype=torch.bfloat16)
        b = torch.randn(inner, columns, device=place.device, dtype=torch.bfloat16)
        out = torch.empty(rows, columns, device=place.device, dtype=torch.bfloat16)
        return lambda: torch.mm(a, b, out=out)

    moved = 2 * (rows * inner + inner * columns + rows * columns)
    timing = measure(make, moved, place.device, place.pick(20, 2))
    return 2 * rows * inner * columns / max(timing.seconds, 1e-9) / 1e12


def times_slower(earlier: Earlier) -> float:
    """How much slower this device is than the H200 of all estimates, at what it is worse at; 1 if unknown or faster."""
    copy, peak = copy_speed(earlier), matmul_peak(earlier)
    return max(1.0, H200_COPY / copy if copy else 1.0, H200_PEAK / peak if peak else 1.0)


def copy_speed(earlier: Earlier) -> float | None:
    """Bytes per second of a copy, if it was measured."""
    found = earlier.get("ceilings", {}).get(COPY)
    return found * 1e9 if isinstance(found, float) and found > 0 else None


def matmul_peak(earlier: Earlier) -> float | None:
    """FLOP per second of the best product, if it was measured."""
    found = earlier.get("ceilings", {}).get(MATMUL)
    return found * 1e12 if isinstance(found, float) and found > 0 else None
