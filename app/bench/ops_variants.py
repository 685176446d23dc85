"""The contestants of `heddle bench ops`: for each op the fused one, eager PyTorch, and what else does the same.

Every variant is a function of (tensors, layout) -> outputs, differentiable, on the same packed tokens [N, D]; the
reduction ablations replace only the backward of ln_modulate and are functions of saved tensors instead.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import fused
from ops.kernels.base.segments import Segments

HEAD_DIM = 128
EPS = 1e-6
Tensors = dict[str, Tensor]
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """How N tokens share modulation rows. `uniform` layouts have equal runs, which eager code reaches by a view."""

    name: str
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def uniform(self) -> bool:
        return len(set(self.lengths)) == 1


def layouts(tokens: int) -> list[RowLayout]:
    """One sample, four samples, a timestep per frame (21 latent frames), and seven packed samples."""
    frame = tokens // 21
    shares = (0.31, 0.22, 0.17, 0.12, 0.09, 0.06)
    packed = [int(tokens * share) for share in shares]
    return [
        RowLayout(name="B=1", lengths=(tokens,)),
        RowLayout(name="B=4", lengths=(tokens // 4,) * 4),
        RowLayout(name="per frame", lengths=(frame,) * 21),
        RowLayout(name="packed", lengths=(*packed, tokens - sum(packed))),
    ]


Variant = Callable[[Tensors, RowLayout, Segments, Tensor], Outputs]  # the last are the table rows of all tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """Traffic minimum in units of T = 2 N D bytes, the tensors that get gradients, and the variants."""

    name: str
    forward_T: int
    backward_T: int
    inputs: tuple[str, ...]
    variants: Mapping[str, Variant]


def inputs_of(op: Op, layout: RowLayout, width: int, device: torch.device, dtype: torch.dtype) -> Tensors:
    """Fresh random tensors; tables like the tokens (as eager bf16 code has them) with one row per run."""
    made: Tensors = {}
    for name in op.inputs:
        rows = layout.tokens if name in ("x", "y", "q", "k") else len(layout.lengths)
        if name in ("wq", "wk"):
            made[name] = torch.rand(width, device=device).add_(0.5)
        else:
            made[name] = torch.randn(rows, width, device=device, dtype=dtype)
        made[name].requires_grad_()
    if "q" in op.inputs:
        angles = torch.rand(layout.tokens, HEAD_DIM // 2, device=device) * 6.28
        made |= {"cos": angles.cos(), "sin": angles.sin()}
    return made


def _modulation(table: Tensor, layout: RowLayout, rows: Tensor) -> Tensor:
    """The table as eager code expands it: a broadcast view where runs are equal, a gather to [N, D] where not."""
    return table[:, None] if layout.uniform else table[rows]


def _shape(x: Tensor, layout: RowLayout) -> Tensor:
    return x.view(len(layout.lengths), -1, x.shape[-1]) if layout.uniform else x


def eager_ln(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
    h = F.layer_norm(_shape(t["x"], layout), t["x"].shape[-1:], eps=EPS)
    return (h * (1 + _modulation(t["scale"], layout, rows)) + _modulation(t["shift"], layout, rows),)


def one_line_ln(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
    """One sample needs no modulation ops at all: scale and shift are the affine weights of a plain LayerNorm."""
    return (F.layer_norm(t["x"], t["x"].shape[-1:], 1 + t["scale"][0], t["shift"][0], EPS),)


def eager_rms(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
    h = F.rms_norm(_shape(t["x"], layout), t["x"].shape[-1:], eps=EPS)
    return (h * (1 + _modulation(t["scale"], layout, rows)) + _modulation(t["shift"], layout, rows),)


def eager_gate(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
    return (_shape(t["x"], layout) + _modulation(t["gate"], layout, rows) * _shape(t["y"], layout),)


def eager_gate_ln(t: Tensors, layout: RowLayout, segments: Segments, rows: Tensor) -> Outputs:
    (residual,) = eager_gate(t, layout, segments, rows)
    return residual, *eager_ln(t | {"x": residual.view(t["x"].shape)}, layout, segments, rows)


def eager_qk(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
    """RMSNorm and RoPE of Diffusers' Wan."""
    return tuple(
        _eager_rope(F.rms_norm(t[x].float(), t[x].shape[-1:], t[w], EPS).type_as(t[x]), t["cos"], t["sin"])
        for x, w in (("q", "wq"), ("k", "wk"))
    )


def _eager_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, HEAD_DIM // 2, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    out = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return out.flatten(1).type_as(x)


def fused_ln(t: Tensors, _: RowLayout, segments: Segments, rows: Tensor) -> Outputs:
    return (fused.ln_modulate(t["x"], t["scale"], t["shift"], segments),)


def fused_rms(t: Tensors, _: RowLayout, segments: Segments, rows: Tensor) -> Outputs:
    return (fused.ln_modulate(t["x"], t["scale"], t["shift"], segments, rms=True),)


def fused_gate(t: Tensors, _: RowLayout, segments: Segments, rows: Tensor) -> Outputs:
    return (fused.gate_residual(t["x"], t["y"], t["gate"], segments),)


def fused_gate_ln(t: Tensors, _: RowLayout, segments: Segments, rows: Tensor) -> Outputs:
    return fused.gate_residual_ln_modulate(t["x"], t["y"], t["gate"], t["scale"], t["shift"], segments)


def fused_qk(t: Tensors, _: RowLayout, segments: Segments, rows: Tensor) -> Outputs:
    return fused.qk_norm_rope(t["q"], t["k"], t["wq"], t["wk"], t["cos"], t["sin"], head_dim=HEAD_DIM)


def liger_rms() -> Variant:
    """Liger's modulated RMSNorm (no LayerNorm of that kind exists there), which takes one table row per equal run."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise ValueError("liger-kernel is not installed. Install it, or run without --liger.")
    function = importlib.import_module("liger_kernel.ops.modulated_rms_norm").LigerModulatedRMSNormFunction

    def run(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
        # offset 0, bf16 rounding before the modulation as in eager, and dx not written over dy, which replays reuse
        return (function.apply(_shape(t["x"], layout), None, t["scale"], t["shift"], EPS, 0.0, "llama", False),)

    return run


def ops(liger: bool) -> list[Op]:
    """All ops with their variants; the first variant is ours, the second the eager baseline."""
    rms: dict[str, Variant] = {"fused": fused_rms, "eager": eager_rms}
    if liger:
        rms["Liger RMS"] = liger_rms()
    return [
        Op(
            name="ln_modulate",
            forward_T=2,
            backward_T=3,
            inputs=("x", "scale", "shift"),
            variants={"fused": fused_ln, "eager": eager_ln, "one-line eager": one_line_ln},
        ),
        Op(
            name="gate_residual_ln_modulate",
            forward_T=4,
            backward_T=6,
            inputs=("x", "y", "gate", "scale", "shift"),
            variants={"fused": fused_gate_ln, "eager": eager_gate_ln},
        ),
        Op(
            name="gate_residual",
            forward_T=3,
            backward_T=3,
            inputs=("x", "y", "gate"),
            variants={"fused": fused_gate, "eager": eager_gate},
        ),
        Op(
            name="qk_norm_rope",
            forward_T=4,
            backward_T=6,
            inputs=("q", "k", "wq", "wk"),
            variants={"fused": fused_qk, "eager": eager_qk},
        ),
        Op(name="ln_modulate, RMS", forward_T=2, backward_T=3, inputs=("x", "scale", "shift"), variants=rms),
    ]
