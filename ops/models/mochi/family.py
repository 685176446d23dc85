"""Mochi 1, text to video: Diffusers' names and numbers, and how they differ from other families."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.flow.schedulers import Scheduler
from ops.models.base.encoders import T5_XXL
from ops.models.base.family import (
    Family,
    Json,
    LoraNames,
    ParitySample,
    PipelineFiles,
    PublishedParts,
    PublishedUse,
    TrainingRecipe,
    VAEClass,
    config_normalisation,
    shift_of,
)
from ops.models.base.joint_config import JOINT_PROJECTIONS
from ops.models.mochi.config import MochiConfig

if TYPE_CHECKING:
    from torch import nn

    from ops.config import FlowConfig
    from ops.models.base.family import EmptyText

_EMPTY_IS_NONE = "force_zeros_for_empty_prompt"  # in model_index.json


def _model() -> type[nn.Module]:
    from ops.models.mochi.model import MochiDiT

    return MochiDiT


def _vae_numbers(fields: Json) -> tuple[int, tuple[int, int, int]]:
    stride_t = stride_s = 1
    for part in fields.get("temporal_expansions", (1, 2, 3)):
        stride_t *= part
    for part in fields.get("spatial_expansions", (2, 2, 2)):
        stride_s *= part
    return fields.get("latent_channels", 12), (stride_t, stride_s, stride_s)


def _vae_normalisation(fields: Json, channels: int, module: object) -> tuple[list[float], list[float]]:
    """As MochiPipeline has it: where there are statistics, the scale counts too."""
    mean, std = config_normalisation(fields, channels, module)
    if fields.get("latents_mean") is None or fields.get("latents_std") is None:
        return mean, std
    scale = float(fields.get("scaling_factor", 1.0))
    return mean, [one / scale for one in std]


def _read_rest(fields: Json, known: Json) -> dict[str, object]:
    patch = fields["patch_size"]
    return {"patch": (1, patch, patch), "ffn_dim": 4 * known["num_heads"] * known["head_dim"]}


def _write_rest(config: MochiConfig) -> dict[str, object]:
    return {"patch_size": config.patch[1]}


def _scheduler(config: MochiConfig, flow: FlowConfig) -> Scheduler:
    """MochiPipeline passes its own sigmas."""
    del config
    settings = {"shift": flow.flow_shift, "invert_sigmas": True}
    return Scheduler(name="FlowMatchEulerDiscreteScheduler", settings=settings)


def _recipe(files: PipelineFiles) -> TrainingRecipe:
    """Captions as they are; an empty one is no text, as model_index.json says. Without that file it is taken so."""
    if files.scheduler and not files.scheduler.get("invert_sigmas"):
        raise ValueError("its scheduler has no invert_sigmas, by which Mochi gets the share of signal.")
    empty = "none" if not files.index or files.index.get(_EMPTY_IS_NONE) else "encoded"
    return TrainingRecipe(text={"max_length": 256, "cleaned": False, "empty": empty}, flow=shift_of(files.scheduler))


def _published(index: Json, fields: Json) -> PublishedUse:
    """As MochiPipeline is called by default."""
    del index, fields
    return PublishedUse(
        clips={"frames": 19, "height": 480, "width": 848, "fps": 30.0, "steps": 64, "guidance_scale": 4.5},
    )


def _parity_inputs(config: MochiConfig, sample: ParitySample) -> dict[str, object]:
    import torch

    del config
    return {
        "hidden_states": sample.latent[None],
        "encoder_hidden_states": sample.text[None],
        "timestep": 1000 - sample.timestep,
        "encoder_attention_mask": torch.ones(1, len(sample.text), dtype=torch.bool),
    }


def _index(flow: FlowConfig, empty: EmptyText) -> dict[str, object]:
    del flow
    return {_EMPTY_IS_NONE: empty == "none"}


def _export_notes(config: MochiConfig, pad_to: int) -> list[str]:
    del config
    if pad_to:
        return [f"this run trained on {pad_to} rows of text; MochiPipeline gives its transformer the true length."]
    return []


_ORIGINAL = {  # ours -> those of genmoai/mochi
    "transformer_blocks.*.attn1.to_q": "blocks.*.attn.qkv_x",
    "transformer_blocks.*.attn1.to_k": "blocks.*.attn.qkv_x",
    "transformer_blocks.*.attn1.to_v": "blocks.*.attn.qkv_x",
    "transformer_blocks.*.attn1.to_out.0": "blocks.*.attn.proj_x",
    "transformer_blocks.*.attn1.add_q_proj": "blocks.*.attn.qkv_y",
    "transformer_blocks.*.attn1.add_k_proj": "blocks.*.attn.qkv_y",
    "transformer_blocks.*.attn1.add_v_proj": "blocks.*.attn.qkv_y",
    "transformer_blocks.*.attn1.to_add_out": "blocks.*.attn.proj_y",
    "transformer_blocks.*.ff.net.0.proj": "blocks.*.mlp_x.w1",
    "transformer_blocks.*.ff.net.2": "blocks.*.mlp_x.w2",
    "transformer_blocks.*.ff_context.net.0.proj": "blocks.*.mlp_y.w1",
    "transformer_blocks.*.ff_context.net.2": "blocks.*.mlp_y.w2",
}


FAMILY = Family(
    config=MochiConfig,
    model=_model,
    diffusers_class="MochiTransformer3DModel",
    pipeline_class=lambda config: "MochiPipeline",
    vae=VAEClass(
        name="AutoencoderKLMochi",
        numbers=_vae_numbers,
        normalisation=_vae_normalisation,
        sees_fp32="encoder.fourier_features",
    ),
    key_map={
        "num_layers": "num_layers",
        "num_heads": "num_attention_heads",
        "head_dim": "attention_head_dim",
        "freq_dim": "time_embed_dim",
        "text_dim": "text_embed_dim",
        "context_dim": "pooled_projection_dim",
        "in_channels": "in_channels",
        "out_channels": "out_channels",
    },
    class_defaults={
        "patch_size": 2,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 48,
        "pooled_projection_dim": 1536,
        "in_channels": 12,
        "qk_norm": "rms_norm",
        "text_embed_dim": 4096,
        "time_embed_dim": 256,
        "activation_fn": "swiglu",
    },
    fixed_fields={"qk_norm": "rms_norm", "activation_fn": "swiglu"},
    read_rest=_read_rest,
    write_rest=_write_rest,
    converter="convert_mochi_transformer_checkpoint_to_diffusers",
    lora_names=LoraNames(
        blocks=("transformer_blocks.",),
        projections=tuple(name for name in JOINT_PROJECTIONS if name != "proj_mlp"),
        original=_ORIGINAL,
        swapped=("blocks.*.mlp_x.w1", "blocks.*.mlp_y.w1"),
    ),
    scheduler=_scheduler,
    schedulers=(),
    parts=PublishedParts(text={"text_encoder": T5_XXL}),
    published=_published,
    recipe=_recipe,
    parity_inputs=_parity_inputs,
    parity_output=lambda output, sample: -output,
    index=_index,
    export_notes=_export_notes,
)
