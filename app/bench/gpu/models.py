"""The transformers that are measured: published sizes, random weights, made where they run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.flow.train_pass import packed_loss
from ops.models.base.config import DiTConfig
from ops.models.base.transformer import PackedTransformer
from ops.models.families import FAMILIES
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.hunyuan15.config import Hunyuan15Config
from ops.models.kandinsky.config import KandinskyConfig
from ops.models.skyreels.config import SkyReelsConfig
from ops.models.wan.config import WanConfig
from ops.packed.packing import Layout, Sequence

WAN_1_3B = WanConfig(num_layers=30, num_heads=12, head_dim=128, ffn_dim=8960, freq_dim=256, text_dim=4096)
WAN_14B = WanConfig(num_layers=40, num_heads=40, head_dim=128, ffn_dim=13824, freq_dim=256, text_dim=4096)
HUNYUAN_13B = HunyuanConfig(
    num_layers=20, num_single_layers=40, num_heads=24, head_dim=128, ffn_dim=12288, text_dim=4096
)
HUNYUAN15_8B = Hunyuan15Config(
    num_layers=54,
    num_heads=16,
    head_dim=128,
    ffn_dim=8192,
    text_dim=3584,
    glyph_dim=1472,
    image_dim=1152,
    in_channels=32,
    out_channels=32,
    patch=(1, 1, 1),
    rope_theta=256.0,
)
KANDINSKY_LITE = KandinskyConfig(
    num_layers=32, num_heads=28, head_dim=64, ffn_dim=7168, time_dim=512, text_dim=3584, pooled_dim=768
)
SKYREELS_DF_1_3B = SkyReelsConfig(
    num_layers=30,
    num_heads=12,
    head_dim=128,
    ffn_dim=8960,
    freq_dim=256,
    text_dim=4096,
    diffusion_forcing=True,
    sample_info=True,
)

CLIP_480P81 = Sequence((21, 30, 52), 512)  # 81 x 480 x 832: 32,760 tokens, and Wan's padded text
SHORT_480P17, PICTURE_480P, PICTURE_256P = (Sequence(grid, 512) for grid in ((5, 30, 52), (1, 30, 52), (1, 16, 26)))
SMALL_CLIP = Sequence((2, 4, 4), 5)


def with_layers(config: DiTConfig, layers: int) -> DiTConfig:
    """The same with this many blocks of each kind."""
    if isinstance(config, HunyuanConfig):
        return replace(config, num_layers=layers, num_single_layers=layers)
    return replace(config, num_layers=layers)


def small(config: DiTConfig, layers: int) -> DiTConfig:
    """The same family for a rehearsal: narrow, with few layers."""
    if isinstance(config, KandinskyConfig):
        config = replace(config, time_dim=32, pooled_dim=0)
    if isinstance(config, Hunyuan15Config):
        config = replace(config, glyph_dim=16)
    narrow = replace(config, num_heads=2, head_dim=16, ffn_dim=64, freq_dim=32, text_dim=24)
    return with_layers(narrow, layers)


def build(config: DiTConfig, device: torch.device) -> PackedTransformer:
    """Random weights in bf16, drawn on the device itself: a 14B model takes minutes on a CPU core."""
    with torch.device(device):
        module = FAMILIES[config.architecture].model()(config).bfloat16()
    assert isinstance(module, PackedTransformer)
    return module


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedCall:
    """Inputs of one call of a DiT over packed samples, in bf16. P features of a latent token, E of a text token."""

    layout: Layout
    tokens: Tensor  # [n, P]
    target: Tensor  # [n, P], fp32
    timesteps: Tensor  # [S], or of each frame of each sequence
    text: Tensor  # [T, E]
    weights: Tensor  # [S]

    @staticmethod
    def of(config: DiTConfig, sequences: list[Sequence], device: torch.device) -> PackedCall:
        layout = Layout(sequences, device=device)
        features = config.in_channels * config.patch[0] * config.patch[1] * config.patch[2]
        count = len(sequences)
        text = torch.randn(sum(layout.text_lengths), config.text_dim, device=device)
        if isinstance(config, Hunyuan15Config):  # every fourth row is one of glyphs
            text = torch.nn.functional.pad(text, (0, 1))
            text[::4, -1] = 1
        return PackedCall(
            layout=layout,
            tokens=torch.randn(layout.local_tokens, features, device=device).bfloat16(),
            target=torch.randn(layout.local_tokens, features, device=device),
            timesteps=torch.linspace(900.0, 100.0, layout.num_times).to(device),
            text=text.bfloat16(),
            weights=torch.full((count,), 1.0 / count, device=device),
        )

    def loss(self, dit: nn.Module) -> Tensor:
        """The mean loss of a forward."""
        out = dit(self.tokens, self.timesteps, self.text, self.layout, Group.solo())
        return packed_loss(out.float(), self.target, self.layout, self.weights)
