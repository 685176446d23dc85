"""What slicing costs: the layers of one rank in STDiT3-XL/2, whole and in N slices (ScaleFusion, Fig. 5).

The rows are those of the rank that has most, of 1080p for 8 s on two machines of eight: 4 of 60 frames with 8,160
positions each, or 510 positions with 60 frames each. Attention (with its projections), attention to the text, and the
MLP are measured apart, and the whole layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from app.bench.gpu.measurement import Earlier, NamedFigures, Place, RunsAnywhere
from app.bench.scalefusion_ranks import BenchBlock

RANKS = 16  # two machines of eight
FRAMES, POSITIONS, WIDTH, HEADS = 60, 8160, 1152, 16  # 1080p for 8 s; STDiT3-XL/2
TEXT = 300  # rows at most
SLICES = (2, 4, 8)

LayerPart = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceOverhead(RunsAnywhere):
    """A spatial layer over a rank's frames, or a temporal one over its positions."""

    kind: Literal["spatial", "temporal"]
    estimate_s: float = 8.0

    @property
    def name(self) -> str:
        return f"slices.{self.kind}"

    @property
    def shape(self) -> tuple[int, int]:
        """(rows of the rank that has most, length of each)."""
        rows, length = (FRAMES, POSITIONS) if self.kind == "spatial" else (POSITIONS, FRAMES)
        return -(-rows // RANKS), length

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        rows, length = place.pick(self.shape, (4, 6))
        dtype = place.pick(torch.bfloat16, torch.float32)
        block = BenchBlock(place.pick(WIDTH, 32), place.pick(HEADS, 2), place.pick(TEXT, 5)).to(place.device, dtype)
        x = torch.randn(rows, length, place.pick(WIDTH, 32), device=place.device, dtype=dtype)
        found: dict[str, float | None] = {"rows": rows, "length": length}
        parts: dict[str, LayerPart] = {
            "attention": block.attend,
            "text": block.read_text,
            "MLP": block.mlp,
            "layer": block,
        }
        for name, part in parts.items():
            whole = self._figures(place, part, (x,))
            found |= {f"{name} whole {what} ms": ms for what, ms in whole.items()}
            for count in (count for count in SLICES if count <= rows):  # a slice of less than a row is none
                for what, ms in self._figures(place, part, x.tensor_split(count)).items():
                    found[f"{name} N={count} {what} ms"] = ms
                    found[f"{name} N={count} {what} x whole"] = ms / whole[what]
        for count in (1, *(count for count in SLICES if count <= rows)):
            found[f"N={count} peak GiB"] = place.peak_gib(partial(_forward, block, x.tensor_split(count)))
        return found

    def _figures(self, place: Place, part: LayerPart, slices: tuple[Tensor, ...]) -> dict[str, float]:
        """Milliseconds of a part over all slices, forward and backward."""
        repeats = place.pick(10, 2)
        forward = place.seconds(lambda: _forward(part, slices), repeats, warm_up=2)
        leaves = tuple(one.detach().requires_grad_() for one in slices)
        both = place.seconds(lambda: _backward(part, leaves), repeats, warm_up=2)
        return {"forward": 1e3 * forward.seconds, "backward": 1e3 * (both.seconds - forward.seconds)}


@torch.no_grad()
def _forward(part: LayerPart, slices: tuple[Tensor, ...]) -> None:
    for one in slices:
        part(one)


def _backward(part: LayerPart, slices: tuple[Tensor, ...]) -> None:
    for one in slices:
        part(one).sum().backward()
        one.grad = None


def measurements() -> list[SliceOverhead]:
    return [SliceOverhead(kind="spatial"), SliceOverhead(kind="temporal")]
