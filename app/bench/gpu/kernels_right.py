"""Triton kernels at the widths of real models against float64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from app.bench.gpu.measurement import Earlier, NamedFigures, Place, relative_error
from ops import fused
from ops.kernels.base import backend
from ops.kernels.base.contest import Outputs, Tensors
from ops.kernels.base.interpreter import interpreting, round_bf16_like_hardware
from ops.kernels.base.segments import Segments
from ops.kernels.gate_residual import reference as gate_reference
from ops.kernels.norm_modulate import reference as norm_reference
from ops.kernels.qk_rope import reference as qk_reference

# Relative L2 to float64. Rounding to bf16 costs 1.67e-3; sums in fp32 over thousands of rows lose a little.
FP32, FP32_SUM, BF16, SUM_FROM_BF16 = 5e-6, 2e-5, 2.0e-3, 2e-5
HEAD_DIM = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCase:
    """Tensors of one op, the op on them, and what it means. `rows` are [N, D] tensors, the rest are small."""

    make: Callable[[KernelSize, torch.dtype, torch.device], Tensors]
    ours: Callable[[Tensors, Segments], Outputs]
    meaning: Callable[[Tensors, Tensor], Outputs]  # the last argument: the table row of each token


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSize:
    lengths: tuple[int, ...]
    width: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelsCheck:
    """One op over all widths and both dtypes; the figures are worst errors."""

    op: str
    estimate_s: float = 15.0

    @property
    def name(self) -> str:
        return f"kernels.{self.op}"

    def why_not(self, place: Place) -> str | None:
        if not backend.has_triton():
            return "triton is not installed."
        if place.device.type == "cpu" and not interpreting():
            return "the kernels run on the CPU in Triton's interpreter only (TRITON_INTERPRET=1)."
        return None

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        if place.device.type == "cpu":
            round_bf16_like_hardware()
        widths = place.pick((1536, 3072, 5120), (128, 256))
        lengths = place.pick((1311, 0, 1, 777, 2005, 2), (7, 0, 1, 4))
        worst: dict[str, float] = {}
        repeatable = True
        with triton_only():
            for width in widths:
                for dtype in (torch.bfloat16, torch.float32):
                    size = KernelSize(lengths=lengths, width=width)
                    repeatable &= _compare(CASES[self.op], size, dtype, place.device, worst)
        right = all(error <= LIMITS[kind] for kind, error in worst.items())
        return {"right": right and repeatable, "same bits twice": repeatable, **worst}


def measurements() -> list[KernelsCheck]:
    return [KernelsCheck(op=op) for op in CASES]


LIMITS = {
    "bf16 output": BF16,
    "bf16 gradient": BF16,
    "fp32 output": FP32,
    "fp32 gradient": FP32,
    "table gradient from bf16": SUM_FROM_BF16,
    "table gradient from fp32": FP32_SUM,
}


def triton_only() -> AbstractContextManager[None]:
    """Ops run on the Triton kernels wherever these take them."""
    return backend.forced("triton")


def _compare(
    case: KernelCase, size: KernelSize, dtype: torch.dtype, device: torch.device, worst: dict[str, float]
) -> bool:
    """Raise the worst errors; whether a second run gives the same bits."""
    segments = Segments.packed(size.lengths, device=device)
    given = {name: t.requires_grad_() for name, t in case.make(size, dtype, device).items()}
    first = next(iter(given.values()))
    if not backend.use_kernels(first):
        raise RuntimeError(f"the Triton kernels do not take {size} in {dtype}; the log says why.")
    leaves = [t for name, t in given.items() if name not in FIXED]
    fixed = {name: t.detach() for name, t in given.items() if name in FIXED}
    outputs = case.ours(given | fixed, segments)
    cotangents = [torch.randn_like(out) for out in outputs]
    gradients = torch.autograd.grad(outputs, leaves, cotangents)
    again = case.ours(given | fixed, segments)
    same = _equal(outputs, again) and _equal(gradients, torch.autograd.grad(again, leaves, cotangents))

    wanted = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    exact_leaves = [t for name, t in wanted.items() if name not in FIXED]
    exact_fixed = {name: t.detach() for name, t in wanted.items() if name in FIXED}
    exact = case.meaning(wanted | exact_fixed, segments.run2mod.long()[segments.run.long()])
    wanted_gradients = torch.autograd.grad(exact, exact_leaves, [c.double() for c in cotangents])
    low = "bf16" if dtype == torch.bfloat16 else "fp32"
    for ours, theirs in zip(outputs, exact, strict=True):
        _raise(worst, f"{low} output", relative_error(ours, theirs))
    for leaf, ours, theirs in zip(leaves, gradients, wanted_gradients, strict=True):
        of_tokens = leaf.ndim == 2 and leaf.shape[0] == size.tokens
        _raise(worst, f"{low} gradient" if of_tokens else f"table gradient from {low}", relative_error(ours, theirs))
    return same


FIXED = ("cos", "sin")


def _raise(worst: dict[str, float], kind: str, error: float) -> None:
    worst[kind] = max(worst.get(kind, 0.0), error if error == error else float("inf"))  # NaN is no small error


def _equal(ours: Outputs, theirs: Outputs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _tokens(size: KernelSize, dtype: torch.dtype, device: torch.device, *names: str) -> Tensors:
    return {name: torch.randn(size.tokens, size.width, device=device).to(dtype) for name in names}


def _tables(size: KernelSize, device: torch.device, *names: str) -> Tensors:
    return {name: torch.randn(len(size.lengths), size.width, device=device) for name in names}


def _vectors(size: KernelSize, device: torch.device, *names: str) -> Tensors:
    return {name: torch.rand(size.width, device=device) + 0.5 for name in names}


def _norm(rms: bool) -> KernelCase:
    return KernelCase(
        make=lambda size, dtype, device: _tokens(size, dtype, device, "x") | _tables(size, device, "scale", "shift"),
        ours=lambda t, segments: (fused.ln_modulate(t["x"], t["scale"], t["shift"], segments, rms=rms),),
        meaning=lambda t, rows: (norm_reference.ln_modulate(t["x"], t["scale"], t["shift"], rows, rms=rms),),
    )


def _affine() -> KernelCase:
    return KernelCase(
        make=lambda size, dtype, device: _tokens(size, dtype, device, "x") | _vectors(size, device, "weight", "bias"),
        ours=lambda t, segments: (fused.ln_modulate(t["x"], weight=t["weight"], bias=t["bias"]),),
        meaning=lambda t, rows: (norm_reference.ln_modulate(t["x"], weight=t["weight"], bias=t["bias"]),),
    )


def _gate() -> KernelCase:
    return KernelCase(
        make=lambda size, dtype, device: _tokens(size, dtype, device, "x", "y") | _tables(size, device, "gate"),
        ours=lambda t, segments: (fused.gate_residual(t["x"], t["y"], t["gate"], segments),),
        meaning=lambda t, rows: (gate_reference.gate_residual(t["x"], t["y"], t["gate"], rows),),
    )


def _gate_norm() -> KernelCase:
    def meaning(t: Tensors, rows: Tensor) -> Outputs:
        residual = gate_reference.gate_residual(t["x"], t["y"], t["gate"], rows)
        return residual, norm_reference.ln_modulate(residual, t["scale"], t["shift"], rows)

    return KernelCase(
        # an fp32 residual stream: a norm of a rounded one differs from float64 by the rounding, which is no fault
        make=lambda size, dtype, device: (
            _tokens(size, torch.float32, device, "x")
            | _tokens(size, dtype, device, "y")
            | _tables(size, device, "gate", "scale", "shift")
        ),
        ours=lambda t, segments: fused.gate_residual_ln_modulate(
            t["x"], t["y"], t["gate"], t["scale"], t["shift"], segments, out_dtype=t["y"].dtype
        ),
        meaning=meaning,
    )


def _qk(per_head: bool) -> KernelCase:
    def make(size: KernelSize, dtype: torch.dtype, device: torch.device) -> Tensors:
        width = HEAD_DIM if per_head else size.width
        weights = {name: torch.rand(width, device=device) + 0.5 for name in ("wq", "wk")}
        angles = torch.rand(size.tokens, HEAD_DIM // 2, device=device) * 6.28
        return _tokens(size, dtype, device, "q", "k") | weights | {"cos": angles.cos(), "sin": angles.sin()}

    def meaning(t: Tensors, rows: Tensor) -> Outputs:
        def turned(x: Tensor, weight: Tensor) -> Tensor:
            return qk_reference.qk_norm_rope(x, weight, t["cos"], t["sin"], head_dim=HEAD_DIM, per_head=per_head)

        return turned(t["q"], t["wq"]), turned(t["k"], t["wk"])

    return KernelCase(
        make=make,
        ours=lambda t, segments: fused.qk_norm_rope(
            t["q"], t["k"], t["wq"], t["wk"], t["cos"], t["sin"], head_dim=HEAD_DIM, per_head=per_head
        ),
        meaning=meaning,
    )


CASES = {
    "ln_modulate": _norm(rms=False),
    "gate_residual_ln_modulate": _gate_norm(),
    "qk_norm_rope": _qk(per_head=False),
    "qk_norm_rope-per-head": _qk(per_head=True),
    "gate_residual": _gate(),
    "rms_modulate": _norm(rms=True),
    "affine-norm": _affine(),
}
