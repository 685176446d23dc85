"""CogVideoX 2B, 5B and 1.5, text to video and image to video: Diffusers' names and numbers, and how they differ from
other families."""

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
)
from ops.models.cogvideox.config import CogVideoXConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ops.config import FlowConfig
    from ops.models.base.vae import DiffusersVAE


def _model() -> type[nn.Module]:
    from ops.models.cogvideox.model import CogVideoXDiT

    return CogVideoXDiT


def _vae() -> type[DiffusersVAE]:
    from ops.models.cogvideox.vae import CogVideoXVAE

    return CogVideoXVAE


def _vae_numbers(fields: Json) -> tuple[int, tuple[int, int, int]]:
    stride_s = 2 ** (len(fields.get("block_out_channels", (128, 256, 256, 512))) - 1)
    stride_t = int(fields.get("temporal_compression_ratio", 4))
    return fields.get("latent_channels", 16), (stride_t, stride_s, stride_s)


def _read_rest(fields: Json, known: Json) -> dict[str, object]:
    spatial, temporal = fields["patch_size"], fields.get("patch_size_t")
    if temporal is None and not fields.get("patch_bias", True):
        raise ValueError("patch_bias false: only patch embeddings with a bias are supported.")
    return {
        "patch": (temporal or 1, spatial, spatial),
        "ffn_dim": 4 * known["num_heads"] * known["head_dim"],
        "rope_theta": 10000.0,
        "sample_size": (fields["sample_height"], fields["sample_width"]),
        "sample_frames": fields["sample_frames"],
        "first_frame": "channels" if known["in_channels"] != known["out_channels"] else "none",
        "ofs_dim": fields.get("ofs_embed_dim") or 0,
    }


def _write_rest(config: CogVideoXConfig) -> dict[str, object]:
    temporal, spatial, _ = config.patch
    height, width = config.sample_size
    return {
        "patch_size": spatial,
        "patch_size_t": temporal if temporal > 1 else None,
        "sample_height": height,
        "sample_width": width,
        "sample_frames": config.sample_frames,
        "ofs_embed_dim": config.ofs_dim or None,
    }


def _first_frame(latent: Tensor, stride_t: int, last: bool) -> Tensor:
    """[C, t, h, w] of the first frame, then zeros: as it is."""
    del stride_t, last
    return latent


def _scheduler(config: CogVideoXConfig, flow: FlowConfig) -> Scheduler:
    del flow
    settings = {
        "beta_schedule": "scaled_linear",
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "snr_shift_scale": config.snr_shift,
        "timestep_spacing": "trailing",
        "clip_sample": False,
    }
    return Scheduler(name="CogVideoXDDIMScheduler", settings=settings)


def _recipe(files: PipelineFiles) -> TrainingRecipe:
    """Its text has all rows of its padding, encoded without a mask."""
    scheduler = files.scheduler
    velocities = scheduler.get("prediction_type") == "v_prediction" and scheduler.get("rescale_betas_zero_snr")
    if scheduler and not velocities:
        raise ValueError("its scheduler is not that of velocities without a signal at the last time.")
    rows = files.transformer.get("max_text_seq_length", 226)
    return TrainingRecipe(
        text={"max_length": rows, "unmasked": rows, "pad_to": rows},
        dit={"snr_shift": scheduler.get("snr_shift_scale", 3.0)} if scheduler else {},
    )


def _published(index: Json, fields: Json) -> PublishedUse:
    """As CogVideoXPipeline is called by default."""
    del index
    dit = {"first_frame": "channels"} if fields["in_channels"] != fields["out_channels"] else {}
    later = fields.get("patch_size_t") is not None
    size = {"frames": 81, "height": 768, "width": 1360} if later else {"frames": 49, "height": 480, "width": 720}
    clips = {**size, "fps": 16.0 if later else 8.0, "steps": 50, "guidance_scale": 6.0}
    return PublishedUse(clips=clips, dit=dit)


def _parity_inputs(config: CogVideoXConfig, sample: ParitySample) -> dict[str, object]:
    inputs = {
        "hidden_states": sample.latent.transpose(0, 1)[None],
        "encoder_hidden_states": sample.text[None],
        "timestep": sample.timestep.long(),
    }
    if config.ofs_dim:
        inputs["ofs"] = sample.timestep.new_full((1,), 2.0)
    return inputs | ({"image_rotary_emb": _their_rotation(config, sample)} if config.rotary else {})


def _their_rotation(config: CogVideoXConfig, sample: ParitySample) -> tuple[Tensor, Tensor]:
    """As CogVideoXPipeline makes it for its transformer."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    temporal, *patch = config.patch
    t, h, w = (size // part for size, part in zip(sample.latent.shape[1:], config.patch))
    full_h, full_w = (size // part for size, part in zip(config.sample_size, patch))
    if temporal > 1:
        found = get_3d_rotary_pos_embed(
            config.head_dim, None, (h, w), t, grid_type="slice", max_size=(max(full_h, h), max(full_w, w))
        )
    else:
        crop = get_resize_crop_region_for_grid((h, w), full_w, full_h)
        found = get_3d_rotary_pos_embed(config.head_dim, crop, (h, w), t)
    cos, sin = found
    return cos, sin


def _export_notes(config: CogVideoXConfig, pad_to: int) -> list[str]:
    notes = []
    if pad_to not in (0, 226):
        notes.append(f"this run trained on {pad_to} rows of text; call the pipeline with max_sequence_length={pad_to}.")
    if config.learned_positions:
        height, width = (8 * size for size in config.sample_size)
        notes.append(f"CogVideoXImageToVideoPipeline makes clips of {height}x{width} alone with learned positions.")
    return notes


FAMILY = Family(
    config=CogVideoXConfig,
    model=_model,
    diffusers_class="CogVideoXTransformer3DModel",
    pipeline_class=lambda config: (
        "CogVideoXPipeline" if config.first_frame == "none" else "CogVideoXImageToVideoPipeline"
    ),
    first_frame=_first_frame,
    vae=VAEClass(name="AutoencoderKLCogVideoX", numbers=_vae_numbers, runs=_vae),
    key_map={
        "num_layers": "num_layers",
        "num_heads": "num_attention_heads",
        "head_dim": "attention_head_dim",
        "text_dim": "text_embed_dim",
        "in_channels": "in_channels",
        "out_channels": "out_channels",
        "eps": "norm_eps",
        "time_dim": "time_embed_dim",
        "rotary": "use_rotary_positional_embeddings",
        "spatial_scale": "spatial_interpolation_scale",
        "text_rows": "max_text_seq_length",
        "learned_positions": "use_learned_positional_embeddings",
    },
    class_defaults={
        "num_attention_heads": 30,
        "attention_head_dim": 64,
        "in_channels": 16,
        "out_channels": 16,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "time_embed_dim": 512,
        "text_embed_dim": 4096,
        "num_layers": 30,
        "attention_bias": True,
        "sample_width": 90,
        "sample_height": 60,
        "sample_frames": 49,
        "patch_size": 2,
        "temporal_compression_ratio": 4,
        "max_text_seq_length": 226,
        "activation_fn": "gelu-approximate",
        "timestep_activation_fn": "silu",
        "norm_elementwise_affine": True,
        "norm_eps": 1e-05,
        "spatial_interpolation_scale": 1.875,
        "temporal_interpolation_scale": 1.0,
        "use_rotary_positional_embeddings": False,
        "use_learned_positional_embeddings": False,
    },
    fixed_fields={
        "temporal_compression_ratio": 4,
        "temporal_interpolation_scale": 1.0,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "attention_bias": True,
        "norm_elementwise_affine": True,
        "activation_fn": "gelu-approximate",
        "timestep_activation_fn": "silu",
    },
    read_rest=_read_rest,
    write_rest=_write_rest,
    published_heads={"cogvideox-2b": 30, "cogvideox-5b": 48},
    lora_names=LoraNames(
        blocks=("transformer_blocks.",),
        projections=("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"),
    ),
    scheduler=_scheduler,
    passes_sigmas=False,
    schedulers=("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"),
    parts=PublishedParts(text={"text_encoder": T5_XXL}),
    published=_published,
    recipe=_recipe,
    parity_inputs=_parity_inputs,
    parity_output=lambda output, sample: output.transpose(0, 1),
    parity_text=lambda config: 7 if config.rotary and not config.learned_positions else config.text_rows,
    export_notes=_export_notes,
)
