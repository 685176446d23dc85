"""LTX-2's branch for video: Diffusers' names and numbers, and how they differ from other families."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.models.base.config import DiTConfig
from ops.models.base.encoders import GEMMA3_12B, LTX2_CONNECTORS
from ops.models.base.family import (
    Family,
    Json,
    ParitySample,
    PipelineFiles,
    PublishedParts,
    PublishedUse,
    TextRecipe,
    TrainingRecipe,
    VAEClass,
    even_sigmas,
    shift_of,
)
from ops.models.ltx.family import FAMILY as LTX
from ops.models.ltx.family import parity_times
from ops.models.ltx2.config import LTX2Config

if TYPE_CHECKING:
    from torch import nn

_TEXT = TextRecipe(
    states="gemma3_text",
    second="connectors",
    second_parts=("connectors", "tokenizer"),
    final_norm=True,
    stripped=True,
    keeps_padding=True,
)


def _model() -> type[nn.Module]:
    from ops.models.ltx2.model import LTX2DiT

    return LTX2DiT


def _vae_numbers(fields: Json) -> tuple[int, tuple[int, int, int]]:
    scaled = fields.get("spatio_temporal_scaling", (True, True, True, True))
    halvings = 2 ** sum(map(bool, scaled)) if not isinstance(scaled, bool) else 2 ** (4 * scaled)
    stride_s = fields.get("spatial_compression_ratio") or fields.get("patch_size", 4) * halvings
    stride_t = fields.get("temporal_compression_ratio") or fields.get("patch_size_t", 1) * halvings
    if fields.get("timestep_conditioning"):
        raise ValueError(
            "an AutoencoderKLLTX2Video with timestep_conditioning, whose decoder gets a time: LTX-2's has none. "
            "Take the vae/ of LTX-2."
        )
    return fields.get("latent_channels", 128), (stride_t, stride_s, stride_s)


def _read_rest(fields: Json, known: Json) -> dict[str, object]:
    width = known["num_heads"] * known["head_dim"]
    if fields["cross_attention_dim"] != width:
        raise ValueError(f"cross_attention_dim {fields['cross_attention_dim']} is not the transformer's width {width}.")
    heads, head_dim = fields["audio_num_attention_heads"], fields["audio_attention_head_dim"]
    if heads != known["num_heads"] or fields["audio_cross_attention_dim"] != heads * head_dim:
        raise ValueError(
            f"audio_num_attention_heads {heads} and audio_cross_attention_dim {fields['audio_cross_attention_dim']}: "
            f"the branch for sound has the {known['num_heads']} heads of that for video, of {head_dim} each, in LTX-2."
        )
    return {
        "ffn_dim": 4 * width,
        "patch": (1, 1, 1),
        "vae_stride": tuple(fields["vae_scale_factors"]),
        "audio_head_dim": 0 if head_dim == known["head_dim"] // 2 else head_dim,
    }


def _write_rest(config: LTX2Config) -> dict[str, object]:
    return {
        "cross_attention_dim": config.dim,
        "vae_scale_factors": list(config.vae_stride),
        "audio_num_attention_heads": config.num_heads,
        "audio_attention_head_dim": config.sound_head_dim,
        "audio_cross_attention_dim": config.num_heads * config.sound_head_dim,
    }


def _recipe(files: PipelineFiles) -> TrainingRecipe:
    """Captions as they are, over 1024 rows, of which those after the caption are registers of the connector; the shift
    is that of Lightricks' trainer, too."""
    return TrainingRecipe(text={"kind": "ltx2", "max_length": 1024}, flow=shift_of(files.scheduler))


def _published(index: Json, fields: Json) -> PublishedUse:
    """As LTX2Pipeline is called by default, without its sound; the negative prompt is that of its example."""
    del index, fields
    return PublishedUse(
        clips={
            "frames": 121,
            "height": 512,
            "width": 768,
            "fps": 24.0,
            "steps": 30,
            "guidance_scale": 3.0,
            "negative_prompt": "worst quality, inconsistent motion, blurry, jittery, distorted",
        },
        first_frame=True,
    )


def _parity_inputs(config: LTX2Config, sample: ParitySample) -> dict[str, object]:
    import torch

    _, t, h, w = sample.latent.shape
    return {
        "hidden_states": sample.latent.flatten(1).T[None],
        "encoder_hidden_states": sample.text[None],
        "timestep": parity_times(sample),
        "num_frames": t,
        "height": h,
        "width": w,
        "fps": config.frame_rate,
        "isolate_modalities": True,
        "audio_hidden_states": torch.zeros(1, 1, 128),
        "audio_encoder_hidden_states": torch.zeros(1, 1, config.text_dim),
        "audio_timestep": sample.timestep,
        "audio_num_frames": 1,
    }


def _published_vae(config: DiTConfig) -> Json:
    del config
    return {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8, "decoder_causal": False}


def _export_notes(config: LTX2Config, pad_to: int) -> list[str]:
    del pad_to
    given = (
        "LTX2ImageToVideoPipeline compresses a given picture before it encodes it: pass image_crf=0 for the clips of "
        "`heddle sample`."
    )
    if config.path:
        return [
            "the branch for sound is that of model.dit.path, as it was. In LTX2Pipeline video and sound attend to each "
            "other; this run trained, and `heddle sample` makes, video without sound.",
            given,
        ]
    return ["the branch for sound is zero: LTX2Pipeline makes our clips, and no sound.", given]


FAMILY = Family(
    config=LTX2Config,
    model=_model,
    diffusers_class="LTX2VideoTransformer3DModel",
    pipeline_class=lambda config: "LTX2Pipeline",
    needs_vae=True,
    vae=VAEClass(name="AutoencoderKLLTX2Video", numbers=_vae_numbers, normalisation=LTX.vae.normalisation),
    texts={"ltx2": _TEXT},
    missing_parts=("connectors",),
    missing_note=(
        "LTX2Pipeline wants Gemma 3 and text connectors; this run trained with a T5. The transformer, vae and "
        "scheduler load by their own classes; train with model.text.kind ltx2 for a complete pipeline, or give --base."
    ),
    unused_parts=("audio_vae", "vocoder", "processor"),
    kept=("audio", "av_cross_attn", "a2v_cross_attn"),
    key_map={
        "num_layers": "num_layers",
        "num_heads": "num_attention_heads",
        "head_dim": "attention_head_dim",
        "text_dim": "caption_channels",
        "in_channels": "in_channels",
        "out_channels": "out_channels",
        "eps": "norm_eps",
        "rope_theta": "rope_theta",
    },
    class_defaults={
        "in_channels": 128,
        "out_channels": 128,
        "patch_size": 1,
        "patch_size_t": 1,
        "num_attention_heads": 32,
        "attention_head_dim": 128,
        "cross_attention_dim": 4096,
        "vae_scale_factors": (8, 32, 32),
        "pos_embed_max_pos": 20,
        "base_height": 2048,
        "base_width": 2048,
        "gated_attn": False,
        "cross_attn_mod": False,
        "audio_in_channels": 128,
        "audio_num_attention_heads": 32,
        "audio_attention_head_dim": 64,
        "audio_cross_attention_dim": 2048,
        "audio_cross_attn_mod": False,
        "num_layers": 48,
        "activation_fn": "gelu-approximate",
        "qk_norm": "rms_norm_across_heads",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-06,
        "caption_channels": 3840,
        "attention_bias": True,
        "attention_out_bias": True,
        "rope_theta": 10000.0,
        "rope_double_precision": True,
        "causal_offset": 1,
        "timestep_scale_multiplier": 1000,
        "rope_type": "interleaved",
        "use_prompt_embeddings": True,
        "ff_bias": True,
    },
    fixed_fields={  # gated_attn, cross_attn_mod and a text that is not projected are LTX-2.3's, biases LTX-2.5's
        "patch_size": 1,
        "patch_size_t": 1,
        "pos_embed_max_pos": 20,
        "base_height": 2048,
        "base_width": 2048,
        "gated_attn": False,
        "cross_attn_mod": False,
        "audio_in_channels": 128,
        "audio_cross_attn_mod": False,
        "activation_fn": "gelu-approximate",
        "qk_norm": "rms_norm_across_heads",
        "norm_elementwise_affine": False,
        "attention_bias": True,
        "attention_out_bias": True,
        "rope_double_precision": True,
        "causal_offset": 1,
        "timestep_scale_multiplier": 1000,
        "rope_type": "split",
        "use_prompt_embeddings": True,
        "ff_bias": True,
    },
    read_rest=_read_rest,
    write_rest=_write_rest,
    converter="convert_ltx2_transformer_to_diffusers",
    lora_names=LTX.lora_names,
    scheduler=even_sigmas,
    shifts_by_tokens=True,
    parts=PublishedParts(text={"text_encoder": GEMMA3_12B, "connectors": LTX2_CONNECTORS}, vae=_published_vae),
    published=_published,
    recipe=_recipe,
    parity_inputs=_parity_inputs,
    parity_output=LTX.parity_output,
    export_notes=_export_notes,
)
