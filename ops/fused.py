"""Norm, modulation, gate and QK-norm with RoPE of diffusion transformers, fused and trainable.

    h = ln_modulate(x, scale, shift, segments)                      # norm(x) * (1 + scale) + shift
    x, h = gate_residual_ln_modulate(x, attn, gate, scale, shift, segments)
    q, k = qk_norm_rope(q, k, wq, wk, cos, sin, head_dim=128)

Tokens are packed [N, D] (any leading dimensions are flattened); `segments` says which row of the [S, D] tables each
token uses. On CUDA the Triton kernels run, elsewhere library calls; both mean what `reference.py` in the op's folder
under ops/kernels/ says.

dtypes: activations bf16, fp16, fp32 or fp64, tables independently. Arithmetic, statistics and table gradients are fp32
(fp64 for fp64 inputs), with one rounding at each store. Results have the autocast dtype under autocast (except fp64
inputs), else x's dtype, unless out_dtype is given. Gradients of tables are sums over the local tokens, zero for rows
without tokens: summing them over sequence-parallel shards gives the gradient of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ops.kernels.base.segments import Segments
from ops.kernels.gate_residual.function import gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate.function import ln_modulate
from ops.kernels.qk_rope.function import qk_norm_rope

__all__ = [
    "FusedAdaLN",
    "FusedGateAdaLN",
    "FusedQKNormRope",
    "gate_residual",
    "gate_residual_ln_modulate",
    "ln_modulate",
    "qk_norm_rope",
]


class FusedAdaLN(nn.Module):
    """Norm with optional affine weights and modulation: forward(x, scale, shift, segments)."""

    def __init__(self, dim: int, eps: float = 1e-6, elementwise_affine: bool = False, rms: bool = False) -> None:
        super().__init__()
        self.eps, self.rms = eps, rms
        self.weight = nn.Parameter(torch.ones(dim)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(dim)) if elementwise_affine and not rms else None

    def forward(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        segments: Segments | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x [..., D], tables [S, D] -> [..., D]."""
        return ln_modulate(
            x,
            scale,
            shift,
            segments,
            weight=self.weight,
            bias=self.bias,
            eps=self.eps,
            rms=self.rms,
            out_dtype=out_dtype,
        )


class FusedGateAdaLN(FusedAdaLN):
    """Gate, residual and norm with modulation: forward(x, y, gate, scale, shift, segments) -> (x', h)."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        y: Tensor,
        gate: Tensor | None = None,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        segments: Segments | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x, y [..., D], tables [S, D] -> x' and its norm [..., D]."""
        return gate_residual_ln_modulate(
            x,
            y,
            gate,
            scale,
            shift,
            segments,
            weight=self.weight,
            bias=self.bias,
            eps=self.eps,
            rms=self.rms,
            out_dtype=out_dtype,
        )


class FusedQKNormRope(nn.Module):
    """RMSNorm of q and k with weights, then RoPE: forward(q, k, cos, sin)."""

    def __init__(self, dim: int, head_dim: int, per_head: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        self.head_dim, self.per_head, self.eps = head_dim, per_head, eps
        self.weight_q = nn.Parameter(torch.ones(head_dim if per_head else dim))
        self.weight_k = nn.Parameter(torch.ones(head_dim if per_head else dim))

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor | None = None, sin: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """q, k [..., D], cos, sin [n, head_dim / 2] -> q, k [..., D]."""
        return qk_norm_rope(
            q, k, self.weight_q, self.weight_k, cos, sin, head_dim=self.head_dim, per_head=self.per_head, eps=self.eps
        )
