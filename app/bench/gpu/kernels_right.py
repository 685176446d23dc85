"""Triton kernels at the widths of real models against float64, forward and backward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from app.bench.gpu.measurement import Earlier, NamedFigures, Place, relative_error
from app.bench.ops_inputs import inputs_of
from ops.kernels.base import backend
from ops.kernels.base.interpreter import interpreting, round_bf16_like_hardware
from ops.kernels.base.measured import OpCase, Outputs, RowLayout
from ops.kernels.base.segments import Segments
from ops.kernels.folders import cases

# Relative L2 to float64. Rounding to bf16 costs 1.67e-3; sums in fp32 over thousands of rows lose a little.
FP32, FP32_SUM, BF16, SUM_FROM_BF16 = 5e-6, 2e-5, 2.0e-3, 2e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelsCheck:
    """One op over all widths and both dtypes; the figures are worst errors."""

    op: str
    estimate_s: float = 15.0

    @property
    def name(self) -> str:
        return f"kernels.{self.op}"

    def why_not(self, place: Place) -> str | None:
        return without_kernels(place)

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        if place.device.type == "cpu":
            round_bf16_like_hardware()
        widths = place.pick((1536, 3072, 5120), (128,))
        lengths = place.pick((1311, 0, 1, 777, 2005, 2), (3, 0, 1, 2))
        case, layout = cases()[self.op], RowLayout(name="packed", lengths=lengths)
        worst: dict[str, float] = {}
        repeatable = True
        with triton_only():
            for width in widths:
                for dtype in (torch.bfloat16, torch.float32):
                    repeatable &= _compare(case, layout, width, dtype, place.device, worst)
        right = all(error <= LIMITS[kind] for kind, error in worst.items())
        return {"right": right and repeatable, "same bits twice": repeatable, **worst}


def measurements() -> list[KernelsCheck]:
    return [KernelsCheck(op=op) for op in cases()]


LIMITS = {
    "bf16 output": BF16,
    "bf16 gradient": BF16,
    "fp32 output": FP32,
    "fp32 gradient": FP32,
    "table gradient from bf16": SUM_FROM_BF16,
    "table gradient from fp32": FP32_SUM,
}


def without_kernels(place: Place) -> str | None:
    """Why the Triton kernels cannot run here, in one sentence."""
    if not backend.has_triton():
        return "triton is not installed."
    if place.device.type == "cpu" and not interpreting():
        return "the kernels run on the CPU in Triton's interpreter only (TRITON_INTERPRET=1)."
    return None


def triton_only() -> AbstractContextManager[None]:
    """Ops run on the Triton kernels wherever these take them."""
    return backend.forced("triton")


def _compare(
    case: OpCase, layout: RowLayout, width: int, dtype: torch.dtype, device: torch.device, worst: dict[str, float]
) -> bool:
    """Raise the worst errors; whether a second run gives the same bits. Tables and the residual stream are fp32."""
    segments = Segments.packed(layout.lengths, device=device)
    given = inputs_of(case.inputs, layout, width, device, dtype, wide=torch.float32)
    if not backend.use_kernels(next(iter(given.values()))):
        raise RuntimeError(f"the Triton kernels do not take {layout.lengths} x {width} in {dtype}; the log says why.")
    leaves = [given[name] for name in case.differentiable]
    outputs = case.ours(given, segments)
    cotangents = [torch.randn_like(out) for out in outputs]
    gradients = torch.autograd.grad(outputs, leaves, cotangents)
    again = case.ours(given, segments)
    same = _equal(outputs, again) and _equal(gradients, torch.autograd.grad(again, leaves, cotangents))

    wanted = {name: t.detach().double().requires_grad_(t.requires_grad) for name, t in given.items()}
    exact = case.meaning(wanted, segments.run2mod.long()[segments.run.long()])
    wanted_gradients = torch.autograd.grad(
        exact, [wanted[name] for name in case.differentiable], [c.double() for c in cotangents]
    )
    low = "bf16" if dtype == torch.bfloat16 else "fp32"
    for ours, theirs in zip(outputs, exact, strict=True):
        _raise(worst, f"{low} output", relative_error(ours, theirs))
    for name, ours, theirs in zip(case.differentiable, gradients, wanted_gradients, strict=True):
        of_tokens = case.inputs[name] in ("tokens", "stream")
        _raise(worst, f"{low} gradient" if of_tokens else f"table gradient from {low}", relative_error(ours, theirs))
    return same


def _raise(worst: dict[str, float], kind: str, error: float) -> None:
    worst[kind] = max(worst.get(kind, 0.0), error if error == error else float("inf"))  # NaN is no small error


def _equal(ours: Outputs, theirs: Outputs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
