"""Settings of transformers whose blocks join text and video in one sequence. Imports neither torch nor Ray."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from ops.models.base.config import DiTConfig
from ops.models.base.flops import ForwardFlops, joint_flops
from ops.ranges import between, check_numbers

if TYPE_CHECKING:
    from ops.models.base.family import Json

JOINT_BLOCKS = ("transformer_blocks.", "single_transformer_blocks.")
JOINT_PROJECTIONS = (  # of these blocks, without the way out of the single-stream ones
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
    "net.0.proj",
    "net.2",
    "proj_mlp",
)
HUNYUAN_DOUBLE_BLOCKS = {  # of HunyuanVideo and 1.5: ours -> those of Tencent-Hunyuan/HunyuanVideo. 1.5's own code has
    # queries, keys and values apart; ComfyUI fuses them, and reads factors of both models by these names
    "transformer_blocks.*.attn.to_q": "double_blocks.*.img_attn_qkv",
    "transformer_blocks.*.attn.to_k": "double_blocks.*.img_attn_qkv",
    "transformer_blocks.*.attn.to_v": "double_blocks.*.img_attn_qkv",
    "transformer_blocks.*.attn.to_out.0": "double_blocks.*.img_attn_proj",
    "transformer_blocks.*.attn.add_q_proj": "double_blocks.*.txt_attn_qkv",
    "transformer_blocks.*.attn.add_k_proj": "double_blocks.*.txt_attn_qkv",
    "transformer_blocks.*.attn.add_v_proj": "double_blocks.*.txt_attn_qkv",
    "transformer_blocks.*.attn.to_add_out": "double_blocks.*.txt_attn_proj",
    "transformer_blocks.*.ff.net.0.proj": "double_blocks.*.img_mlp.fc1",
    "transformer_blocks.*.ff.net.2": "double_blocks.*.img_mlp.fc2",
    "transformer_blocks.*.ff_context.net.0.proj": "double_blocks.*.txt_mlp.fc1",
    "transformer_blocks.*.ff_context.net.2": "double_blocks.*.txt_mlp.fc2",
}
# to those of modulations, in the code of HunyuanVideo, 1.5 and FLUX.1 and in ComfyUI's: read where clips are made
MODULATIONS = {
    "transformer_blocks.*.norm1.linear": ("double_blocks.*.img_mod.lin", "double_blocks.*.img_mod.linear"),
    "transformer_blocks.*.norm1_context.linear": ("double_blocks.*.txt_mod.lin", "double_blocks.*.txt_mod.linear"),
    "single_transformer_blocks.*.norm.linear": ("single_blocks.*.modulation.lin", "single_blocks.*.modulation.linear"),
}


def ratio_of(ffn_dim: int, dim: int) -> float:
    """The mlp_ratio of which Diffusers, which rounds `dim` times it down, makes `ffn_dim`."""
    ratio = ffn_dim / dim
    return ratio if int(dim * ratio) == ffn_dim else math.nextafter(ratio, math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class JointDiTConfig(DiTConfig):
    """Double-stream blocks, then single-stream ones, that take a pooled text vector (HunyuanVideo, FLUX.1).

    A base, as `DiTConfig` is. Sinusoids have 256 numbers whatever `freq_dim` says, as in the published code.
    """

    num_single_layers: int = 0  # single-stream blocks after the double-stream ones
    pooled_dim: int = 0  # width of the pooled text vector; 0 pools the text embeddings themselves
    guidance_embeds: bool = False  # guidance-distilled weights
    # the guidance scale that such weights get in training. 1 is usual; the authors of HunyuanVideo-I2V train LoRA with
    # 6, with which they sample
    trained_guidance: float = 1.0
    rope_axes: tuple[int, int, int] | None = None  # head sizes given to (t, h, w); null: 16, 56, 56 of 128, scaled

    def __post_init__(self) -> None:
        DiTConfig.__post_init__(self)
        check_numbers(
            "model.dit",
            self,
            num_single_layers=between(0, 1000),
            pooled_dim=between(0, 1 << 16),
            trained_guidance=between(0, 1000),
            rope_axes=between(0, 1024),
        )
        check_axes(self.rope_axes, self.head_dim)
        if self.trained_guidance != 1.0 and not self.guidance_embeds and not self.path:
            raise ValueError(
                f"model.dit.trained_guidance is {self.trained_guidance:g}, and guidance_embeds is false: these weights "
                f"take no scale. Leave it out."
            )

    @property
    def flops(self) -> ForwardFlops:
        return joint_flops(sum(self.block_counts), self.dim, self.ffn_dim)

    @property
    def rope_split(self) -> tuple[int, int, int]:
        return self.rope_axes or default_rope_split(self.head_dim)

    @property
    def pooled_width(self) -> int:
        return self.pooled_dim or self.text_dim

    def with_pooled(self, dim: int) -> Self:
        return replace(self, pooled_dim=0 if dim == self.text_dim else dim)

    @property
    def takes_guidance(self) -> bool:
        return self.guidance_embeds

    @property
    def block_counts(self) -> tuple[int, ...]:
        return (self.num_layers, self.num_single_layers) if self.num_single_layers else (self.num_layers,)


def check_axes(axes: tuple[int, int, int] | None, head_dim: int) -> None:
    """Raises ValueError for head sizes of (t, h, w) that do not fill a head in whole pairs."""
    if axes and (sum(axes) != head_dim or any(size % 2 for size in axes)):
        raise ValueError(f"model.dit.rope_axes {axes} must be even and add up to head_dim {head_dim}.")


def default_rope_split(head_dim: int) -> tuple[int, int, int]:
    """16, 56, 56 of 128, as both published families have it, scaled in whole pairs."""
    spatial = 2 * (head_dim * 7 // 32)
    return head_dim - 2 * spatial, spatial, spatial


def read_joint(fields: Json, known: Json, axes_key: str) -> dict[str, object]:
    """What Diffusers' config.json says of pooled text and RoPE, whose axes stand at `axes_key`."""
    pooled, axes = fields["pooled_projection_dim"], tuple(fields[axes_key])
    return {
        "pooled_dim": 0 if pooled == known["text_dim"] else pooled,
        "rope_axes": None if axes == default_rope_split(known["head_dim"]) else axes,
    }
