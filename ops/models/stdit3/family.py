"""STDiT3 of Open-Sora 1.2, text to video: its own names and numbers, and how they differ from other families.

Diffusers has no class of it, nor of its autoencoder, which is in `autoencoder.py`. Clips may be coded by an
AutoencoderKL alone, too, every frame by itself, whose latents are not those that the published weights were trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ops.config import TokenShift
from ops.models.base.encoders import PICTURE_VAE_FIELDS, T5_XXL
from ops.models.base.family import (
    PICTURE_VAE,
    Family,
    Json,
    LoraNames,
    OwnCode,
    PipelineFiles,
    PublishedParts,
    PublishedUse,
    TrainingRecipe,
    VAEClass,
)
from ops.models.stdit3.autoencoder_fields import NAME, chunk_of, numbers
from ops.models.stdit3.config import STDiT3Config

if TYPE_CHECKING:
    from torch import Tensor, nn

_BASE_TOKENS = 1024  # of a picture of 512x512, whose noise levels are not shifted


def _model() -> type[nn.Module]:
    from ops.models.stdit3.model import STDiT3

    return STDiT3


def _read_rest(fields: Json, known: Json) -> dict[str, object]:
    width, heads = fields["hidden_size"], known["num_heads"]
    if width % heads:
        raise ValueError(f"hidden_size {width} is not a multiple of num_heads {heads}.")
    return {"head_dim": width // heads, "ffn_dim": 4 * width, "patch": tuple(fields["patch_size"])}


def _write_rest(config: STDiT3Config) -> dict[str, object]:
    return {"hidden_size": config.dim, "patch_size": list(config.patch)}


def _constants(config: STDiT3Config) -> dict[str, Tensor]:
    """The frequencies of RoPE, which the published class keeps among its weights."""
    import torch

    powers = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    return {"rope.freqs": 1.0 / config.rope_theta**powers}


def _recipe(files: PipelineFiles) -> TrainingRecipe:
    """Text of true length and in lower case, an empty one the fixed rows; more noise for larger and longer clips. A
    scheduler beside the weights is that of another pipeline."""
    return TrainingRecipe(
        text={"max_length": 300, "cleaned": "lower", "empty": "none"},
        flow={"token_shift": TokenShift(law="root", base_tokens=_BASE_TOKENS)},
    )


def _published(index: Json, fields: Json) -> PublishedUse:
    """As Open-Sora 1.2 samples: the settings of its inference at 240p, the width cut to whole tokens."""
    del index, fields
    return PublishedUse(
        clips={"frames": 51, "height": 240, "width": 416, "fps": 24.0, "steps": 30, "guidance_scale": 7.0},
    )


def _autoencoder() -> Callable[[Json], nn.Module]:
    from ops.models.stdit3.autoencoder import VideoAutoencoder

    return VideoAutoencoder


def _notes(path: str) -> list[str]:
    found = [
        "its captions were without links and markup; a caption that is dropped was as many of the fixed rows as the "
        "caption has, here it is all of them (model.dit.caption_rows).",
    ]
    if not _has_own_autoencoder(path):
        found.insert(
            0,
            f"{path}: weights of Open-Sora 1.2 speak the latents of its own video autoencoder ({NAME}); on those of an "
            f"AutoencoderKL they are a start to train from, and show nothing before.",
        )
    return found


def _has_own_autoencoder(path: str) -> bool:
    try:
        fields = json.loads((Path(path).expanduser() / "vae" / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return NAME in (fields.get("architectures") or [])


def _export_notes(config: STDiT3Config, pad_to: int) -> list[str]:
    found = [
        "transformer/ is Open-Sora's own layout, for STDiT3.from_pretrained there; Diffusers has no class of it.",
        "Open-Sora guides away from as many rows of y_embedder.y_embedding as the prompt has, heddle sample from all "
        f"{config.caption_rows}.",
    ]
    if pad_to:
        found.append(f"this run trained on {pad_to} rows of text; Open-Sora gives its transformer the true length.")
    return found


FAMILY = Family(
    config=STDiT3Config,
    model=_model,
    diffusers_class="STDiT3",
    own_code=OwnCode(name="Open-Sora", constants=_constants),
    vae=PICTURE_VAE,
    own_vaes=(VAEClass(name=NAME, numbers=numbers, can_be_tiled=False, own=_autoencoder, chunk=chunk_of),),
    surplus=("rope.freqs",),
    key_map={
        "num_layers": "depth",
        "num_heads": "num_heads",
        "text_dim": "caption_channels",
        "in_channels": "in_channels",
        "out_channels": "in_channels",
        "base_size": "input_sq_size",
        "caption_rows": "model_max_length",
    },
    class_defaults={
        "depth": 28,
        "num_heads": 16,
        "hidden_size": 1152,
        "patch_size": [1, 2, 2],
        "caption_channels": 4096,
        "in_channels": 4,
        "input_sq_size": 512,
        "model_max_length": 300,
        "mlp_ratio": 4.0,
        "qk_norm": True,
        "pred_sigma": True,
        "skip_y_embedder": False,
    },
    fixed_fields={
        "model_type": "STDiT3",
        "mlp_ratio": 4.0,
        "qk_norm": True,
        "pred_sigma": True,
        "skip_y_embedder": False,
    },
    read_rest=_read_rest,
    write_rest=_write_rest,
    lora_names=LoraNames(
        blocks=("spatial_blocks.", "temporal_blocks."),
        projections=(
            "attn.qkv",
            "attn.proj",
            "cross_attn.q_linear",
            "cross_attn.kv_linear",
            "mlp.fc1",
            "mlp.fc2",
        ),
    ),
    parts=PublishedParts(text={"text_encoder": T5_XXL}, vae=lambda config: PICTURE_VAE_FIELDS),
    published=_published,
    recipe=_recipe,
    notes=_notes,
    export_notes=_export_notes,
)
