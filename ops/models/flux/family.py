"""FLUX.1, text to image: Diffusers' names and numbers, and how they differ from other families."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ops.models.base.encoders import CLIP_L, PICTURE_VAE_FIELDS, T5_XXL
from ops.models.base.family import (
    PICTURE_VAE,
    Family,
    Json,
    LoraNames,
    ParitySample,
    PipelineFiles,
    PublishedParts,
    PublishedUse,
    TextRecipe,
    TrainingRecipe,
    even_sigmas,
    shift_of,
)
from ops.models.base.joint_config import JOINT_BLOCKS, JOINT_PROJECTIONS, MODULATIONS, read_joint
from ops.models.flux.config import FluxConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

# Of FluxPipeline: the T5 is passed no mask, and the transformer attends to the rows of its padding, too.
_TEXT = TextRecipe(
    states="t5",
    states_parts=("text_encoder_2", "tokenizer_2"),
    second_parts=("text_encoder", "tokenizer"),
    keeps_padding=True,
)


def _model() -> type[nn.Module]:
    from ops.models.flux.model import FluxDiT

    return FluxDiT


def _recipe(files: PipelineFiles) -> TrainingRecipe:
    """Text of both encoders: 512 rows for dev, 256 for schnell, padding included."""
    rows = 512 if files.transformer.get("guidance_embeds") else 256
    return TrainingRecipe(text={"kind": "flux", "max_length": rows}, flow=shift_of(files.scheduler))


def _published(index: Json, fields: Json) -> PublishedUse:
    """As FluxPipeline is called in its documentation: dev gets its guidance, schnell takes four steps."""
    del index
    dev = bool(fields.get("guidance_embeds"))
    return PublishedUse(
        clips={
            "frames": 1,
            "height": 1024,
            "width": 1024,
            "steps": 28 if dev else 4,
            "guidance_scale": 3.5 if dev else 1.0,
        },
    )


def _read_rest(fields: Json, known: Json) -> dict[str, object]:
    """Diffusers counts channels of a token, of its four latents."""
    return read_joint(fields, known, "axes_dims_rope") | {
        "in_channels": known["in_channels"] // 4,
        "out_channels": known["out_channels"] // 4,
        "patch": (1, 2, 2),
        "ffn_dim": 4 * known["num_heads"] * known["head_dim"],
        "rope_theta": 10000.0,
    }


def _write_rest(config: FluxConfig) -> dict[str, object]:
    in_features, out_features = (math.prod(config.patch) * c for c in (config.in_channels, config.out_channels))
    return {
        "in_channels": in_features,
        "out_channels": None if out_features == in_features else out_features,
        "pooled_projection_dim": config.pooled_width,
        "axes_dims_rope": list(config.rope_split),
    }


def _parity_inputs(config: FluxConfig, sample: ParitySample) -> dict[str, object]:
    import torch

    from ops.packed.patches import patchify

    text, (_, _, h, w) = sample.text, sample.latent.shape
    rows, columns = torch.meshgrid(torch.arange(h // 2), torch.arange(w // 2), indexing="ij")
    places = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).flatten(0, 1)
    pooled = sample.conditions.pooled
    if pooled is None:
        same = config.pooled_width == config.text_dim
        pooled = text.mean(0)[None] if same else torch.zeros(1, config.pooled_width)
    inputs: dict[str, object] = {
        "hidden_states": patchify(sample.latent, config.patch)[None],
        "encoder_hidden_states": text[None],
        "pooled_projections": pooled,
        "timestep": sample.timestep / 1000,
        "img_ids": places,
        "txt_ids": torch.zeros(len(text), 3),
    }
    return inputs | ({"guidance": torch.tensor([config.trained_guidance])} if config.guidance_embeds else {})


def _parity_output(output: Tensor, sample: ParitySample) -> Tensor:
    from ops.packed.patches import unpatchify

    _, t, h, w = sample.latent.shape
    return unpatchify(output, (t, h // 2, w // 2), (1, 2, 2), output.shape[1] // 4)


_ORIGINAL = {  # ours -> those of black-forest-labs/flux
    "transformer_blocks.*.attn.to_q": "double_blocks.*.img_attn.qkv",
    "transformer_blocks.*.attn.to_k": "double_blocks.*.img_attn.qkv",
    "transformer_blocks.*.attn.to_v": "double_blocks.*.img_attn.qkv",
    "transformer_blocks.*.attn.to_out.0": "double_blocks.*.img_attn.proj",
    "transformer_blocks.*.attn.add_q_proj": "double_blocks.*.txt_attn.qkv",
    "transformer_blocks.*.attn.add_k_proj": "double_blocks.*.txt_attn.qkv",
    "transformer_blocks.*.attn.add_v_proj": "double_blocks.*.txt_attn.qkv",
    "transformer_blocks.*.attn.to_add_out": "double_blocks.*.txt_attn.proj",
    "transformer_blocks.*.ff.net.0.proj": "double_blocks.*.img_mlp.0",
    "transformer_blocks.*.ff.net.2": "double_blocks.*.img_mlp.2",
    "transformer_blocks.*.ff_context.net.0.proj": "double_blocks.*.txt_mlp.0",
    "transformer_blocks.*.ff_context.net.2": "double_blocks.*.txt_mlp.2",
    "single_transformer_blocks.*.attn.to_q": "single_blocks.*.linear1",
    "single_transformer_blocks.*.attn.to_k": "single_blocks.*.linear1",
    "single_transformer_blocks.*.attn.to_v": "single_blocks.*.linear1",
    "single_transformer_blocks.*.proj_mlp": "single_blocks.*.linear1",
    "single_transformer_blocks.*.proj_out": "single_blocks.*.linear2",
}


_VAE: Json = {**PICTURE_VAE_FIELDS, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}

FAMILY = Family(
    config=FluxConfig,
    model=_model,
    diffusers_class="FluxTransformer2DModel",
    pipeline_class=lambda config: "FluxPipeline",
    vae=PICTURE_VAE,
    parts=PublishedParts(
        text={"text_encoder": CLIP_L, "text_encoder_2": T5_XXL},
        vae=lambda config: _VAE,
    ),
    published=_published,
    recipe=_recipe,
    texts={"flux": _TEXT},
    missing_parts=("text_encoder_2", "tokenizer_2", "image_encoder", "feature_extractor"),
    missing_note=(
        "FluxPipeline wants two text encoders; this run trained with one. The transformer, vae and scheduler load by "
        "their own classes; train with model.text.kind flux for a complete pipeline, or give --base."
    ),
    key_map={
        "num_layers": "num_layers",
        "num_single_layers": "num_single_layers",
        "num_heads": "num_attention_heads",
        "head_dim": "attention_head_dim",
        "text_dim": "joint_attention_dim",
        "in_channels": "in_channels",
        "out_channels": "out_channels",
        "guidance_embeds": "guidance_embeds",
    },
    class_defaults={
        "patch_size": 1,
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": False,
        "axes_dims_rope": (16, 56, 56),
    },
    fixed_fields={"patch_size": 1},
    read_rest=_read_rest,
    write_rest=_write_rest,
    converter="convert_flux_transformer_checkpoint_to_diffusers",
    published_heads={"flux.1": 24},
    lora_names=LoraNames(
        blocks=JOINT_BLOCKS,
        projections=(*JOINT_PROJECTIONS, "proj_out"),
        original=_ORIGINAL,
        read_too=MODULATIONS,
    ),
    scheduler=even_sigmas,
    shifts_by_tokens=True,
    parity_inputs=_parity_inputs,
    parity_output=_parity_output,
)
