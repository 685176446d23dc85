"""Triton kernels at the widths of real models against float64, forward and backward; noise against the CPU's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.bench.gpu.measurement import Earlier, NamedFigures, Place, relative_error
from app.bench.ops_inputs import inputs_of
from ops.flow.noise import NoiseKey, normal
from ops.kernels.base import backend
from ops.kernels.base.interpreter import interpreting, round_bf16_like_hardware
from ops.kernels.base.measured import OpCase, Outputs, RowLayout
from ops.kernels.base.segments import Segments
from ops.kernels.folders import cases

# Relative L2 to float64. Rounding to bf16 costs 1.67e-3, to fp16 an eighth of that; sums in fp32 over thousands of rows
# lose a little.
FP32, FP32_SUM, BF16, FP16, SUM_FROM_HALF = 5e-6, 2e-5, 2.0e-3, 3e-4, 2e-5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTHS = {  # of Wan and HunyuanVideo; then of Latte and CogVideoX-2B, whose last chunk is masked
    **dict.fromkeys((1536, 3072, 5120), ("bf16", "fp32")),
    **dict.fromkeys((1152, 1920), ("bf16", "fp16")),
}
SMALL_WIDTHS = {128: ("bf16", "fp16")}
LAST_BIT = 2e-7  # by which two libraries' logarithms may round another way, one number in some 10^8
ROUNDED_APART = 1e-6  # of the numbers at most


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelsCheck:
    """One op over all widths and their dtypes; the figures are worst errors."""

    op: str
    estimate_s: float = 20.0

    @property
    def name(self) -> str:
        return f"kernels.{self.op}"

    def why_not(self, place: Place) -> str | None:
        return without_kernels(place)

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        if place.device.type == "cpu":
            round_bf16_like_hardware()
        lengths = place.pick((1311, 0, 1, 777, 2005, 2), (3, 0, 1, 2))
        case, layout = cases()[self.op], RowLayout(name="packed", lengths=lengths)
        worst: dict[str, float] = {}
        repeatable = True
        with backend.forced("triton"):
            for width, dtypes in place.pick(WIDTHS, SMALL_WIDTHS).items():
                for dtype in dtypes:
                    repeatable &= _compare(case, layout, width, dtype, place.device, worst)
        right = all(error <= LIMITS[kind] for kind, error in worst.items())
        return {"right": right and repeatable, "same bits twice": repeatable, **worst}


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseCheck:
    """The kernel that draws noise: its numbers are those of the CPU, also from a place that 32 bits do not hold; and
    what it saves for a clip of 480p81."""

    name: str = "kernels.noise"
    estimate_s: float = 5.0

    def why_not(self, place: Place) -> str | None:
        return without_kernels(place)

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        from ops.flow.noise_kernel import NUMBERS, fill  # Triton reads how it runs when it is imported

        count, off, near = place.pick(2**20, 130), 0, True
        key, of_clip = NoiseKey.of(1, 2, "sample"), place.pick(32_760 * 64, 100)
        for start in (0, 2**40 + 1):
            ours = fill(key.low, key.high, start, count, place.device).cpu()
            theirs = normal(key, start * NUMBERS, count * NUMBERS)
            off += int((ours != theirs).sum())
            near &= torch.allclose(ours, theirs, rtol=LAST_BIT, atol=0)
        drawn = place.seconds(lambda: normal(key, 0, of_clip, place.device), 3)
        sent = place.seconds(lambda: normal(key, 0, of_clip).to(place.device), 3)
        return {
            "right": near and off <= ROUNDED_APART * 2 * count * NUMBERS,
            "numbers": 2 * count * NUMBERS,
            "numbers that differ": off,
            "ms drawn on the device": 1e3 * drawn.seconds,
            "ms drawn on the host and sent": 1e3 * sent.seconds,
        }


def measurements() -> list[KernelsCheck | NoiseCheck]:
    return [*(KernelsCheck(op=op) for op in cases()), NoiseCheck()]


LIMITS = {
    "bf16 output": BF16,
    "bf16 gradient": BF16,
    "fp16 output": FP16,
    "fp16 gradient": FP16,
    "fp32 output": FP32,
    "fp32 gradient": FP32,
    "table gradient from bf16": SUM_FROM_HALF,
    "table gradient from fp16": SUM_FROM_HALF,
    "table gradient from fp32": FP32_SUM,
}


def without_kernels(place: Place) -> str | None:
    """Why the Triton kernels cannot run here, in one sentence."""
    if not backend.has_triton():
        return "triton is not installed."
    if place.device.type == "cpu" and not interpreting():
        return "the kernels run on the CPU in Triton's interpreter only (TRITON_INTERPRET=1)."
    return None


def _compare(
    case: OpCase, layout: RowLayout, width: int, dtype: str, device: torch.device, worst: dict[str, float]
) -> bool:
    """Raise the worst errors; whether a second run gives the same bits. Tables and the residual stream are fp32."""
    segments = Segments.packed(layout.lengths, device=device)
    given = inputs_of(case.inputs, layout, width, device, DTYPES[dtype], wide=torch.float32)
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
    for ours, theirs in zip(outputs, exact, strict=True):
        _raise(worst, f"{dtype} output", relative_error(ours, theirs))
    for name, ours, theirs in zip(case.differentiable, gradients, wanted_gradients, strict=True):
        of_tokens = case.inputs[name] in ("tokens", "stream")
        kind = f"{dtype} gradient" if of_tokens else f"table gradient from {dtype}"
        _raise(worst, kind, relative_error(ours, theirs))
    return same


def _raise(worst: dict[str, float], kind: str, error: float) -> None:
    worst[kind] = max(worst.get(kind, 0.0), error if error == error else float("inf"))  # NaN is no small error


def _equal(ours: Outputs, theirs: Outputs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
