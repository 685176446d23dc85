"""HunyuanVideo-1.5, text to video and image to video: Diffusers' names and numbers, and how they differ from others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ops.flow.schedulers import Scheduler
from ops.models.base.encoders import BYT5_SMALL, QWEN2_5_VL_7B, SIGLIP_SO400M
from ops.models.base.family import (
    Family,
    Json,
    LoraNames,
    ParitySample,
    PipelineFiles,
    PublishedParts,
    PublishedUse,
    TextRecipe,
    TrainingRecipe,
    VAEClass,
    VisionRecipe,
    masked_first_frame,
)
from ops.models.base.joint_config import (
    HUNYUAN_DOUBLE_BLOCKS,
    JOINT_PROJECTIONS,
    MODULATIONS,
    default_rope_split,
    ratio_of,
)
from ops.models.hunyuan15.config import Hunyuan15Config

if TYPE_CHECKING:
    from torch import nn

    from ops.config import FlowConfig
    from ops.models.base.vae import DiffusersVAE

_SYSTEM = (
    "You are a helpful assistant. Describe the video by detailing the following aspects: "
    "        1. The main content and theme of the video. "
    "        2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects. "
    "        3. Actions, events, behaviors temporal relationships, physical movement changes of the objects. "
    "        4. background environment, light, style and atmosphere. "
    "        5. camera angles, movements, and transitions used in the video."
)
# Of HunyuanVideo15Pipeline, in the chat template of Qwen2.5-VL: 108 tokens stand before the caption.
_TEXT = TextRecipe(
    states="qwen2_5_vl_text",
    second="byt5",
    second_tokens=256,
    template=(f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n"),
    system=_SYSTEM,
    blank=" ",
    crop=108,
    skipped_layers=2,
)
_TEXT_AND_PICTURE = replace(_TEXT, vision=VisionRecipe())  # of HunyuanVideo15ImageToVideoPipeline
_TASKS = {"none": "t2v", "channels": "i2v"}  # first_frame -> task_type
_PATCH = 16  # pixels of what `_size` counts
_OF_MUSUBI = {  # queries, keys and values apart; its converter for ComfyUI fuses them and numbers the layers of an MLP
    **{f"transformer_blocks.*.attn.to_{x}": (f"double_blocks.*.img_attn_{x}",) for x in "qkv"},
    **{f"transformer_blocks.*.attn.add_{x}_proj": (f"double_blocks.*.txt_attn_{x}",) for x in "qkv"},
    "transformer_blocks.*.ff.net.0.proj": ("double_blocks.*.img_mlp.0",),
    "transformer_blocks.*.ff.net.2": ("double_blocks.*.img_mlp.2",),
    "transformer_blocks.*.ff_context.net.0.proj": ("double_blocks.*.txt_mlp.0",),
    "transformer_blocks.*.ff_context.net.2": ("double_blocks.*.txt_mlp.2",),
}


def _model() -> type[nn.Module]:
    from ops.models.hunyuan15.model import Hunyuan15DiT

    return Hunyuan15DiT


def _vae() -> type[DiffusersVAE]:
    from ops.models.hunyuan15.vae import Hunyuan15VAE

    return Hunyuan15VAE


def _vae_numbers(fields: Json) -> tuple[int, tuple[int, int, int]]:
    stride_s = fields.get("spatial_compression_ratio", 16)
    return fields.get("latent_channels", 32), (fields.get("temporal_compression_ratio", 4), stride_s, stride_s)


def _read_rest(fields: Json, known: Json) -> dict[str, object]:
    """Raises ValueError for weights of super-resolution, and of MeanFlow, which get a second time."""
    first_frames = {task: first_frame for first_frame, task in _TASKS.items()}
    if fields["task_type"] not in first_frames:
        raise ValueError(
            f"task_type is {fields['task_type']}: of HunyuanVideo-1.5 text to video and image to video are computed, "
            f"not super-resolution. Take a folder whose transformer/config.json says t2v or i2v."
        )
    if fields["use_meanflow"]:
        raise ValueError(
            "use_meanflow is true: its weights get a second time, of a distillation that is not computed. Take "
            "the folder of the plain model."
        )
    if fields["in_channels"] != 2 * known["out_channels"] + 1:
        raise ValueError(
            f"in_channels is {fields['in_channels']}, and not one more than twice out_channels "
            f"{known['out_channels']}: those of a clip, of its first frame and of a mask. Copy its config.json again."
        )
    spatial, axes, glyphs = fields["patch_size"], tuple(fields["rope_axes_dim"]), fields["text_embed_2_dim"]
    first_frame = first_frames[fields["task_type"]]
    return {
        "first_frame": first_frame,
        "in_channels": known["out_channels"] if first_frame == "none" else fields["in_channels"],
        "patch": (fields["patch_size_t"], spatial, spatial),
        "ffn_dim": int(known["num_heads"] * known["head_dim"] * fields["mlp_ratio"]),
        "glyph_dim": 0 if glyphs == known["text_dim"] else glyphs,
        "rope_axes": None if axes == default_rope_split(known["head_dim"]) else axes,
    }


def _write_rest(config: Hunyuan15Config) -> dict[str, object]:
    patch_t, patch_h, patch_w = config.patch
    if patch_h != patch_w:
        raise ValueError(
            f"patch {config.patch}: HunyuanVideo-1.5's config knows one spatial patch size. Use equal ones."
        )
    return {
        "in_channels": 2 * config.out_channels + 1,
        "patch_size": patch_h,
        "patch_size_t": patch_t,
        "mlp_ratio": ratio_of(config.ffn_dim, config.dim),
        "text_embed_2_dim": config.glyph_width,
        "rope_axes_dim": list(config.rope_split),
        "task_type": _TASKS[config.first_frame],
        "use_meanflow": False,
    }


def _scheduler(config: Hunyuan15Config, flow: FlowConfig) -> Scheduler:
    """HunyuanVideo15Pipeline passes even sigmas to FlowMatchEuler, so its own spacing does not matter."""
    del config
    return Scheduler(name="FlowMatchEulerDiscreteScheduler", settings={"shift": flow.flow_shift})


def _recipe(files: PipelineFiles) -> TrainingRecipe:
    """Text of both encoders, in true length, and with rows of the first frame where clips start from it. The shift is
    that of its authors' train.py, whatever a scheduler says: that is for samples, and another for each size."""
    kind = "hunyuan15_i2v" if files.transformer.get("task_type", "i2v") == "i2v" else "hunyuan15"
    return TrainingRecipe(text={"kind": kind, "max_length": 1000}, flow={"flow_shift": 3.0, "token_shift": None})


def _size(target: int) -> tuple[int, int]:
    """(height, width) of about 16:9 with at most target^2 pixels, as HunyuanVideo15Pipeline chooses it: the flattest
    that is no flatter, of sizes between the largest of a height and the largest of the next."""
    most = round((target / _PATCH) ** 2)
    sizes = [
        (high, wide)
        for high in range(most, 0, -1)
        for wide in range(max(most // (high + 1), 1), most // high + 1)
        if 16 * high >= 9 * wide
    ]
    high, wide = min(sizes, key=lambda size: size[0] / size[1])
    return high * _PATCH, wide * _PATCH


def _published(index: Json, fields: Json) -> PublishedUse:
    """As HunyuanVideo15Pipeline is called by default, with the guidance of the published guiders; 24 frames per second
    are those of its authors' train.py. (Of a picture the pipeline takes the size that is nearest to its own.)"""
    del index
    height, width = _size(fields.get("target_size", 640))
    return PublishedUse(
        clips={
            "frames": 121,
            "height": height,
            "width": width,
            "fps": 24.0,
            "steps": 50,
            "guidance_scale": 6.0,
        },
        dit={"first_frame": "channels"} if fields.get("task_type") == "i2v" else {},
    )


def _parity_inputs(config: Hunyuan15Config, sample: ParitySample) -> dict[str, object]:
    import torch

    latent, text = sample.latent, sample.text
    states, kinds = text[:, : config.text_dim], text[:, config.text_dim :].sum(dim=1)
    is_caption = kinds < 0.5
    glyphs = states[~is_caption & (kinds < 1.5), : config.glyph_width]
    there = len(glyphs) or 1  # the class takes no empty text
    pictures = states[kinds > 1.5, : config.image_dim]
    if not config.starts_from_image:
        latent = torch.cat([latent, torch.zeros_like(latent), torch.zeros_like(latent[:1])])
    return {
        "hidden_states": latent[None],
        "timestep": sample.timestep,
        "encoder_hidden_states": states[is_caption][None],
        "encoder_attention_mask": torch.ones(1, int(is_caption.sum())),
        "encoder_hidden_states_2": glyphs[None] if len(glyphs) else text.new_zeros(1, there, config.glyph_width),
        "encoder_attention_mask_2": torch.full((1, there), float(len(glyphs) > 0)),
        "image_embeds": pictures[None] if len(pictures) else torch.zeros(1, 1, config.image_dim),
    }


FAMILY = Family(
    config=Hunyuan15Config,
    model=_model,
    diffusers_class="HunyuanVideo15Transformer3DModel",
    authors_class="HunyuanVideo_1_5_DiffusionTransformer",
    pipeline_class=lambda config: (
        "HunyuanVideo15ImageToVideoPipeline" if config.starts_from_image else "HunyuanVideo15Pipeline"
    ),
    first_frame=masked_first_frame,
    needs_vae=True,
    has_guider=True,
    vae=VAEClass(name="AutoencoderKLHunyuanVideo15", numbers=_vae_numbers, runs=_vae),
    texts={"hunyuan15": _TEXT, "hunyuan15_i2v": _TEXT_AND_PICTURE},
    missing_parts=("text_encoder_2", "tokenizer_2"),
    missing_note=(
        "HunyuanVideo15Pipeline wants two text encoders; this run trained with one. The transformer, vae and scheduler "
        "load by their own classes; train with model.text.kind hunyuan15 for a complete pipeline, or give --base."
    ),
    parts=PublishedParts(
        text={"text_encoder": QWEN2_5_VL_7B, "text_encoder_2": BYT5_SMALL, "image_encoder": SIGLIP_SO400M}
    ),
    published=_published,
    recipe=_recipe,
    key_map={
        "num_layers": "num_layers",
        "num_heads": "num_attention_heads",
        "head_dim": "attention_head_dim",
        "text_dim": "text_embed_dim",
        "image_dim": "image_embed_dim",
        "in_channels": "in_channels",
        "out_channels": "out_channels",
        "rope_theta": "rope_theta",
        "num_refiner_layers": "num_refiner_layers",
        "target_size": "target_size",
    },
    class_defaults={
        "in_channels": 65,
        "out_channels": 32,
        "num_attention_heads": 16,
        "attention_head_dim": 128,
        "num_layers": 54,
        "num_refiner_layers": 2,
        "mlp_ratio": 4.0,
        "patch_size": 1,
        "patch_size_t": 1,
        "qk_norm": "rms_norm",
        "text_embed_dim": 3584,
        "text_embed_2_dim": 1472,
        "image_embed_dim": 1152,
        "rope_theta": 256.0,
        "rope_axes_dim": (16, 56, 56),
        "target_size": 640,
        "task_type": "i2v",
        "use_meanflow": False,
    },
    fixed_fields={"qk_norm": "rms_norm"},
    read_rest=_read_rest,
    write_rest=_write_rest,
    lora_names=LoraNames(
        blocks=("transformer_blocks.",),
        projections=tuple(name for name in JOINT_PROJECTIONS if name != "proj_mlp"),
        original=HUNYUAN_DOUBLE_BLOCKS,
        read_too={**_OF_MUSUBI, **MODULATIONS},
    ),
    scheduler=_scheduler,
    parity_inputs=_parity_inputs,
)
