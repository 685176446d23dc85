"""Who is measured beside gate_residual and gate_residual_ln_modulate: eager PyTorch."""

from __future__ import annotations

from torch import Tensor

from ops.kernels.base.contest import Contest, Outputs, RowLayout, Tensors, modulation, samples
from ops.kernels.base.segments import Segments
from ops.kernels.gate_residual.function import gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate.variants import eager_ln


def eager_gate(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
    return (samples(t["x"], layout) + modulation(t["gate"], layout, rows) * samples(t["y"], layout),)


def eager_gate_ln(t: Tensors, layout: RowLayout, segments: Segments, rows: Tensor) -> Outputs:
    (residual,) = eager_gate(t, layout, segments, rows)
    return residual, *eager_ln(t | {"x": residual.view(t["x"].shape)}, layout, segments, rows)


def fused_gate(t: Tensors, _: RowLayout, segments: Segments, rows: Tensor) -> Outputs:
    return (gate_residual(t["x"], t["y"], t["gate"], segments),)


def fused_gate_ln(t: Tensors, _: RowLayout, segments: Segments, rows: Tensor) -> Outputs:
    return gate_residual_ln_modulate(t["x"], t["y"], t["gate"], t["scale"], t["shift"], segments)


def contests(liger: bool) -> list[Contest]:
    return [
        Contest(
            name="gate_residual_ln_modulate",
            turn=1,
            forward_T=4,
            backward_T=6,
            inputs=("x", "y", "gate", "scale", "shift"),
            variants={"fused": fused_gate_ln, "eager": eager_gate_ln},
        ),
        Contest(
            name="gate_residual",
            turn=2,
            forward_T=3,
            backward_T=3,
            inputs=("x", "y", "gate"),
            variants={"fused": fused_gate, "eager": eager_gate},
        ),
    ]
