"""Latte-1, text to video: Diffusers' names and numbers, and how they differ from other families."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.flow.schedulers import Scheduler
from ops.models.base.encoders import PICTURE_VAE_FIELDS, T5_XXL
from ops.models.base.family import (
    PICTURE_VAE,
    Family,
    Json,
    LoraNames,
    ParitySample,
    PipelineFiles,
    PublishedParts,
    PublishedUse,
    TrainingRecipe,
)
from ops.models.latte.config import LatteConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ops.config import FlowConfig


def _model() -> type[nn.Module]:
    from ops.models.latte.model import LatteDiT

    return LatteDiT


def _read_rest(fields: Json, known: Json) -> dict[str, object]:
    width, channels, found = known["num_heads"] * known["head_dim"], known["in_channels"], fields.get("out_channels")
    if found != 2 * channels:
        raise ValueError(
            f"out_channels {found} is not twice in_channels {channels}: Latte predicts a noise and a variance for each."
        )
    if fields.get("cross_attention_dim") != width:
        raise ValueError(
            f"cross_attention_dim {fields.get('cross_attention_dim')} is not the transformer's width {width}."
        )
    patch = fields["patch_size"]
    return {"ffn_dim": 4 * width, "patch": (1, patch, patch), "out_channels": channels}


def _write_rest(config: LatteConfig) -> dict[str, object]:
    return {
        "cross_attention_dim": config.dim,
        "patch_size": config.patch[1],
        "out_channels": 2 * config.out_channels,
    }


def _scheduler(config: LatteConfig, flow: FlowConfig) -> Scheduler:
    del config, flow
    settings = {
        "beta_schedule": "linear",
        "beta_start": 0.0001,
        "beta_end": 0.02,
        "prediction_type": "epsilon",
        "timestep_spacing": "trailing",
        "clip_sample": False,
    }
    return Scheduler(name="DDIMScheduler", settings=settings)


def _recipe(files: PipelineFiles) -> TrainingRecipe:
    """Text of true length and in lower case."""
    wanted = {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02, "prediction_type": "epsilon"}
    read = {**wanted, **files.scheduler}
    other = {key: read[key] for key, value in wanted.items() if read[key] != value}
    if other:
        raise ValueError(f"its scheduler has {other}; only {wanted} is computed.")
    return TrainingRecipe(text={"max_length": 120, "cleaned": "lower"})


def _published(index: Json, fields: Json) -> PublishedUse:
    """As LattePipeline is called in its documentation."""
    del index
    size = 8 * int(fields.get("sample_size", 64))
    return PublishedUse(
        clips={
            "frames": fields.get("video_length", 16),
            "height": size,
            "width": size,
            "fps": 8.0,
            "steps": 50,
            "guidance_scale": 7.5,
        },
    )


def _parity_inputs(config: LatteConfig, sample: ParitySample) -> dict[str, object]:
    del config
    return {
        "hidden_states": sample.latent[None],
        "encoder_hidden_states": sample.text[None],
        "timestep": sample.timestep.long(),
    }


def _parity_output(output: Tensor, sample: ParitySample) -> Tensor:
    noise: Tensor = output[: len(sample.latent)]
    return noise


def _export_notes(config: LatteConfig, pad_to: int) -> list[str]:
    found = [
        f"LattePipeline takes clips of {config.video_length} frames and no others: call it with "
        f"video_length={config.video_length} (model.dit.video_length).",
        "where bs4 and ftfy are installed LattePipeline takes links, markup and more out of its prompts, which stay in "
        "captions here: call it with clean_caption=False.",
        "with guidance LattePipeline shows the negative prompt as many rows as the prompt has, heddle sample its own.",
    ]
    if pad_to:
        found.append(f"this run trained on {pad_to} rows of text; LattePipeline gives its transformer the true length.")
    return found


FAMILY = Family(
    config=LatteConfig,
    model=_model,
    diffusers_class="LatteTransformer3DModel",
    pipeline_class=lambda config: "LattePipeline",
    vae=PICTURE_VAE,
    key_map={
        "num_layers": "num_layers",
        "num_heads": "num_attention_heads",
        "head_dim": "attention_head_dim",
        "text_dim": "caption_channels",
        "in_channels": "in_channels",
        "out_channels": "out_channels",
        "eps": "norm_eps",
        "sample_size": "sample_size",
        "video_length": "video_length",
    },
    class_defaults={
        "num_attention_heads": 16,
        "attention_head_dim": 88,
        "num_layers": 1,
        "dropout": 0.0,
        "attention_bias": False,
        "sample_size": 64,
        "activation_fn": "geglu",
        "norm_type": "layer_norm",
        "norm_elementwise_affine": True,
        "norm_eps": 1e-05,
        "video_length": 16,
    },
    fixed_fields={
        "attention_bias": True,
        "activation_fn": "gelu-approximate",
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "num_embeds_ada_norm": 1000,
        "dropout": 0.0,
    },
    read_rest=_read_rest,
    write_rest=_write_rest,
    lora_names=LoraNames(
        blocks=("transformer_blocks.", "temporal_transformer_blocks."),
        projections=("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"),
    ),
    scheduler=_scheduler,
    passes_sigmas=False,
    schedulers=("DDIMScheduler",),
    parts=PublishedParts(text={"text_encoder": T5_XXL}, vae=lambda config: PICTURE_VAE_FIELDS),
    published=_published,
    recipe=_recipe,
    parity_inputs=_parity_inputs,
    parity_output=_parity_output,
    parity_frames=lambda config: config.video_length,
    export_notes=_export_notes,
)
