"""What slicing costs: the layers of one rank in STDiT3-XL/2, whole and in N slices (ScaleFusion, Fig. 5)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from app.bench.gpu.measurement import Earlier, NamedFigures, Place
from app.bench.scalefusion_ranks import BenchBlock

RANKS = 16  # two machines of eight
FRAMES, POSITIONS, WIDTH, HEADS = 60, 8160, 1152, 16  # 1080p for 8 s; STDiT3-XL/2
SLICES = (2, 4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceOverhead:
    """A spatial layer over a rank's frames, or a temporal one over its positions."""

    kind: Literal["spatial", "temporal"]
    estimate_s: float = 8.0

    @property
    def name(self) -> str:
        return f"slices.{self.kind}"

    def why_not(self, place: Place) -> str | None:
        return None

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        rows, length = (FRAMES // RANKS, POSITIONS) if self.kind == "spatial" else (POSITIONS // RANKS, FRAMES)
        rows, length = max(rows, max(SLICES)), place.pick(length, 6)  # a slice of less than a row is none
        rows = place.pick(rows, max(SLICES))
        dtype = place.pick(torch.bfloat16, torch.float32)
        block = BenchBlock(place.pick(WIDTH, 32), place.pick(HEADS, 2)).to(place.device, dtype)
        x = torch.randn(rows, length, place.pick(WIDTH, 32), device=place.device, dtype=dtype)
        whole = self._figures(place, block, (x,), "whole")
        found: dict[str, float | None] = dict(whole)
        for count in SLICES:
            sliced = self._figures(place, block, x.tensor_split(count), f"N={count}")
            for what in ("forward", "backward"):
                sliced[f"N={count} {what} x whole"] = sliced[f"N={count} {what} ms"] / whole[f"whole {what} ms"]
            found |= sliced
            found[f"N={count} peak GiB"] = place.peak_gib(partial(_forward, block, x.tensor_split(count)))
        found["whole peak GiB"] = place.peak_gib(partial(_forward, block, (x,)))
        return found

    def _figures(self, place: Place, block: BenchBlock, slices: tuple[Tensor, ...], what: str) -> dict[str, float]:
        repeats = place.pick(10, 2)
        forward = place.seconds(lambda: _forward(block, slices), repeats, warm_up=2)
        leaves = tuple(one.detach().requires_grad_() for one in slices)
        both = place.seconds(lambda: _backward(block, leaves), repeats, warm_up=2)
        return {
            f"{what} forward ms": 1e3 * forward.seconds,
            f"{what} backward ms": 1e3 * (both.seconds - forward.seconds),
        }


@torch.no_grad()
def _forward(block: BenchBlock, slices: tuple[Tensor, ...]) -> None:
    for one in slices:
        block(one)


def _backward(block: BenchBlock, slices: tuple[Tensor, ...]) -> None:
    for one in slices:
        block(one).sum().backward()
        one.grad = None
    block.zero_grad()


def measurements() -> list[SliceOverhead]:
    return [SliceOverhead(kind="spatial"), SliceOverhead(kind="temporal")]
