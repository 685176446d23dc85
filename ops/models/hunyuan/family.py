"""HunyuanVideo, text to video and image to video: Diffusers' names and numbers, and how they differ from others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.flow.schedulers import Scheduler
from ops.models.base.encoders import CLIP_L, LLAMA_8B
from ops.models.base.family import (
    HUNYUAN_VAE,
    Family,
    Json,
    LoraNames,
    ParitySample,
    PictureRecipe,
    PipelineFiles,
    PublishedParts,
    PublishedUse,
    TextRecipe,
    TrainingRecipe,
    masked_first_frame,
    shift_of,
)
from ops.models.base.joint_config import (
    HUNYUAN_DOUBLE_BLOCKS,
    JOINT_BLOCKS,
    JOINT_PROJECTIONS,
    MODULATIONS,
    ratio_of,
    read_joint,
)
from ops.models.hunyuan.config import HunyuanConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ops.config import FlowConfig


# Of HunyuanVideoPipeline: what the published weights were trained on. 95 tokens stand before the caption.
_TEXT = TextRecipe(
    states="llama",
    template=(
        "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
        "1. The main content and theme of the video."
        "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
        "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
        "4. background environment, light, style and atmosphere."
        "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    ),
    crop=95,
    skipped_layers=2,
)
# Of HunyuanVideoImageToVideoPipeline: 103 tokens stand before the caption, one of them for the picture.
_TEXT_OF_PICTURE = TextRecipe(
    states="llava",
    template=(
        "<|start_header_id|>system<|end_header_id|>\n\n<image>\nDescribe the video by detailing the following aspects "
        "according to the reference image: "
        "1. The main content and theme of the video."
        "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
        "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
        "4. background environment, light, style and atmosphere."
        "5. camera angles, movements, and transitions used in the video:<|eot_id|>\n\n"
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    crop=103,
    skipped_layers=2,
    picture=PictureRecipe(mark="<|end_header_id|>", dropped=4),
)


def _model() -> type[nn.Module]:
    from ops.models.hunyuan.model import HunyuanDiT

    return HunyuanDiT


def _read_rest(fields: Json, known: Json) -> dict[str, object]:
    spatial = fields["patch_size"]
    return read_joint(fields, known, "rope_axes_dim") | {
        "patch": (fields["patch_size_t"], spatial, spatial),
        "ffn_dim": int(known["num_heads"] * known["head_dim"] * fields["mlp_ratio"]),
        "first_frame": fields.get("image_condition_type") or "none",
    }


def _write_rest(config: HunyuanConfig) -> dict[str, object]:
    patch_t, patch_h, patch_w = config.patch
    if patch_h != patch_w:
        raise ValueError(f"patch {config.patch}: HunyuanVideo's config knows one spatial patch size. Use equal ones.")
    return {
        "patch_size": patch_h,
        "patch_size_t": patch_t,
        "mlp_ratio": ratio_of(config.ffn_dim, config.dim),
        "pooled_projection_dim": config.pooled_dim or config.text_dim,
        "rope_axes_dim": list(config.rope_split),
        "image_condition_type": None if config.first_frame == "none" else config.first_frame,
    }


def _scheduler(config: HunyuanConfig, flow: FlowConfig) -> Scheduler:
    """HunyuanVideoPipeline passes even sigmas to FlowMatchEuler, so its own spacing does not matter."""
    return Scheduler(name="FlowMatchEulerDiscreteScheduler", settings={"shift": flow.flow_shift})


def _parity_inputs(config: HunyuanConfig, sample: ParitySample) -> dict[str, Tensor]:
    import torch

    text = sample.text
    same = (config.pooled_dim or config.text_dim) == config.text_dim
    inputs = {
        "hidden_states": sample.latent[None],
        "timestep": sample.timestep.long(),
        "encoder_hidden_states": text[None],
        "encoder_attention_mask": torch.ones(1, len(text), dtype=torch.bool),
        "pooled_projections": text.mean(0)[None] if same else torch.zeros(1, config.pooled_dim),
    }
    if sample.conditions.pooled is not None:
        inputs["pooled_projections"] = sample.conditions.pooled
    return inputs | ({"guidance": torch.tensor([1000.0 * config.trained_guidance])} if config.guidance_embeds else {})


def _recipe(files: PipelineFiles) -> TrainingRecipe:
    """Text of both encoders, which see the first frame, too, where clips start from it."""
    kind = "hunyuan_i2v" if files.transformer.get("image_condition_type") else "hunyuan"
    return TrainingRecipe(text={"kind": kind, "max_length": 256}, flow=shift_of(files.scheduler))


def _published(index: Json, fields: Json) -> PublishedUse:
    """As HunyuanVideoPipeline or HunyuanVideoImageToVideoPipeline is called by default, and weights that take guidance
    with 6, as its example and its authors do; 24 frames per second are those of its authors' sample_video.py."""
    del index
    condition = fields.get("image_condition_type")
    return PublishedUse(
        clips={
            "frames": 129,
            "height": 720,
            "width": 1280,
            "fps": 24.0,
            "steps": 50,
            "guidance_scale": 1.0 if condition == "latent_concat" else 6.0,
        },
        dit={"first_frame": condition} if condition else {},
    )


_ORIGINAL = {
    **HUNYUAN_DOUBLE_BLOCKS,
    "single_transformer_blocks.*.attn.to_q": "single_blocks.*.linear1",
    "single_transformer_blocks.*.attn.to_k": "single_blocks.*.linear1",
    "single_transformer_blocks.*.attn.to_v": "single_blocks.*.linear1",
    "single_transformer_blocks.*.proj_mlp": "single_blocks.*.linear1",
    "single_transformer_blocks.*.proj_out": "single_blocks.*.linear2",
}


FAMILY = Family(
    config=HunyuanConfig,
    model=_model,
    diffusers_class="HunyuanVideoTransformer3DModel",
    authors_class="HYVideoDiffusionTransformer",
    pipeline_class=lambda config: (
        "HunyuanVideoImageToVideoPipeline" if config.starts_from_image else "HunyuanVideoPipeline"
    ),
    first_frame=masked_first_frame,
    hint_share=0.001,  # HunyuanVideoImageToVideoPipeline.prepare_latents
    vae=HUNYUAN_VAE,
    texts={"hunyuan": _TEXT, "hunyuan_i2v": _TEXT_OF_PICTURE},
    missing_parts=("text_encoder_2", "tokenizer_2"),
    missing_note=(
        "HunyuanVideoPipeline wants two text encoders; this run trained with one. The transformer, vae and scheduler "
        "load by their own classes; train with model.text.kind hunyuan for a complete pipeline, or give --base."
    ),
    parts=PublishedParts(text={"text_encoder": LLAMA_8B, "text_encoder_2": CLIP_L}),
    published=_published,
    recipe=_recipe,
    key_map={
        "num_layers": "num_layers",
        "num_single_layers": "num_single_layers",
        "num_heads": "num_attention_heads",
        "head_dim": "attention_head_dim",
        "text_dim": "text_embed_dim",
        "in_channels": "in_channels",
        "out_channels": "out_channels",
        "rope_theta": "rope_theta",
        "num_refiner_layers": "num_refiner_layers",
        "guidance_embeds": "guidance_embeds",
    },
    class_defaults={
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 20,
        "num_single_layers": 40,
        "num_refiner_layers": 2,
        "mlp_ratio": 4.0,
        "patch_size": 2,
        "patch_size_t": 1,
        "qk_norm": "rms_norm",
        "guidance_embeds": True,
        "text_embed_dim": 4096,
        "pooled_projection_dim": 768,
        "rope_theta": 256.0,
        "rope_axes_dim": (16, 56, 56),
    },
    fixed_fields={"qk_norm": "rms_norm"},
    read_rest=_read_rest,
    write_rest=_write_rest,
    published_heads={"hunyuan-video-13b": 24, "open-sora-v2": 24},  # the latter has the same blocks
    converter="convert_hunyuan_video_transformer_to_diffusers",
    lora_names=LoraNames(
        blocks=JOINT_BLOCKS,
        projections=(*JOINT_PROJECTIONS, "proj_out"),
        original=_ORIGINAL,
        read_too=MODULATIONS,
    ),
    scheduler=_scheduler,
    parity_inputs=_parity_inputs,
)
