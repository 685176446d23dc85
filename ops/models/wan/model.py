"""Wan's diffusion transformer over packed sequences, with the parameter names of Diffusers' WanTransformer3DModel.

S sequences, n rows of this rank, D width, H heads, d head size, T rows of the (replicated) text.

    layout = Layout([Sequence((5, 8, 12), text_tokens=33), Sequence((1, 16, 16), text_tokens=7)], degree, rank, device)
    tokens = layout.local([patchify(latent, config.patch) for latent in latents])       # [n, C * pt * ph * pw]
    velocity = dit(tokens, sigmas * 1000, torch.cat(texts), layout, group)              # [n, C_out * pt * ph * pw]
    loss = packed_loss(velocity, layout.local(targets), layout, weights)                # ops/flow/train_pass.py

Gradients are partial: everything that a rank computes redundantly (time and text embeddings, keys and values of the
text) reaches the loss through that rank's own rows only, so the sum over the bag is the exact gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ops.attention.varlen import attention
from ops.kernels.gate_residual.op import gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate.op import ln_modulate
from ops.models.base.layers import (
    Attention,
    FeedForward,
    PatchEmbedding,
    TwoLayerMLP,
    gelu_tanh,
    init_linear,
    time_and_modulation,
)
from ops.models.base.transformer import ForwardInputs, PackedTransformer, TextBlockInputs
from ops.models.wan.config import WanBlocksConfig
from ops.packed.conditions import Conditions
from ops.packed.packing import Layout
from ops.packed.sequence_parallel import sequence_parallel_attention


class WanDiT(PackedTransformer):
    """See the module docstring for a call."""

    config: WanBlocksConfig

    def __init__(self, config: WanBlocksConfig) -> None:
        super().__init__(config)
        dim = config.dim
        self.patch_embedding = PatchEmbedding(config.in_channels, dim, config.patch)
        self.condition_embedder = ConditionEmbedder(config)
        self.blocks = nn.ModuleList(WanBlock(config) for _ in range(config.num_layers))
        self.proj_out = nn.Linear(dim, config.out_channels * self.patch_size)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 2, dim) / dim**0.5)
        init_linear(self, head=self.proj_out)

    def velocity(self, given: ForwardInputs) -> Tensor:
        """[n, C_out * patch]. Of the C channels the first C_out are noisy; image-to-video weights take a mask and the
        condition after them (`WanBlocksConfig.first_frame`), and with an `image_dim` the rows of `conditions.image`."""
        layout = given.layout
        x = self.patch_embedding(given.tokens)
        time, modulation = self.modulation(layout.times(given.timesteps, given.conditions.first_times), layout)
        text = self.condition_embedder.text_embedder(given.text)
        image = self.condition_embedder.image(given.conditions, layout)
        cos, sin = layout.rope(self.config.rope_split, self.config.rope_theta, time.dtype)
        shared = TextBlockInputs(text, modulation, cos, sin, layout, given.group, image)
        for block in self.blocks:
            x = self.run(block, x, shared)
        shift, scale = (self.scale_shift_table.to(time.dtype) + time[:, None]).unbind(1)
        out = self.proj_out(ln_modulate(x, scale, shift, layout.segments, eps=self.config.eps))
        return out.unflatten(-1, (self.patch_size, -1)).transpose(-1, -2).flatten(-2)  # Wan's head is channel last

    def modulation(self, times: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """times [R] of the rows of the tables -> time [R, D], modulation of the blocks [R, 6, D]."""
        del layout
        embedder = self.condition_embedder
        return time_and_modulation(times, embedder.time_embedder, embedder.time_proj)


class ConditionEmbedder(nn.Module):
    """Time, text and first frame of each sequence, computed in full by every rank."""

    def __init__(self, config: WanBlocksConfig) -> None:
        super().__init__()
        self.time_embedder = TwoLayerMLP(config.freq_dim, config.dim, nn.functional.silu)
        self.time_proj = nn.Linear(config.dim, 6 * config.dim)
        self.text_embedder = TwoLayerMLP(config.text_dim, config.dim, gelu_tanh)
        self.image_dim = config.image_dim
        self.image_embedder = (
            ImageEmbedding(config.image_dim, config.dim, config.pos_embed_seq_len) if config.image_dim else None
        )

    def image(self, conditions: Conditions, layout: Layout) -> Tensor | None:
        """[I, D] of the first frames (and the last), where the weights listen to them. Raises ValueError for rows that
        do not fit."""
        if self.image_embedder is None:
            return None
        rows, wanted = conditions.image, (sum(s.image_tokens for s in layout.sequences), self.image_dim)
        if rows is None or tuple(rows.shape) != wanted:
            raise ValueError(
                f"image {None if rows is None else tuple(rows.shape)} does not fit the layout of {len(layout)} "
                f"sequences: expected {wanted}."
            )
        return self.image_embedder(rows)


class ImageEmbedding(nn.Module):
    """Diffusers' WanImageEmbedding: from an image encoder's rows to the width of the blocks."""

    def __init__(self, in_dim: int, dim: int, places: int) -> None:
        """`places`: rows of each sequence, each with a trained embedding of its place; 0: rows without one."""
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, places, in_dim)) if places else None
        self.norm1, self.norm2 = nn.LayerNorm(in_dim), nn.LayerNorm(dim)
        self.ff = FeedForward(in_dim, in_dim, nn.functional.gelu, out_dim=dim)

    def forward(self, rows: Tensor) -> Tensor:
        """[I, in_dim] -> [I, D]"""
        rows = rows.to(self.norm1.weight.dtype)
        if self.pos_embed is not None:
            rows = (rows.unflatten(0, (-1, self.pos_embed.shape[1])) + self.pos_embed).flatten(0, 1)
        rows = ln_modulate(rows, weight=self.norm1.weight, bias=self.norm1.bias, eps=self.norm1.eps)
        return ln_modulate(self.ff(rows), weight=self.norm2.weight, bias=self.norm2.bias, eps=self.norm2.eps)


class ContextAttention(Attention):
    """Cross-attention to the text and, in image-to-video weights, to the image: a softmax for each, and their sum."""

    def __init__(self, config: WanBlocksConfig) -> None:
        super().__init__(config.dim, config.head_dim, config.eps)
        self.backend = config.attention
        if config.image_dim:
            self.add_k_proj, self.add_v_proj = nn.Linear(config.dim, config.dim), nn.Linear(config.dim, config.dim)
            self.norm_added_k = nn.RMSNorm(config.dim, config.eps)

    def forward(self, x: Tensor, shared: TextBlockInputs) -> Tensor:
        """[n, D] -> [n, D]"""
        layout = shared.layout
        q, k, v = self.project(x, shared.text)
        heads = attention(q, k, v, layout.local_lengths, layout.text, self.backend)
        if shared.image is not None:
            k = self._heads(self.norm_added_k(self.add_k_proj(shared.image)))
            v = self._heads(self.add_v_proj(shared.image))
            heads = heads + attention(q, k.to(q.dtype), v, layout.local_lengths, layout.image, self.backend)
        return self.output(heads)


class WanBlock(nn.Module):
    """Self-attention over the bag, cross-attention to the replicated text, MLP; AdaLN from each row's sequence."""

    def __init__(self, config: WanBlocksConfig) -> None:
        super().__init__()
        self.eps, self.backend = config.eps, config.attention
        self.attn1 = Attention(config.dim, config.head_dim, config.eps)
        self.attn2 = ContextAttention(config)
        self.norm2 = nn.LayerNorm(config.dim, config.eps) if config.cross_attn_norm else None
        self.ffn = FeedForward(config.dim, config.ffn_dim)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, config.dim) / config.dim**0.5)

    def forward(self, x: Tensor, shared: TextBlockInputs) -> Tensor:
        """x [n, D] -> [n, D]."""
        layout, segments = shared.layout, shared.layout.segments
        table = self.scale_shift_table.to(shared.modulation.dtype) + shared.modulation
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = table.unbind(1)

        h = ln_modulate(x, scale, shift, segments, eps=self.eps)
        q, k, v = self.attn1.project(h, h, shared.cos, shared.sin)
        y = self.attn1.output(sequence_parallel_attention(q, k, v, layout.video_exchange, shared.group, self.backend))

        if self.norm2 is None:
            x = h = gate_residual(x, y, gate, segments)
        else:
            x, h = gate_residual_ln_modulate(
                x, y, gate, None, None, segments, weight=self.norm2.weight, bias=self.norm2.bias, eps=self.eps
            )
        y = self.attn2(h, shared)

        x, h = gate_residual_ln_modulate(x, y, None, mlp_scale, mlp_shift, segments, eps=self.eps)
        return gate_residual(x, self.ffn(h), mlp_gate, segments)
