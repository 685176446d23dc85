"""Inputs of `heddle bench ops`: layouts of packed tokens, and fresh tensors.

The contestants themselves are in the folders of the ops, `ops/kernels/NAME/variants.py`.
"""

from __future__ import annotations

import torch

from ops.kernels.base.contest import Contest, RowLayout, Tensors

HEAD_DIM = 128


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


def inputs_of(op: Contest, layout: RowLayout, width: int, device: torch.device, dtype: torch.dtype) -> Tensors:
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
