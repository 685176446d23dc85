"""HunyuanVideo-1.5's transformer over packed sequences, with the parameter names of HunyuanVideo15Transformer3DModel.

S sequences, n video rows and m text rows of this rank, T rows of the whole (replicated) text, D width, E text width.
HunyuanVideo's double-stream blocks alone, gated by the time and nothing else. Rows of text are of three kinds, the
states of captions, which are refined first, those of the glyphs that a caption quotes, and those that SigLIP makes of
a first frame. Text is not turned by positions, so the order of rows, which the published code has its own way, changes
nothing.

The text is refined in full by every rank and only then cut, so its gradients too are partial and sum up over the bag.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.kernels.norm_modulate.op import ln_modulate
from ops.models.base.joint import EPS, DoubleStreamBlock, JointInputs, Modulation, joint_rope
from ops.models.base.layers import PatchEmbedding, TwoLayerMLP, init_linear, sinusoidal_embedding
from ops.models.base.refiner import TokenRefiner
from ops.models.base.transformer import ForwardInputs, PackedTransformer
from ops.models.hunyuan15.config import Hunyuan15Config
from ops.packed.packing import Layout
from ops.precision import precise_product

_TIME_DIM = 256  # sinusoidal width, not a setting in the published code
_GLYPH_MLP = 2048  # nor is the width between the layers of glyphs
_CAPTION, _GLYPH, _PICTURE, _KINDS = 0, 1, 2, 3  # rows of `cond_type_embed`
_LEAST_SHARE = 1e-9  # far below one row of the longest text


class Hunyuan15DiT(PackedTransformer):
    config: Hunyuan15Config
    block_parts = ("joint_exchange", "segments", "local_text_segments")

    def __init__(self, config: Hunyuan15Config) -> None:
        super().__init__(config)
        self.x_embedder = _NoisyPatches(config)
        embedder = PictureProjection if config.starts_from_image else UnreadPictureProjection
        self.image_embedder = embedder(config.image_dim, config.dim)
        self.context_embedder = TokenRefiner(config, config.num_refiner_layers)
        self.context_embedder_2 = GlyphProjection(config.glyph_width, config.dim)
        self.time_embed = _TimeEmbedding(config.dim)
        self.cond_type_embed = nn.Embedding(_KINDS, config.dim)
        self.transformer_blocks = nn.ModuleList(DoubleStreamBlock(config) for _ in range(config.num_layers))
        self.norm_out = Modulation(config.dim, 2)
        self.proj_out = nn.Linear(config.dim, config.out_channels * self.patch_size)
        init_linear(self, head=self.proj_out)
        nn.init.normal_(self.cond_type_embed.weight, std=0.02)

    def velocity(self, given: ForwardInputs) -> Tensor:
        """[n, C_out * patch]. `text` is [T, E], or [T, E + 1] with a last column that is 1 in rows of glyphs, whose
        states stand in their first `glyph_dim` columns, 2 in those of a first frame, whose states stand in their first
        `image_dim`, and 0 in others. Of the C channels the first C_out are noisy (`Hunyuan15Config.first_frame`).
        Raises ValueError for clips with clean frames."""
        layout = given.layout
        if layout.has_clean_frames:
            raise ValueError("a clip with clean frames: HunyuanVideo-1.5's blocks take one time for all of a clip.")
        condition = F.silu(self.time_embed(given.timesteps))
        cos, sin = joint_rope(layout, self.config.rope_split, self.config.rope_theta, condition.dtype)
        shared = JointInputs(condition, condition, cos, sin, layout, given.group)
        x = self.x_embedder(given.tokens)
        context = self._context(given.text, given.timesteps, layout).index_select(0, layout.text_rows)
        for block in self.transformer_blocks:
            x, context = self.run(block, x, context, shared)
        scale, shift = self.norm_out(condition)
        return self.proj_out(ln_modulate(x, scale, shift, layout.segments, eps=EPS))

    def _context(self, text: Tensor, timesteps: Tensor, layout: Layout) -> Tensor:
        """[T, D]: rows of captions refined, others projected, each with the embedding of its kind."""
        config, shares = self.config, layout.text_mean(torch.promote_types(text.dtype, torch.float32))
        states, kinds = text[:, : config.text_dim], text[:, config.text_dim :]
        if kinds.shape[1]:
            is_caption = kinds < _GLYPH - 0.5
            captions = is_caption.to(shares.dtype)
            summed = precise_product(shares, (states * captions).T)
            mean = summed / precise_product(shares, captions.T).clamp_min(_LEAST_SHARE)
            seen = is_caption[:, 0]
        else:
            kinds = torch.zeros(len(text), 1, device=text.device)
            is_caption = kinds < _GLYPH - 0.5
            mean, seen = precise_product(shares, states.T), None
        refined = self.context_embedder(states, mean, timesteps, layout, seen)
        glyphs = self.context_embedder_2(states[:, : config.glyph_width])
        kind = self.cond_type_embed.weight
        others = glyphs + kind[_GLYPH]
        if config.starts_from_image:
            pictures = self.image_embedder(states[:, : config.image_dim])
            others = torch.where(kinds > _PICTURE - 0.5, pictures + kind[_PICTURE], others)
        return torch.where(is_caption, refined + kind[_CAPTION], others)


class _NoisyPatches(nn.Module):
    """The weights have columns for the latent of a first frame and its mask, too, which see zeros in text to video."""

    def __init__(self, config: Hunyuan15Config) -> None:
        super().__init__()
        self.proj = PatchEmbedding(2 * config.out_channels + 1, config.dim, config.patch)
        self.channels = config.in_channels

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, C * patch] -> [n, D]"""
        weight = self.proj.weight[:, : self.channels].flatten(1)
        return F.linear(tokens.to(weight.dtype), weight, self.proj.bias)


class _TimeEmbedding(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.timestep_embedder = TwoLayerMLP(_TIME_DIM, dim, F.silu)

    def forward(self, timesteps: Tensor) -> Tensor:
        """[S] -> [S, D], in at least fp32."""
        dtype = self.timestep_embedder.linear_1.weight.dtype
        return self.timestep_embedder.precise(sinusoidal_embedding(timesteps, _TIME_DIM, dtype))


class GlyphProjection(nn.Module):
    """Diffusers' HunyuanVideo15ByT5TextProjection."""

    def __init__(self, glyph_dim: int, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(glyph_dim)
        self.linear_1 = nn.Linear(glyph_dim, _GLYPH_MLP)
        self.linear_2 = nn.Linear(_GLYPH_MLP, _GLYPH_MLP)
        self.linear_3 = nn.Linear(_GLYPH_MLP, dim)

    def forward(self, states: Tensor) -> Tensor:
        """[T, glyph_dim] -> [T, D]"""
        x = F.gelu(self.linear_1(self.norm(states.to(self.norm.weight.dtype))))
        return self.linear_3(F.gelu(self.linear_2(x)))


class PictureProjection(nn.Module):
    """Diffusers' HunyuanVideo15ImageProjection."""

    def __init__(self, image_dim: int, dim: int) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.LayerNorm(image_dim), nn.LayerNorm(dim)
        self.linear_1, self.linear_2 = nn.Linear(image_dim, image_dim), nn.Linear(image_dim, dim)

    def forward(self, rows: Tensor) -> Tensor:
        """[T, image_dim] -> [T, D]"""
        x = F.gelu(self.linear_1(self.norm_in(rows.to(self.norm_in.weight.dtype))))
        return self.norm_out(self.linear_2(x))


class UnreadPictureProjection(nn.Module):
    """Weights of `PictureProjection` in text to video, which masks it out: kept as they are, and not trained."""

    def __init__(self, image_dim: int, dim: int) -> None:
        super().__init__()
        self.norm_in, self.norm_out = _UnreadLayer(image_dim), _UnreadLayer(dim)
        self.linear_1, self.linear_2 = _UnreadLayer(image_dim, image_dim), _UnreadLayer(dim, image_dim)


class _UnreadLayer(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(shape))
        self.register_buffer("bias", torch.zeros(shape[0]))
