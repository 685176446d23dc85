"""CogVideoX's transformer over packed sequences, with the parameter names of CogVideoXTransformer3DModel.

S sequences, n video rows and m text rows of this rank, D width, H heads, d head size. Text and video are one sequence
with one set of weights; each has a modulation of its own ("expert adaptive LayerNorm", Yang et al. 2024), so tables
have 2 S rows, those of the text last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.kernels.gate_residual.op import gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate.op import ln_modulate
from ops.models.base.layers import FeedForward, TwoLayerMLP, init_linear, sinusoidal_embedding
from ops.models.base.transformer import ForwardInputs, PackedTransformer
from ops.models.cogvideox.config import CogVideoXConfig
from ops.packed.packing import Layout
from ops.packed.sequence_parallel import sequence_parallel_attention
from ops.precision import precise_linear

_QK_EPS = 1e-6
_OFS = 2.0  # the constant that CogVideoX1.5-5B-I2V embeds beside the time


class CogVideoXBlockInputs(NamedTuple):
    """What all blocks of one forward share."""

    condition: Tensor  # [S, time_dim] after silu
    cos: Tensor | None  # [n + m, d / 2]; text rows are not rotated. None: positions were added
    sin: Tensor | None
    layout: Layout
    group: Group


class CogVideoXDiT(PackedTransformer):
    config: CogVideoXConfig
    block_parts = ("joint_exchange", "stream_segments")

    def __init__(self, config: CogVideoXConfig) -> None:
        super().__init__(config)
        self.patch_embed = PatchAndText(config)
        self.time_embedding = TwoLayerMLP(config.dim, config.time_dim, F.silu)
        self.ofs_embedding = TwoLayerMLP(config.ofs_dim, config.ofs_dim, F.silu) if config.ofs_dim else None
        self.transformer_blocks = nn.ModuleList(CogVideoXBlock(config) for _ in range(config.num_layers))
        self.norm_final = nn.LayerNorm(config.dim, config.eps)
        self.norm_out = ModulatedNorm(config, 2)
        self.proj_out = nn.Linear(config.dim, config.out_channels * self.patch_size)
        init_linear(self, head=self.proj_out)
        nn.init.xavier_uniform_(self.patch_embed.proj.weight.flatten(1))

    def velocity(self, given: ForwardInputs) -> Tensor:
        layout, config = given.layout, self.config
        dtype = self.time_embedding.linear_1.weight.dtype
        condition = self.time_embedding.precise(sinusoidal_embedding(given.timesteps, config.dim, dtype))
        if self.ofs_embedding is not None:
            constant = torch.full_like(given.timesteps, _OFS)
            condition = condition + self.ofs_embedding.precise(sinusoidal_embedding(constant, config.ofs_dim, dtype))
        condition = F.silu(condition)
        video, text = self.patch_embed(given.tokens, given.text.index_select(0, layout.text_rows))
        cos = sin = None
        if config.rotary:
            cos, sin = rotation(layout, config, condition.dtype)
        else:
            video = video + added_positions(layout, config).to(video.dtype)
        if config.learned_positions:
            of_video, of_text = kept_positions(layout, config, self.patch_embed.pos_embedding)
            video, text = video + of_video.to(video.dtype), text + of_text.to(text.dtype)
        x = torch.cat([video, text])
        shared = CogVideoXBlockInputs(condition, cos, sin, layout, given.group)
        for block in self.transformer_blocks:
            x = self.run(block, x, shared)
        norm = self.norm_final
        x = ln_modulate(x[: layout.local_tokens], weight=norm.weight, bias=norm.bias, eps=config.eps)
        (shift, scale), norm = self.norm_out(condition), self.norm_out.norm
        x = ln_modulate(x, scale, shift, layout.segments, weight=norm.weight, bias=norm.bias, eps=config.eps)
        return self.proj_out(x)


def rotation(layout: Layout, config: CogVideoXConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [n + m, d / 2] of video rows, then of text rows, which are not rotated.

    1.0: places of any grid are stretched over the one of `sample_size`, cut to the grid's aspect ratio. 1.5: places as
    they are.
    """
    first, step = layout.made(_stretched, config)
    places = layout.positions.double() * step[layout.seq_index] + first[layout.seq_index]
    angles = torch.cat(
        [
            places[:, axis, None]
            / config.rope_theta ** (torch.arange(0, size, 2, device=layout.device).double() / size)
            for axis, size in enumerate(config.rope_split)
        ],
        dim=1,
    )
    angles = F.pad(angles, (0, 0, 0, layout.local_text_tokens))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _stretched(layout: Layout, config: CogVideoXConfig) -> Tensor:
    """Place of the first token, and distance to the next, on t, h and w of each sequence: fp64 [2, S, 3]."""
    first, step = [], []
    for sequence in layout.sequences:
        _, h, w = sequence.grid
        if config.patch[0] > 1:
            first.append((0.0, 0.0, 0.0))
            step.append((1.0, 1.0, 1.0))
            continue
        full_h, full_w = (size // part for size, part in zip(config.sample_size, config.patch[1:]))
        tall = h / w > full_h / full_w
        cut_h, cut_w = (full_h, round(full_h / h * w)) if tall else (round(full_w / w * h), full_w)
        top, left = round((full_h - cut_h) / 2.0), round((full_w - cut_w) / 2.0)
        # as published: the last place is a share of the cut's end, not of its length
        ends = [(start + cut) * (count - 1) / count for start, cut, count in ((top, cut_h, h), (left, cut_w, w))]
        first.append((0.0, float(top), float(left)))
        step.append((1.0, (ends[0] - top) / max(h - 1, 1), (ends[1] - left) / max(w - 1, 1)))
    return torch.tensor([first, step], dtype=torch.float64)


def added_positions(layout: Layout, config: CogVideoXConfig) -> Tensor:
    """[n, D] in fp64: sinusoids of t in a quarter of the width, then of w and of h."""
    return _sinusoids(layout.positions, config)


def _sinusoids(positions: Tensor, config: CogVideoXConfig) -> Tensor:
    """`added_positions` of places [n, 3]."""
    t, h, w = positions.double().unbind(1)
    parts = (
        (t, config.dim // 4),
        (w / config.spatial_scale, config.dim // 8 * 3),
        (h / config.spatial_scale, config.dim // 8 * 3),
    )
    found = []
    for place, size in parts:
        frequencies = 10000.0 ** -(torch.arange(size // 2, dtype=torch.float64, device=positions.device) / (size / 2))
        angles = place[:, None] * frequencies
        found += [angles.sin(), angles.cos()]
    return torch.cat(found, dim=1)


def kept_positions(layout: Layout, config: CogVideoXConfig, kept: Tensor) -> tuple[Tensor, Tensor]:
    """[n, D] of video rows and [m, D] of text rows, from places [1, text_rows + tokens, D] that belong to clips of one
    grid; sinusoids and zeros for others, as Diffusers' class has them."""
    _, h, w = config.kept_grid
    t_row, h_row, w_row = layout.positions.unbind(1)
    rows = config.text_rows + (t_row * h + h_row) * w + w_row
    own, text_own, text_rows = layout.made(_kept, config)
    of_video = torch.where(
        own[layout.seq_index, None],
        kept[0, rows.clamp(max=kept.shape[1] - 1)],
        _sinusoids(layout.positions, config).to(kept.dtype),
    )
    return of_video, kept[0, text_rows.clamp(max=config.text_rows - 1)] * text_own[:, None]


def _kept(layout: Layout, config: CogVideoXConfig) -> tuple[Tensor, Tensor, Tensor]:
    """bool [S]: which sequences have the kept grid; bool and int64 [m]: the same of this rank's text rows, and their
    number within their own text. Raises ValueError for a longer text there than it has places for."""
    of_grid = [one.grid == config.kept_grid for one in layout.sequences]
    if any(of_grid) and (longest := max(layout.text_lengths)) > config.text_rows:
        raise ValueError(f"a text of {longest} rows, and this transformer has places for {config.text_rows}.")
    own, lengths, rows = torch.tensor(of_grid), torch.tensor(layout.text_lengths), sum(layout.text_lengths)
    # with its size: a forecast runs it without values
    sequence = torch.repeat_interleave(torch.arange(len(layout)), lengths, output_size=rows)[layout.text_rows]
    return own, own[sequence], layout.text_rows - (lengths.cumsum(0) - lengths)[sequence]


class PatchAndText(nn.Module):
    """Diffusers' CogVideoXPatchEmbed without its sinusoids: a convolution in 1.0, a linear layer in 1.5."""

    pos_embedding: Tensor  # [1, text_rows + tokens, D], of learned positions alone

    def __init__(self, config: CogVideoXConfig) -> None:
        super().__init__()
        if config.patch[0] == 1:
            self.proj: nn.Conv2d | nn.Linear = nn.Conv2d(
                config.in_channels, config.dim, config.patch[1:], config.patch[1:]
            )
        else:
            self.proj = nn.Linear(config.in_channels * 8, config.dim)
        self.text_proj = nn.Linear(config.text_dim, config.dim)
        if config.learned_positions:
            places = torch.cartesian_prod(*(torch.arange(size) for size in config.kept_grid))
            text = torch.zeros(config.text_rows, config.dim)
            kept = torch.cat([text, _sinusoids(places, config).float()])[None]
            self.register_buffer("pos_embedding", kept)  # trained once, and not since: it is no parameter of the class

    def forward(self, tokens: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [n, C * patch], text [m, text_dim] -> [n, D], [m, D]."""
        weight = self.proj.weight
        video = F.linear(tokens.to(weight.dtype), weight.flatten(1), self.proj.bias)
        return video, self.text_proj(text.to(weight.dtype))


class ModulatedNorm(nn.Module):
    """`parts` tables [S, D] from the condition, in at least fp32, and the weights of the norm that they follow."""

    def __init__(self, config: CogVideoXConfig, parts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(config.time_dim, parts * config.dim)
        self.norm = nn.LayerNorm(config.dim, config.eps)
        self.parts = parts

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        """condition [S, time_dim] -> `parts` tables [S, D]."""
        return precise_linear(self.linear, condition).chunk(self.parts, dim=-1)

    def both(self, condition: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """shift, scale and gate [2 S, D] of video, then of text."""
        shift, scale, gate, *text = self(condition)
        return torch.cat([shift, text[0]]), torch.cat([scale, text[1]]), torch.cat([gate, text[2]])


class NormedAttention(nn.Module):
    """Projections of Diffusers' Attention with LayerNorm of queries and keys over a head."""

    def __init__(self, config: CogVideoXConfig) -> None:
        super().__init__()
        dim, self.head_dim = config.dim, config.head_dim
        self.to_q, self.to_k, self.to_v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.norm_q, self.norm_k = nn.LayerNorm(self.head_dim, _QK_EPS), nn.LayerNorm(self.head_dim, _QK_EPS)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])

    def project(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """[n + m, D] -> normalised and rotated q, k and plain v, each [n + m, H, d]."""
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.to_q, self.to_k, self.to_v))
        q = ln_modulate(q, weight=self.norm_q.weight, bias=self.norm_q.bias, eps=_QK_EPS)
        k = ln_modulate(k, weight=self.norm_k.weight, bias=self.norm_k.bias, eps=_QK_EPS)
        if cos is not None and sin is not None:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        return q, k, v


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[n, H, d] with each pair of a head turned by the angles [n, d / 2] of its row."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


class CogVideoXBlock(nn.Module):
    def __init__(self, config: CogVideoXConfig) -> None:
        super().__init__()
        self.eps, self.backend = config.eps, config.attention
        self.norm1, self.norm2 = ModulatedNorm(config, 6), ModulatedNorm(config, 6)
        self.attn1 = NormedAttention(config)
        self.ff = FeedForward(config.dim, config.ffn_dim)

    def forward(self, x: Tensor, shared: CogVideoXBlockInputs) -> Tensor:
        """x [n + m, D] -> the same."""
        layout, segments = shared.layout, shared.layout.stream_segments
        shift, scale, gate = self.norm1.both(shared.condition)
        mlp_shift, mlp_scale, mlp_gate = self.norm2.both(shared.condition)
        first, second = self.norm1.norm, self.norm2.norm
        h = ln_modulate(x, scale, shift, segments, weight=first.weight, bias=first.bias, eps=self.eps)
        q, k, v = self.attn1.project(h, shared.cos, shared.sin)
        y = sequence_parallel_attention(q, k, v, layout.joint_exchange, shared.group, self.backend).flatten(1)
        y = self.attn1.to_out[0](y)
        x, h = gate_residual_ln_modulate(
            x, y, gate, mlp_scale, mlp_shift, segments, weight=second.weight, bias=second.bias, eps=self.eps
        )
        return gate_residual(x, self.ff(h), mlp_gate, segments)
