"""Layouts of packed tokens, and fresh tensors, on which ops are timed and checked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ops.kernels.base.measured import HEAD_DIM, InputKind, RowLayout, Tensors


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


def inputs_of(
    kinds: Mapping[str, InputKind],
    layout: RowLayout,
    width: int,
    device: torch.device,
    dtype: torch.dtype,
    wide: torch.dtype | None = None,
) -> Tensors:
    """Fresh random tensors by the kinds of their names, with a gradient where they get one. Tables are like the tokens,
    as eager bf16 code has them, with one row per run; with `wide` these and the residual stream are of that dtype."""
    rows = {"tokens": layout.tokens, "stream": layout.tokens, "table": len(layout.lengths)}

    def made(kind: InputKind) -> Tensor:
        if kind in rows:
            values = torch.randn(rows[kind], width, device=device)
            return values.to(dtype if kind == "tokens" or wide is None else wide)
        return torch.rand(width if kind == "vector" else HEAD_DIM, device=device).add_(0.5)

    found = {name: made(kind).requires_grad_() for name, kind in kinds.items() if kind not in ("cos", "sin")}
    angles = torch.rand(layout.tokens, HEAD_DIM // 2, device=device) * 6.28
    turned: dict[InputKind, Tensor] = {"cos": angles.cos(), "sin": angles.sin()}
    return found | {name: turned[kind] for name, kind in kinds.items() if kind in turned}
