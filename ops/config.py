"""Settings of models and training mathematics; those of a transformer stand with its family (ops/models/).

Imports neither torch nor Ray, so configs load in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ops.geometry import Geometry
from ops.models.families import AnyDiT
from ops.models.wan.config import WanConfig
from ops.ranges import SEED, above, between, check_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class VAEConfig:
    """The frozen video autoencoder: `haar` needs no weights, `diffusers` loads a local folder."""

    kind: Literal["haar", "diffusers"] = "haar"
    path: str | None = None  # a Diffusers folder (the pipeline's, or its vae/)
    temporal: int = 4  # haar only: stride over time
    spatial: int = 8  # haar only: stride over height and width
    channels: int = 48  # haar only: strongest channels kept, at most 3 * temporal * spatial^2
    tile_sample_min: tuple[int, int] = (256, 256)  # tiled encode above this many pixels (height, width)
    tile_sample_stride: tuple[int, int] = (192, 192)
    tiling: bool = False

    def __post_init__(self) -> None:
        check_numbers(
            "model.vae",
            self,
            temporal=between(1, 64),
            spatial=between(1, 64),
            tile_sample_min=between(1, 1 << 16),
            tile_sample_stride=between(1, 1 << 16),
        )
        if self.kind == "diffusers" and not self.path:
            raise ValueError(
                "model.vae.kind diffusers needs model.vae.path: a local Diffusers folder. Or use kind: haar."
            )
        if self.kind == "haar" and not 1 <= self.channels <= 3 * self.temporal * self.spatial**2:
            raise ValueError(
                f"model.vae.channels {self.channels} is outside 1..{3 * self.temporal * self.spatial**2} "
                f"(3 * temporal * spatial^2)."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """The frozen text encoder (T5 and UMT5 family). Without a path: a small random T5 over bytes, from `seed`."""

    path: str | None = None  # folder that holds text_encoder/ and tokenizer/, or both in one
    max_length: int = 226  # longer captions are cut here
    # 0: true lengths, no padding. Published Wan weights were trained on embeddings followed by zeros up to 512, and
    # behave as published only with pad_to: 512 (WanPipeline's max_sequence_length).
    pad_to: int = 0
    d_model: int = 64  # the random encoder only, like the three below
    num_layers: int = 2
    num_heads: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_numbers(
            "model.text",
            self,
            max_length=between(1, 1 << 20),
            pad_to=between(0, 1 << 20),
            d_model=between(1, 1 << 16),
            num_layers=between(1, 1000),
            num_heads=between(1, 1024),
            seed=between(0, SEED),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The three modules a worker hosts."""

    dit: AnyDiT = field(default_factory=WanConfig)
    vae: VAEConfig = field(default_factory=VAEConfig)
    text: TextConfig = field(default_factory=TextConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowConfig:
    """Flow matching: x_sigma = (1 - sigma) x + sigma noise, target noise - x."""

    weighting_scheme: Literal["uniform", "logit_normal", "mode"] = "logit_normal"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    flow_shift: float = 3.0  # sigma' = shift sigma / (1 + (shift - 1) sigma); larger for longer sequences
    num_train_timesteps: int = 1000  # the transformer is given sigma times this

    def __post_init__(self) -> None:
        # the mode density folds back beyond 2 / (pi - 2), and below -1; logits beyond 20 are 0 and 1 in fp32
        check_numbers(
            "train.flow",
            self,
            logit_mean=between(-20, 20),
            logit_std=between(0, 20),
            mode_scale=between(-1, 1.75),
            flow_shift=above(0, 1e6),
            num_train_timesteps=between(1),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with warm-up and decay, global clipping and an EMA of the weights."""

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0  # 0 switches clipping off
    lr_scheduler: Literal["constant", "cosine", "linear"] = "constant"
    lr_warmup_steps: int = 0
    lr_min_ratio: float = 0.0  # the decay ends at learning_rate times this
    ema_decay: float = 0.999  # 0 switches the EMA off

    def __post_init__(self) -> None:
        check_numbers(
            "train.optimizer",
            self,
            learning_rate=above(0, 10),
            adam_eps=above(0, 1.0),
            weight_decay=between(0, 1e6),
            max_grad_norm=between(0, 1e12),
            lr_warmup_steps=between(0),
            lr_min_ratio=between(0, 1),
        )
        if any(not 0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"train.optimizer.betas {list(self.betas)} must lie in [0, 1).")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"train.optimizer.ema_decay {self.ema_decay} must lie in [0, 1).")


def geometry(model: ModelConfig) -> Geometry:
    """Pixel to token geometry of a model built from its config alone (a `path` is resolved by ops.folders)."""
    if model.vae.kind == "haar":
        return Geometry(vae_stride=(model.vae.temporal, model.vae.spatial, model.vae.spatial), patch=model.dit.patch)
    return Geometry(patch=model.dit.patch)
