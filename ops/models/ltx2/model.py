"""The branch for video of LTX-2's transformer over packed sequences, with the parameter names of
LTX2VideoTransformer3DModel.

S sequences, n rows of this rank, D width, d head size, T rows of the (replicated) text. Blocks are as LTX-Video's but
for a norm before the cross-attention and for RoPE, which turns the halves of a head against each other. That class
computes the same with `isolate_modalities`, and Lightricks' own code where a pass has no sound.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.kernels.base.segments import Segments
from ops.kernels.gate_residual.op import gate_residual_ln_modulate
from ops.kernels.qk_rope.op import qk_norm_rope
from ops.models.base.layers import Attention
from ops.models.ltx.model import LONGEST, LTXBlock, LTXTransformer
from ops.models.ltx2.config import LTX2Config
from ops.packed.packing import Layout


class LTX2DiT(LTXTransformer):
    config: LTX2Config

    def block(self) -> nn.Module:
        return LTX2Block(self.config)

    def rotation(self, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return rotation(layout, self.config, dtype)


def rotation(layout: Layout, config: LTX2Config, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [n, D / 2] of each local row, those of a head side by side. A frequency turns all three axes before
    the next one does; in front are the pairs that are not rotated. In fp32 and in the order of Diffusers: the last bit
    of a place is 2e-3 of an angle at the highest frequency."""
    stride_t = config.vae_stride[0]
    frames, rows, columns = layout.positions.float().unbind(1)
    rate = layout.made(_rates, config)[layout.seq_index]
    # the first latent frame stands for one frame alone
    begin, end = ((frame * stride_t + 1 - stride_t).clamp(min=0) / rate for frame in (frames, frames + 1))
    middles = [(begin + end) / 2]
    for place, pixels in zip((rows, columns), config.vae_stride[1:], strict=True):
        middles.append((place * pixels + (place + 1) * pixels) / 2)
    place = torch.stack([middle / longest for middle, longest in zip(middles, LONGEST, strict=True)], dim=1) * 2 - 1
    powers = torch.linspace(0.0, 1.0, config.dim // 6, dtype=torch.float64, device=layout.device)
    frequencies = (config.rope_theta**powers * (math.pi / 2)).float()
    angles = (place[:, None] * frequencies[:, None]).flatten(1)  # [n, D // 6 * 3]
    angles = F.pad(angles, (config.dim // 2 - angles.shape[1], 0))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rates(layout: Layout, config: LTX2Config) -> Tensor:
    """fp32 [S]: frames per second."""
    return torch.tensor([one.frame_rate or config.frame_rate for one in layout.sequences])


class SplitAttention(Attention):
    """Attention whose RoPE turns element i of a head with i + d / 2, by frequencies of each head's own."""

    def project(
        self, x: Tensor, context: Tensor, cos: Tensor | None = None, sin: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised, rotated q [n, H, d] of x; k, v [m, H, d] of the context. Elements of q and k that are turned
        together come side by side, as the fused op takes them: scores do not depend on their order."""
        if cos is None:
            return super().project(x, context)
        q, k = qk_norm_rope(
            self._paired(self.to_q(x)),
            self._paired(self.to_k(context)),
            self._paired(self.norm_q.weight),
            self._paired(self.norm_k.weight),
            cos,
            sin,
            head_dim=self.rope_dim,
            eps=self.eps,
        )
        return self._heads(q), self._heads(k), self._heads(self.to_v(context))

    def _paired(self, x: Tensor) -> Tensor:
        """[..., D] -> the same, i and i + d / 2 of each head side by side."""
        return x.unflatten(-1, (-1, 2, self.head_dim // 2)).transpose(-1, -2).flatten(-3)


class LTX2Block(LTXBlock):
    """LTX-Video's block with a norm before the cross-attention."""

    self_attention = SplitAttention
    qk_eps = 1e-6

    def text_queries(self, x: Tensor, y: Tensor, gate: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        return gate_residual_ln_modulate(x, y, gate, None, None, segments, eps=self.eps, rms=True)
