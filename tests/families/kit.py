"""What the test file of a family declares for the tests of all families, and what these files share.

CASES = FamilyCases(                                      # tests/families/test_NAME.py; found by its name
    variants={"": small(LoomConfig)},
    models={"": whole(LoomConfig(num_layers=2, num_heads=12, head_dim=4, ffn_dim=192))},
    presets={"loom-2b": 1.98},
    lora=("attn1.to_q", "ff.net.2"),
)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ops.config import FlowConfig
from ops.models.base.config import DiTConfig
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.families import FAMILIES
from ops.models.folders import dit_json
from ops.models.wan.config import WanConfig

Renames = tuple[tuple[str, str], ...]
"""(regular expression of our names, what stands there in the original code); fused layers are followed by the part."""


@dataclass(frozen=True, kw_only=True)
class OriginalNames:
    """How the family's own code names its weights, written down from that code. For families with a `converter`."""

    renames: Renames
    halves: str | None = None  # names of layers whose two halves Diffusers swaps
    config: DiTConfig  # for which Diffusers' converter works
    rows_alone: bool = False  # the converter takes published widths only: weights of all rows, with one column of each
    prefix: str = ""  # before all names in published files


@dataclass(frozen=True, kw_only=True)
class SmallPipeline:
    """A pipeline of the family as Diffusers saves it, small, and how it is called."""

    publish: Callable[[Path], Path]
    model: Callable[..., ModelConfig]  # (folder, **settings of model.dit) that a run on it has
    clip: Callable[[Any], Tensor]  # Diffusers' pipeline, called as `request` says -> the latent [C, t, h, w]
    request: Mapping[str, Any]  # prompt, frames, height, width, guidance_scale; three steps, noise of seed 3
    flow: FlowConfig = field(default_factory=FlowConfig)
    scheduler: str  # what an export says of it
    note: str = ""  # in what an export says besides
    # (folder) -> the model that `heddle sample --from` makes of it; None: it is compared in a way of its own
    sampled: Callable[[Path], ModelConfig] | None = None


@dataclass(frozen=True, kw_only=True)
class FamilyCases:
    """Sizes for which a family is quick, and what is known of it from elsewhere. The usual variant comes first."""

    variants: Mapping[str, DiTConfig]  # transformers, by a name that follows the family's; "" for the usual one
    models: Mapping[str, ModelConfig]  # whole models, through which random plans run
    whole_runs: tuple[str, ...] | None = None  # of `models`, those that are run through Ray and the cache; None: all
    presets: Mapping[str, float]  # files of configs/models: thousand millions of weights, as published
    lora: tuple[str, ...]  # some of the layers that get factors
    # a regular expression of weights of `variants` that no output depends on, so that they have no gradient
    unread: str = "never"
    original: OriginalNames | None = None
    pipeline: SmallPipeline | None = None


def small(family: type[DiTConfig], **own: Any) -> DiTConfig:
    """A transformer of the family with one block, two heads and width 64, but for what is given."""
    common = {"num_layers": 1, "num_heads": 2, "head_dim": 32, "ffn_dim": 256, "freq_dim": 32, "text_dim": 24}
    return family(**{**common, "in_channels": 4, "out_channels": 4, **own})


def whole(dit: DiTConfig, **text: Any) -> ModelConfig:
    """A model with this transformer, the VAE without weights, and a small random T5, but for what is given of it."""
    texts = replace(TextConfig(max_length=40, d_model=16, num_layers=1, num_heads=2), **text)
    return ModelConfig(dit=dit, vae=VAEConfig(kind="haar", temporal=4, spatial=8, channels=8), text=texts)  # type: ignore[arg-type]


MODEL = whole(WanConfig(num_layers=2, num_heads=12, head_dim=4, ffn_dim=96, freq_dim=16))
"""Where any model will do."""


def own_weights(reference: nn.Module, config: DiTConfig) -> dict[str, Tensor]:
    """The weights of Diffusers' class that ours computes with."""
    kept = FAMILIES[config.architecture].kept
    return {name: weight for name, weight in reference.state_dict().items() if not any(part in name for part in kept)}


def their_class(config: DiTConfig) -> nn.Module:
    """The class of Diffusers with random weights."""
    import diffusers

    described = {key: value for key, value in dit_json(config).items() if not key.startswith("_")}
    torch.manual_seed(0)
    reference: nn.Module = getattr(diffusers, FAMILIES[config.architecture].diffusers_class)(**described)
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.08)
    return reference
