"""LTX-Video 0.9.0 to 0.9.8, text to video: Diffusers' names and numbers, and how they differ from other families."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ops.flow.schedulers import Scheduler
from ops.models.base.config import DiTConfig
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
    even_sigmas,
    shift_of,
)
from ops.models.ltx.config import CONDITION_PIPELINE, LTXConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ops.config import FlowConfig
    from ops.models.base.vae import DiffusersVAE


_BLOCKS_OF_LATER = "LTXVideo095DownBlock3D"  # of autoencoders, from 0.9.5 on


def _model() -> type[nn.Module]:
    from ops.models.ltx.model import LTXDiT

    return LTXDiT


def _vae() -> type[DiffusersVAE]:
    from ops.models.ltx.vae import LTXVAE

    return LTXVAE


def _vae_numbers(fields: Json) -> tuple[int, tuple[int, int, int]]:
    halvings = 2 ** sum(map(bool, fields.get("spatio_temporal_scaling", (True, True, True, False))))
    stride_s = fields.get("spatial_compression_ratio") or fields.get("patch_size", 4) * halvings
    stride_t = fields.get("temporal_compression_ratio") or fields.get("patch_size_t", 1) * halvings
    return fields.get("latent_channels", 128), (stride_t, stride_s, stride_s)


def _vae_normalisation(fields: Json, channels: int, module: Any) -> tuple[Tensor, Tensor]:  # of Diffusers
    """The normalisation in the buffers of the loaded module; its config.json has the scale only. A module that is built
    to predict memory has no values there."""
    del channels
    scale = float(fields.get("scaling_factor", 1.0))
    return module.latents_mean, module.latents_std / scale


def _read_rest(fields: Json, known: Json) -> dict[str, object]:
    width = known["num_heads"] * known["head_dim"]
    if fields["cross_attention_dim"] != width:
        raise ValueError(
            f"cross_attention_dim {fields.get('cross_attention_dim')} is not the transformer's width {width}."
        )
    return {"ffn_dim": 4 * width, "patch": (1, 1, 1)}


def _write_rest(config: LTXConfig) -> dict[str, object]:
    return {"cross_attention_dim": config.dim}


def _scheduler(config: LTXConfig, flow: FlowConfig) -> Scheduler:
    """LTXConditionPipeline passes the times themselves, which its scheduler must not shift."""
    if config.causal_temporal_positioning:
        return Scheduler(name="FlowMatchEulerDiscreteScheduler", settings={"shift": 1.0})
    return even_sigmas(config, flow)


def _is_causal(files: PipelineFiles) -> bool:
    """Whether a folder has the weights of 0.9.5 or later. That of 0.9.5 itself names LTXPipeline, by which its weights
    see positions that they were not trained on: its autoencoder tells it apart, and where transformers lie alone their
    scheduler, which shifts nothing."""
    if files.index.get("_class_name") == CONDITION_PIPELINE:
        return True
    if files.vae:
        return _BLOCKS_OF_LATER in files.vae.get("down_block_types", ())
    return files.scheduler.get("shift") == 1.0 and not files.scheduler.get("use_dynamic_shifting")


def _recipe(files: PipelineFiles) -> TrainingRecipe:
    """Text is encoded as it is, over 256 rows with a mask; that of 0.9.0 and 0.9.1 over 128 without one, and the
    caption's own are kept. The shift of the later weights is free: their scheduler has none, and their trainer one by
    tokens."""
    if _is_causal(files):
        return TrainingRecipe(text={"max_length": 256, "cleaned": False}, dit={"causal_temporal_positioning": True})
    return TrainingRecipe(text={"max_length": 128, "unmasked": 128}, flow=shift_of(files.scheduler))


def _published(index: Json, fields: Json) -> PublishedUse:
    """As LTXPipeline and LTXConditionPipeline are called by default."""
    del index, fields
    return PublishedUse(
        clips={"frames": 161, "height": 512, "width": 704, "fps": 25.0, "steps": 50, "guidance_scale": 3.0},
        first_frame=True,
    )


def parity_times(sample: ParitySample) -> Tensor:
    """The time of a sample; [1, n], a time for each token, where frames are clean. LTX-2 takes the same."""
    times = sample.timestep
    if sample.clean_frames:
        times = times.expand(sample.latent.shape[1:]).clone()
        first = sample.conditions.first_times
        times[: sample.clean_frames] = 0 if first is None else first
        times = times.reshape(1, -1)
    return times


def _parity_inputs(config: LTXConfig, sample: ParitySample) -> dict[str, object]:
    import torch

    _, t, h, w = sample.latent.shape
    stride_t, *pixels = config.vae_stride
    inputs: dict[str, object] = {
        "hidden_states": sample.latent.flatten(1).T[None],
        "encoder_hidden_states": sample.text[None],
        "timestep": parity_times(sample),
        "encoder_attention_mask": torch.ones(1, len(sample.text)),
    }
    if not config.causal_temporal_positioning:
        scale = (stride_t / config.frame_rate, *pixels)
        return inputs | {"num_frames": t, "height": h, "width": w, "rope_interpolation_scale": scale}
    axes = torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij")
    frames, rows, columns = (axis.flatten().float() for axis in axes)
    seconds = (frames * stride_t + 1 - stride_t).clamp(min=0) / config.frame_rate
    return inputs | {"video_coords": torch.stack([seconds, rows * pixels[0], columns * pixels[1]])[None]}


def _parity_output(output: Tensor, sample: ParitySample) -> Tensor:
    latent: Tensor = output.T.unflatten(1, sample.latent.shape[1:])
    return latent


_LATER_VAE: Json = {  # of 0.9.5 to 0.9.8
    "block_out_channels": [128, 256, 512, 1024, 2048],
    "down_block_types": ["LTXVideo095DownBlock3D"] * 4,
    "downsample_type": ["spatial", "temporal", "spatiotemporal", "spatiotemporal"],
    "layers_per_block": [4, 6, 6, 2, 2],
    "spatio_temporal_scaling": [True] * 4,
    "decoder_block_out_channels": [256, 512, 1024],
    "decoder_layers_per_block": [5] * 4,
    "decoder_spatio_temporal_scaling": [True] * 3,
    "decoder_inject_noise": [False] * 4,
    "upsample_residual": [True] * 3,
    "upsample_factor": [2] * 3,
    "timestep_conditioning": True,
    "spatial_compression_ratio": 32,
    "temporal_compression_ratio": 8,
}


def _published_vae(config: DiTConfig) -> Json:
    assert isinstance(config, LTXConfig)
    return _LATER_VAE if config.causal_temporal_positioning else {}


def _export_notes(config: LTXConfig, pad_to: int) -> list[str]:
    del pad_to
    if not config.causal_temporal_positioning:
        return []
    return [
        "LTXConditionPipeline puts noise on a given picture in every step: pass image_cond_noise_scale=0.0 for the "
        "clips of `heddle sample`. Neither shifts noise levels, whatever train.flow says."
    ]


FAMILY = Family(
    config=LTXConfig,
    model=_model,
    diffusers_class="LTXVideoTransformer3DModel",
    pipeline_class=lambda config: CONDITION_PIPELINE if config.causal_temporal_positioning else "LTXPipeline",
    vae=VAEClass(
        name="AutoencoderKLLTXVideo",
        numbers=_vae_numbers,
        normalisation=_vae_normalisation,
        decodes_in_time=lambda fields: bool(fields.get("timestep_conditioning")),
        runs=_vae,
    ),
    key_map={
        "num_layers": "num_layers",
        "num_heads": "num_attention_heads",
        "head_dim": "attention_head_dim",
        "text_dim": "caption_channels",
        "in_channels": "in_channels",
        "out_channels": "out_channels",
        "eps": "norm_eps",
    },
    class_defaults={
        "in_channels": 128,
        "out_channels": 128,
        "patch_size": 1,
        "patch_size_t": 1,
        "num_attention_heads": 32,
        "attention_head_dim": 64,
        "cross_attention_dim": 2048,
        "num_layers": 28,
        "activation_fn": "gelu-approximate",
        "qk_norm": "rms_norm_across_heads",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-06,
        "caption_channels": 4096,
        "attention_bias": True,
        "attention_out_bias": True,
    },
    fixed_fields={
        "qk_norm": "rms_norm_across_heads",
        "patch_size": 1,
        "patch_size_t": 1,
        "norm_elementwise_affine": False,
        "attention_bias": True,
        "attention_out_bias": True,
        "activation_fn": "gelu-approximate",
    },
    read_rest=_read_rest,
    write_rest=_write_rest,
    converter="convert_ltx_transformer_checkpoint_to_diffusers",
    lora_names=LoraNames(
        blocks=("transformer_blocks.",),
        projections=("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"),
        original={},
    ),
    scheduler=_scheduler,
    shifts_by_tokens=True,
    parts=PublishedParts(text={"text_encoder": T5_XXL}, vae=_published_vae),
    published=_published,
    recipe=_recipe,
    parity_inputs=_parity_inputs,
    parity_output=_parity_output,
    export_notes=_export_notes,
)
