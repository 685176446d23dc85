"""Who is measured beside ln_modulate: eager PyTorch, a plain LayerNorm where one sample allows it, Liger's RMSNorm.

The ablations of its reductions (`ablations.py`) replace only the backward and are functions of saved tensors instead.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch.nn.functional as F
from torch import Tensor

from ops.kernels.base.contest import EPS, Contest, OpVariant, Outputs, RowLayout, Tensors, modulation, samples
from ops.kernels.base.segments import Segments
from ops.kernels.norm_modulate.function import ln_modulate


def eager_ln(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
    h = F.layer_norm(samples(t["x"], layout), t["x"].shape[-1:], eps=EPS)
    return (h * (1 + modulation(t["scale"], layout, rows)) + modulation(t["shift"], layout, rows),)


def one_line_ln(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
    """One sample needs no modulation ops at all: scale and shift are the affine weights of a plain LayerNorm."""
    return (F.layer_norm(t["x"], t["x"].shape[-1:], 1 + t["scale"][0], t["shift"][0], EPS),)


def eager_rms(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
    h = F.rms_norm(samples(t["x"], layout), t["x"].shape[-1:], eps=EPS)
    return (h * (1 + modulation(t["scale"], layout, rows)) + modulation(t["shift"], layout, rows),)


def fused_ln(t: Tensors, _: RowLayout, segments: Segments, rows: Tensor) -> Outputs:
    return (ln_modulate(t["x"], t["scale"], t["shift"], segments),)


def fused_rms(t: Tensors, _: RowLayout, segments: Segments, rows: Tensor) -> Outputs:
    return (ln_modulate(t["x"], t["scale"], t["shift"], segments, rms=True),)


def liger_rms() -> OpVariant:
    """Liger's modulated RMSNorm (no LayerNorm of that kind exists there), which takes one table row per equal run."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise ValueError("liger-kernel is not installed. Install it, or run without --liger.")
    function = importlib.import_module("liger_kernel.ops.modulated_rms_norm").LigerModulatedRMSNormFunction

    def run(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
        # offset 0, bf16 rounding before the modulation as in eager, and dx not written over dy, which replays reuse
        return (function.apply(samples(t["x"], layout), None, t["scale"], t["shift"], EPS, 0.0, "llama", False),)

    return run


def contests(liger: bool) -> list[Contest]:
    rms: dict[str, OpVariant] = {"fused": fused_rms, "eager": eager_rms}
    if liger:
        rms["Liger RMS"] = liger_rms()
    inputs = ("x", "scale", "shift")
    ln: dict[str, OpVariant] = {"fused": fused_ln, "eager": eager_ln, "one-line eager": one_line_ln}
    return [
        Contest(name="ln_modulate", turn=0, forward_T=2, backward_T=3, inputs=inputs, variants=ln),
        Contest(name="ln_modulate, RMS", turn=4, forward_T=2, backward_T=3, inputs=inputs, variants=rms),
    ]
