"""One op on one layout and width, forward and backward, for each of its contestants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from app.bench.ops_inputs import inputs_of
from app.bench.ops_report import OpsRow
from app.bench.timing import Closure, measure, peak_bytes
from ops.kernels.base.measured import Contest, OpVariant, RowLayout
from ops.kernels.base.segments import Segments


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchCase:
    """One op on one layout and width, and what is measured on it."""

    op: Contest
    layout: RowLayout
    width: int
    variants: dict[str, OpVariant]
    ablations: bool = False


def measure_case(case: BenchCase, device: torch.device, repeats: int) -> list[OpsRow]:
    """Medians, useful bytes and peak memory of every variant of the case; the ablations have a backward only."""
    op, layout, width = case.op, case.layout, case.width
    unit = 2 * layout.tokens * width
    segments = Segments.packed(layout.lengths, device=device)
    rows = segments.run2mod.long()[segments.run.long()]
    torch._dynamo.reset()
    found: list[OpsRow] = []

    def add(direction: str, variant: str, make: Callable[[int], Closure], units: int, peak: int | None) -> None:
        timing = measure(make, units * unit, device, repeats)
        found.append(
            OpsRow(
                op=op.name,
                layout=layout.name,
                width=width,
                tokens=layout.tokens,
                direction=direction,
                variant=variant,
                timing=timing,
                useful_bytes=units * unit,
                peak=peak,
            )
        )

    for name, function in case.variants.items():

        def forward(_: int, function: OpVariant = function) -> Closure:
            tensors = inputs_of(op.case.inputs, layout, width, device, torch.bfloat16)
            return lambda: function(tensors, layout, segments, rows)

        def backward(_: int, function: OpVariant = function) -> Closure:
            tensors = inputs_of(op.case.inputs, layout, width, device, torch.bfloat16)
            outs = function(tensors, layout, segments, rows)
            cotangents = [torch.randn_like(o) for o in outs]
            wrt = [tensors[n] for n in op.case.differentiable]
            return lambda: torch.autograd.grad(outs, wrt, cotangents, retain_graph=True)

        def both(function: OpVariant = function) -> object:
            tensors = inputs_of(op.case.inputs, layout, width, device, torch.bfloat16)
            outs = function(tensors, layout, segments, rows)
            return torch.autograd.grad(
                outs, [tensors[n] for n in op.case.differentiable], [torch.ones_like(o) for o in outs]
            )

        peak = peak_bytes(both, device)
        add("forward", name, forward, op.forward_T, peak)
        add("backward", name, backward, op.backward_T, peak)
    if case.ablations:
        for name, make in _ablations(op, layout, width, segments, device).items():
            add("backward", name, make, op.backward_T, None)
    return found


def _ablations(
    op: Contest, layout: RowLayout, width: int, segments: Segments, device: torch.device
) -> dict[str, Callable[[int], Closure]]:
    """The two other reductions of the table gradients: AdaptiveLoad's D-tile and Liger's atomics."""
    from ops.kernels.norm_modulate import ablations

    def make(function: Callable[..., object]) -> Callable[[int], Closure]:
        def build(_: int) -> Closure:
            tensors = inputs_of(op.case.inputs, layout, width, device, torch.bfloat16)
            x, scale = tensors["x"].detach(), tensors["scale"].detach()
            dy = torch.randn_like(x)
            mean, rstd = x.float().mean(-1), torch.rsqrt(x.float().var(-1, correction=0) + 1e-6)
            return lambda: function(dy, x, scale, mean, rstd, segments)

        return build

    return {"D-tile (paper)": make(ablations.dtile_bwd), "atomic": make(ablations.atomic_bwd)}
