"""The fused ops: share of the copy bandwidth and gain over eager code, by layout of the modulation rows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from app.bench.gpu.ceilings import copy_speed
from app.bench.gpu.measurement import Earlier, NamedFigures, Place, RunsAnywhere
from app.bench.ops_inputs import layouts
from app.bench.ops_measure import BenchCase, measure_case
from app.bench.ops_report import OpsRow, Results
from app.bench.timing import copy_of
from ops.kernels.base import backend
from ops.kernels.base.interpreter import interpreting
from ops.kernels.base.measured import Contest, RowLayout
from ops.kernels.folders import contests

WIDTHS = (1536, 5120, 3072)
TOKENS = (32768, 8192)
SMALL_WIDTH, SMALL_TOKENS = 128, 10
REPEATS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class OpsSpeed(RunsAnywhere):
    """One op at one width and length in all its layouts. Shares need the copy ceiling, gains the eager code.

    The ceiling is a copy of gigabytes. A launch of the op's size reaches less, whatever it does, because it starts and
    ends; so beside it stands the share of a copy of as many bytes as the op moves.
    """

    op: str
    width: int
    tokens: int
    estimate_s: float = 5.0

    @property
    def name(self) -> str:
        return f"ops.{self.op.replace(', ', '-')}.d{self.width}.n{self.tokens}"

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        op = next(one for one in contests(liger=False) if one.name == self.op)
        tokens, width = place.pick((self.tokens, self.width), (SMALL_TOKENS, SMALL_WIDTH))
        rows: list[OpsRow] = []
        for layout in _layouts(op, tokens, place):
            case = BenchCase(
                op=op,
                layout=layout,
                width=width,
                variants={name: op.variants[name] for name in ("fused", "eager")},
            )
            # a rehearsal sends one layout through the interpreted kernels, which take 10 ms a row
            kernels = place.rehearse and layout.name == "packed" and interpreting()
            with backend.forced("triton") if kernels else nullcontext():
                rows += measure_case(case, place.device, place.pick(REPEATS, 1))
            torch._dynamo.reset()
        return _figures(rows, copy_speed(earlier), _such_copies(rows, place))


def measurements() -> list[OpsSpeed]:
    """Long packs first: shares are promised from 32k tokens."""
    names = [op.name for op in contests(liger=False)]
    return [OpsSpeed(op=name, width=width, tokens=n) for n in TOKENS for width in WIDTHS for name in names]


def _layouts(op: Contest, tokens: int, place: Place) -> list[RowLayout]:
    """An op without tables takes all layouts alike."""
    found = layouts(tokens)
    if "table" not in op.case.inputs.values():
        return found[:1]
    return place.pick(found, [found[0], found[-1]])


def _such_copies(rows: list[OpsRow], place: Place) -> dict[str, float]:
    """Bytes per second, by direction, of a copy of as many bytes as the op moves. Layouts hardly differ in them."""
    moved = {row.direction: row.useful_bytes for row in rows if row.variant == "fused"}
    repeats = place.pick(REPEATS, 1)
    return {direction: size / copy_of(size, place.device, repeats).seconds for direction, size in moved.items()}


def _figures(rows: list[OpsRow], copy: float | None, such_copies: Mapping[str, float]) -> NamedFigures:
    """The ceiling `copy` and `such_copies` in bytes per second."""
    results = Results(rows, copy or float("nan"))
    figures: dict[str, float | None] = {}
    for row in rows:
        key = f"{row.layout}/{row.direction}/{row.variant}"
        figures[f"{key} ms"] = 1e3 * row.timing.seconds
        if row.variant == "fused":
            figures[f"{key} of copy"] = results.share(row) if copy else None
            figures[f"{key} of such a copy"] = row.useful_bytes / row.timing.seconds / such_copies[row.direction]
            figures[f"{key} x eager"] = results.gain(row, "eager")
            figures[f"{key} spread"] = row.timing.spread
    return figures
