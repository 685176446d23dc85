"""The push of a gradient by its address: exact, and how fast by the number of programs.

On one GPU the memory is its own: this is the kernel with its own memory, without a link between GPUs. Few
programs leave multiprocessors to the backward pass that runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.bench.gpu.measurement import Earlier, NamedFigures, Place
from ops.kernels.base import backend
from ops.kernels.push.op import push
from ops.kernels.push.reference import ALIGN

ELEMENTS, SMALL_ELEMENTS = 2**28, 2**16  # of the gradient: a layer of a 14B model has some 2**28
BYTES_PER_ELEMENT = 2 + 4 + 4  # bf16 gradient read, fp32 accumulator read and written
PROGRAMS = (8, 16, 32, 64, 132)
MODULUS = 64  # small whole numbers: sums in fp32 are exact, whatever their order


@dataclass(frozen=True, kw_only=True, slots=True)
class PushedAddition:
    """Whether the sum is exact, and GB/s by the number of programs."""

    name: str = "push"
    estimate_s: float = 4.0

    def why_not(self, place: Place) -> str | None:
        if place.device.type == "cuda" and not backend.has_triton():
            return "triton is not installed"
        return None

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        elements = place.pick(ELEMENTS, SMALL_ELEMENTS)
        assert elements % ALIGN == 0, "sizes are powers of two"
        memory = torch.zeros(elements, device=place.device)
        gradient = (torch.arange(elements, device=place.device) % MODULUS).to(torch.bfloat16)
        figures: dict[str, bool | float] = {}
        pushes = 0
        for programs in place.pick(PROGRAMS, PROGRAMS[:1]):
            timing = place.seconds(
                lambda programs=programs: push(gradient, memory.data_ptr(), programs),  # type: ignore[misc]
                place.pick(10, 2),
            )
            pushes += place.pick(10, 2) + 1  # one warms up
            figures[f"GB/s, {programs} programs"] = BYTES_PER_ELEMENT * elements / timing.seconds / 1e9
        figures["right"] = torch.equal(memory, pushes * gradient.float())
        return figures
