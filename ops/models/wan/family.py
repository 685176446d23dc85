"""Wan, text to video and image to video: Diffusers' names and numbers, and how they differ from other families."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.flow.schedulers import Scheduler
from ops.models.base.config import DiTConfig
from ops.models.base.encoders import UMT5_XXL
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
from ops.models.wan.config import WanConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ops.config import FlowConfig
    from ops.models.base.vae import DiffusersVAE


def _model() -> type[nn.Module]:
    from ops.models.wan.model import WanDiT

    return WanDiT


def _vae() -> type[DiffusersVAE]:
    from ops.models.wan.vae import WanVAE

    return WanVAE


def _vae_numbers(fields: Json) -> tuple[int, tuple[int, int, int]]:
    # Folders of before Diffusers 0.34 carry no scale factors; the layer counts say the same.
    down = fields.get("temperal_downsample", [False, True, True])
    stride_t = fields.get("scale_factor_temporal") or 2 ** sum(map(bool, down))
    stride_s = fields.get("scale_factor_spatial") or 2 ** len(down) * (fields.get("patch_size") or 1)
    return fields.get("z_dim", 16), (stride_t, stride_s, stride_s)


_IMAGE_TO_VIDEO_TEXT = 512  # Diffusers' class takes all rows of its context but these for those of the image


def _read_rest(fields: Json, known: Json) -> dict[str, object]:
    width = known["num_heads"] * known["head_dim"]
    if fields.get("added_kv_proj_dim") not in (None, width):
        raise ValueError(f"added_kv_proj_dim {fields['added_kv_proj_dim']} is not the transformer's width {width}.")
    return {
        "patch": tuple(fields["patch_size"]),
        "first_frame": "channels" if known["in_channels"] != known["out_channels"] else "none",
        "image_dim": fields.get("image_dim") or 0,
        "pos_embed_seq_len": fields.get("pos_embed_seq_len") or 0,
    }


def _write_rest(config: WanConfig) -> dict[str, object]:
    return {
        "patch_size": list(config.patch),
        "rope_max_seq_len": 1024,
        "image_dim": config.image_dim or None,
        "pos_embed_seq_len": config.pos_embed_seq_len or None,
        "added_kv_proj_dim": config.dim if config.image_dim else None,
    }


def _pipeline_class(config: WanConfig) -> str:
    return "WanPipeline" if config.first_frame == "none" else "WanImageToVideoPipeline"


def _first_frame(latent: Tensor, stride_t: int, last: bool) -> Tensor:
    """[C, t, h, w] of (first frame, then grey, and the last frame where that is given) -> [stride_t + C, t, h, w]: a
    mask, 1 where a frame is given, before it.

    A latent frame stands for `stride_t` frames of the clip, each with a channel of the mask (WanImageToVideoPipeline).
    """
    joined = latent.new_zeros(stride_t + len(latent), *latent.shape[1:])
    joined[:stride_t, 0] = 1
    if last:
        joined[stride_t - 1, -1] = 1
    joined[stride_t:] = latent
    return joined


def _scheduler(config: WanConfig, flow: FlowConfig) -> Scheduler:
    """WanPipeline passes no sigmas, and FlowMatchEuler's own end one step early, near 0.001. DPMSolver of order 1 is
    Euler, too, with the spacing of Wan's published schedulers."""
    settings = {
        "algorithm_type": "dpmsolver++",
        "solver_order": 1,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": flow.flow_shift,
    }
    return Scheduler(name="DPMSolverMultistepScheduler", settings=settings)


def _recipe(files: PipelineFiles) -> TrainingRecipe:
    """Embeddings followed by zeros. The shift is free: its authors take 3 for clips of 480p and 5 for 720p."""
    return TrainingRecipe(text={"max_length": _IMAGE_TO_VIDEO_TEXT, "pad_to": _IMAGE_TO_VIDEO_TEXT})


def _published(index: Json, fields: Json) -> PublishedUse:
    """As WanPipeline is called by default, but for Wan2.2: TI2V-5B, whose latents have 48 channels, has a size of its
    own, and A14B the steps and the guidance of its authors, for high and for low noise (wan/configs/wan_t2v_A14B.py and
    wan_i2v_A14B.py of Wan-Video/Wan2.2), where the pipeline's are 50 and 5 for both."""
    from_image = fields["in_channels"] > fields["out_channels"]
    experts = bool((index.get("transformer_2") or [None])[0])
    size: dict[str, object] = {"frames": 81, "height": 480, "width": 832, "fps": 16.0}
    if fields["out_channels"] == 48:
        size = {"frames": 121, "height": 704, "width": 1280, "fps": 24.0}
    dit = {"first_frame": "channels"} if from_image else {}
    steps: dict[str, object] = {"steps": 50, "guidance_scale": 5.0}
    if experts:
        high, low = (3.5, 3.5) if from_image else (4.0, 3.0)
        steps = {"steps": 40, "guidance_scale": high, "guidance_scale_2": low}
    return PublishedUse(
        clips={**size, **steps},
        dit=dit | ({"expert": "high"} if experts else {}),
        first_frame=bool(index.get("expand_timesteps")),
    )


def _parity_inputs(config: WanConfig, sample: ParitySample) -> dict[str, Tensor]:
    inputs = {
        "hidden_states": sample.latent[None],
        "timestep": sample.timestep,
        "encoder_hidden_states": sample.text[None],
    }
    if sample.clean_frames:  # a time for each token
        t, h, w = config.patch
        times = sample.timestep.expand(sample.latent[0, ::t, ::h, ::w].shape).clone()
        first = sample.conditions.first_times
        times[: sample.clean_frames] = 0 if first is None else first
        inputs["timestep"] = times.reshape(1, -1)
    if sample.conditions.image is not None:
        pictures = 2 if config.takes_last_frame else 1
        inputs["encoder_hidden_states_image"] = sample.conditions.image.unflatten(0, (pictures, -1))
    return inputs


def _export_notes(config: WanConfig, pad_to: int) -> list[str]:
    """How the pipeline is given the text conditioning of the training; it pads prompts with zeros."""
    if config.image_dim:
        if pad_to == _IMAGE_TO_VIDEO_TEXT:
            return []
        return [
            f"WanImageToVideoPipeline counts {_IMAGE_TO_VIDEO_TEXT} rows of text, and this run trained with "
            f"model.text.pad_to {pad_to}: its clips differ from those of `heddle sample`."
        ]
    if pad_to:
        return [
            f"WanPipeline pads prompts with zeros; pass max_sequence_length={pad_to} for the conditioning of the "
            f"training."
        ]
    return [
        "this run trained without padding, and WanPipeline pads the prompt and the negative prompt with zeros: "
        "pass prompt_embeds and negative_prompt_embeds instead, each the text encoder's output for the tokens of "
        "that prompt alone."
    ]


_ORIGINAL_LAYERS = {  # of a block: ours -> those of its own code
    "attn1.to_q": "self_attn.q",
    "attn1.to_k": "self_attn.k",
    "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o",
    "attn2.to_q": "cross_attn.q",
    "attn2.to_k": "cross_attn.k",
    "attn2.to_v": "cross_attn.v",
    "attn2.to_out.0": "cross_attn.o",
    "attn2.add_k_proj": "cross_attn.k_img",
    "attn2.add_v_proj": "cross_attn.v_img",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}


_VAE_OF_5B = {  # TI2V-5B's, but for the mean and deviation of its latents: nothing is computed with these fields
    **{"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True},
    **{"in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16},
    **{"latents_mean": [0.0] * 48, "latents_std": [1.0] * 48},
}


def _published_vae(config: DiTConfig) -> Json:
    return _VAE_OF_5B if config.out_channels == _VAE_OF_5B["z_dim"] else {}


FAMILY = Family(
    config=WanConfig,
    model=_model,
    diffusers_class="WanTransformer3DModel",
    authors_class="WanModel",
    pipeline_class=_pipeline_class,
    first_frame=_first_frame,
    surplus=("norm_added_q",),  # of older image-to-video folders; no code has ever read it
    vae=VAEClass(name="AutoencoderKLWan", cuts_patches=True, numbers=_vae_numbers, runs=_vae),
    key_map={
        "num_layers": "num_layers",
        "num_heads": "num_attention_heads",
        "head_dim": "attention_head_dim",
        "ffn_dim": "ffn_dim",
        "freq_dim": "freq_dim",
        "text_dim": "text_dim",
        "in_channels": "in_channels",
        "out_channels": "out_channels",
        "cross_attn_norm": "cross_attn_norm",
        "eps": "eps",
    },
    class_defaults={
        "patch_size": (1, 2, 2),
        "num_attention_heads": 40,
        "attention_head_dim": 128,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": 13824,
        "num_layers": 40,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-06,
        "rope_max_seq_len": 1024,
    },
    fixed_fields={"qk_norm": "rms_norm_across_heads"},
    read_rest=_read_rest,
    write_rest=_write_rest,
    published_heads={"wan2.1-1.3b": 12, "wan2.1-14b": 40},
    converter="convert_wan_transformer_to_diffusers",
    lora_names=LoraNames(
        blocks=("blocks.",),
        projections=("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj", "net.0.proj", "net.2"),
        original={f"blocks.*.{ours}": f"blocks.*.{theirs}" for ours, theirs in _ORIGINAL_LAYERS.items()},
    ),
    scheduler=_scheduler,
    whole_times=True,
    passes_sigmas=False,
    schedulers=("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler"),
    parts=PublishedParts(text={"text_encoder": UMT5_XXL}, vae=_published_vae),
    published=_published,
    recipe=_recipe,
    parity_inputs=_parity_inputs,
    parity_text=lambda config: _IMAGE_TO_VIDEO_TEXT if config.image_dim else 7,
    index=lambda flow, empty: {"expand_timesteps": True} if flow.first_frame else {},
    kept_in_index=("expand_timesteps",),
    export_notes=_export_notes,
)
