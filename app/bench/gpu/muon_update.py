"""Muon's end of a step beside AdamW's, for the matrices of one block of Wan2.1-14B and for factors of LoRA, which are
computed together, and how orthogonal bf16 makes them.

In a rehearsal the matrices are small, and computed in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from app.bench.gpu.measurement import Earlier, NamedFigures, Place, RunsAnywhere, relative_error
from app.bench.gpu.models import WAN_14B, small
from ops.comm.collectives import Group
from ops.config import OptimizerConfig
from ops.update.muon import newton_schulz_flops, orthogonal
from ops.update.sync import FlatSync

_ERROR = 0.1  # of bf16 beside fp64, as singular vectors of small values are not well known, and beside other sums
_RANK, _FACTORS = 16, 40  # of LoRA, of each form
_VALUES = (0.6, 1.3)  # between which singular values end; 0.7 and 1.2 without rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonUpdate(RunsAnywhere):
    """Seconds of both, the rate of the steps between, and the error."""

    name: str = "update.muon"
    estimate_s: float = 15.0

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        config = place.pick(WAN_14B, small(WAN_14B, 1))
        width = config.num_heads * config.head_dim
        shapes = [(width, width)] * 8 + [(config.ffn_dim, width), (width, config.ffn_dim)]
        seconds = {kind: _seconds_of_update(shapes, kind, place) for kind in ("adamw", "muon")}
        spent = seconds["muon"] - seconds["adamw"]
        factors = [(_RANK, width)] * _FACTORS + [(width, _RANK)] * _FACTORS
        together = _error_together(_RANK, width, place)
        matrix = torch.randn(place.pick((1024, 1536), (32, 48)), generator=torch.Generator().manual_seed(0))
        found = orthogonal(matrix.to(place.device)).cpu().double()
        values = torch.linalg.svdvals(found)
        error = relative_error(found, orthogonal(matrix.double()))
        return {
            "right": max(error, together) < _ERROR
            and _VALUES[0] < values.min().item()
            and values.max().item() < _VALUES[1],
            "error beside fp64": error,
            "factors together, error beside each alone": together,
            "least singular value": values.min().item(),
            "largest singular value": values.max().item(),
            "M weights": sum(rows * columns for rows, columns in shapes) / 1e6,
            "AdamW, s": seconds["adamw"],
            "Muon, s": seconds["muon"],
            "Muon of factors, s": _seconds_of_update(factors, "muon", place),
            "TFLOP/s of what Muon adds": sum(newton_schulz_flops(*shape) for shape in shapes) / 1e12 / max(spent, 1e-9),
        }


def _error_together(rows: int, columns: int, place: Place) -> float:
    """The largest error of a matrix [rows, columns], or lying, that is one of several beside the same one alone."""
    stack = torch.randn(_FACTORS, rows, columns, generator=torch.Generator().manual_seed(0)).to(place.device)
    errors = [
        relative_error(one, orthogonal(alone))
        for some in (stack, stack.mT.contiguous())
        for one, alone in zip(orthogonal(some), some, strict=True)
    ]
    return max(errors)


class _Matrices(nn.Module):
    """Linear layers that are a transformer's only block."""

    fetched = None

    def __init__(self, shapes: list[tuple[int, int]], device: torch.device) -> None:
        super().__init__()
        layers = [nn.Linear(columns, rows, bias=False, device=device, dtype=torch.bfloat16) for rows, columns in shapes]
        self.layers = nn.ModuleList(layers)

    def all_blocks(self) -> list[nn.Module]:
        return [self.layers]


def _seconds_of_update(shapes: list[tuple[int, int]], kind: Literal["adamw", "muon"], place: Place) -> float:
    sync = FlatSync(_Matrices(shapes, place.device), OptimizerConfig(kind=kind), total_steps=1000)
    sync.form(Group.solo(), None)

    def end() -> None:
        sync.begin_step()
        sync.gradient().normal_()
        sync.finish_step(0, 1.0, 1.0, 1.0, phase=lambda name: None)

    return place.seconds(end, place.pick(5, 1)).seconds
