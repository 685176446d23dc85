"""Layers that the transformers share, with Diffusers' parameter names.

Modules named after a norm hold parameters only; the fused ops of ops/kernels/ do the arithmetic.
S sequences, n local rows, D model width, H heads, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.kernels.qk_rope.op import qk_norm_rope
from ops.precision import precise_linear

Activation = Callable[[Tensor], Tensor]
_TIME_DIM = 256  # sinusoidal width of AdaLayerNormSingle, not a setting there


def gelu_tanh(x: Tensor) -> Tensor:
    """[any shape] -> the same"""
    return F.gelu(x, approximate="tanh")


class TwoLayerMLP(nn.Module):
    """linear_1, activation, linear_2: Diffusers' TimestepEmbedding (silu) and PixArtAlphaTextProjection (gelu)."""

    def __init__(self, in_dim: int, dim: int, activation: Activation) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_dim, dim)
        self.linear_2 = nn.Linear(dim, dim)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[S, in_dim] -> [S, dim]"""
        return self.linear_2(self.activation(self.linear_1(x.to(self.linear_1.weight.dtype))))

    def precise(self, x: Tensor) -> Tensor:
        """The same in at least fp32, whatever weights and autocast are."""
        return precise_linear(self.linear_2, self.activation(precise_linear(self.linear_1, x)))


class _Projection(nn.Module):
    def __init__(self, in_dim: int, out_dim: int, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(in_dim, out_dim, bias)


class FeedForward(nn.Module):
    """Diffusers' FeedForward: net.0.proj, activation, net.2."""

    def __init__(
        self,
        dim: int,
        inner_dim: int,
        activation: Activation = gelu_tanh,
        out_dim: int | None = None,
        *,
        gated: bool = False,
        bias: bool = True,
    ) -> None:
        """`gated`: the activation makes one number of two."""
        super().__init__()
        first = _Projection(dim, 2 * inner_dim if gated else inner_dim, bias)
        self.net = nn.ModuleList([first, nn.Identity(), nn.Linear(inner_dim, out_dim or dim, bias)])
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[n, D] -> [n, D], or [n, out_dim]"""
        projection = self.net[0]
        assert isinstance(projection, _Projection)
        return self.net[2](self.activation(projection.proj(x)))

    def precise(self, x: Tensor) -> Tensor:
        """The same in at least fp32, whatever weights and autocast are."""
        projection, last = self.net[0], self.net[2]
        assert isinstance(projection, _Projection) and isinstance(last, nn.Linear)
        return precise_linear(last, self.activation(precise_linear(projection.proj, x)))


class PatchEmbedding(nn.Conv3d):
    """A convolution whose stride is its kernel, applied to tokens that `patchify` already cut: one matrix product."""

    def __init__(self, in_channels: int, dim: int, patch: tuple[int, int, int]) -> None:
        super().__init__(in_channels, dim, kernel_size=patch, stride=patch)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, C * patch] -> [n, D]"""
        return F.linear(tokens.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class Attention(nn.Module):
    """Projections and QK-norm weights (over all heads) of one attention."""

    def __init__(self, dim: int, head_dim: int, eps: float, rope_dim: int | None = None) -> None:
        """`rope_dim`: what a row of cos and sin is for, by default a head; the width where heads are turned apart."""
        super().__init__()
        self.head_dim, self.eps, self.rope_dim = head_dim, eps, rope_dim or head_dim
        self.to_q, self.to_k, self.to_v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        self.norm_q, self.norm_k = nn.RMSNorm(dim, eps), nn.RMSNorm(dim, eps)

    def project(
        self, x: Tensor, context: Tensor, cos: Tensor | None = None, sin: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised, rotated q [n, H, d] of x; k, v [m, H, d] of the context."""
        q, k = qk_norm_rope(
            self.to_q(x),
            self.to_k(context),
            self.norm_q.weight,
            self.norm_k.weight,
            cos,
            sin,
            head_dim=self.rope_dim,
            eps=self.eps,
        )
        v = self.to_v(context)
        return self._heads(q), self._heads(k), self._heads(v)

    def output(self, heads: Tensor) -> Tensor:
        """[n, H, d] -> [n, D]"""
        return self.to_out[0](heads.flatten(1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


def sinusoidal_embedding(timesteps: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """[S] -> [S, dim], cosines first, as Diffusers' Timesteps(flip_sin_to_cos=True, downscale_freq_shift=0).

    At least fp32: timesteps reach 1000, where bf16 has steps of 4.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    half = dim // 2
    # fp32 also for fp64 models, so that both use the frequencies the weights were trained with
    exponent = -math.log(10000) * torch.arange(half, dtype=torch.float32, device=timesteps.device) / half
    angles = timesteps.to(dtype)[:, None] * exponent.exp().to(dtype)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def time_and_modulation(timesteps: Tensor, embedder: TwoLayerMLP, projection: nn.Linear) -> tuple[Tensor, Tensor]:
    """timesteps [R] -> time [R, D] and the modulation of all blocks [R, 6, D].

    In at least fp32, also with weights in bf16 and under autocast: modulation multiplies every activation. So Wan's own
    code computes both; Diffusers keeps the embedder and the blocks' tables in fp32 (`_keep_in_fp32_modules` of
    WanTransformer3DModel) and, as of all other families here, runs the projection in the weights' dtype.
    """
    time = embedder.precise(
        sinusoidal_embedding(timesteps, embedder.linear_1.in_features, embedder.linear_1.weight.dtype)
    )
    return time, precise_linear(projection, F.silu(time)).unflatten(1, (6, -1))


class TimeModulation(nn.Module):
    """Diffusers' AdaLayerNormSingle: the time of each table row, and from it what modulates all blocks."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.emb = _TimestepEmbedding(dim)
        self.linear = nn.Linear(dim, 6 * dim)

    def forward(self, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """[R] -> time [R, D], modulation [R, 6, D]."""
        return time_and_modulation(timesteps, self.emb.timestep_embedder, self.linear)


class _TimestepEmbedding(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.timestep_embedder = TwoLayerMLP(_TIME_DIM, dim, F.silu)


def init_linear(model: nn.Module, head: nn.Linear) -> None:
    """Xavier for projections, 0.02 (narrow layers: 1/sqrt(inputs)) for two-layer embeddings, 0.02 for the head. The
    head is small instead of zero, so that every parameter has a gradient from the first step on."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, PatchEmbedding):
            nn.init.xavier_uniform_(module.weight.flatten(1))
    for module in model.modules():
        if isinstance(module, TwoLayerMLP):
            # 0.02 fits published widths; in a narrow model it leaves text and time at 1 % of their size at the start
            for linear in (module.linear_1, module.linear_2):
                nn.init.normal_(linear.weight, std=max(0.02, linear.in_features**-0.5))
    nn.init.normal_(head.weight, std=0.02)
