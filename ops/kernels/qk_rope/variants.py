"""Who is measured beside qk_norm_rope: eager PyTorch as in Diffusers' Wan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.kernels.base.contest import EPS, Contest, Outputs, RowLayout, Tensors
from ops.kernels.base.segments import Segments
from ops.kernels.qk_rope.function import qk_norm_rope

HEAD_DIM = 128


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


def fused_qk(t: Tensors, _: RowLayout, segments: Segments, rows: Tensor) -> Outputs:
    return qk_norm_rope(t["q"], t["k"], t["wq"], t["wk"], t["cos"], t["sin"], head_dim=HEAD_DIM)


def contests(liger: bool) -> list[Contest]:
    return [
        Contest(
            name="qk_norm_rope",
            turn=3,
            forward_T=4,
            backward_T=6,
            inputs=("q", "k", "wq", "wk"),
            variants={"fused": fused_qk, "eager": eager_qk},
        )
    ]
