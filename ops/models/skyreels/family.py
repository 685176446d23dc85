"""SkyReels-V2 (arXiv 2504.13074): Diffusers' names and numbers, and how it differs from Wan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ops.config import ForcingSchedule
from ops.models.base.family import Json, ParitySample, PublishedUse
from ops.models.skyreels.config import FORCING, RATES, SkyReelsConfig
from ops.models.wan.family import FAMILY as WAN

if TYPE_CHECKING:
    from torch import Tensor, nn


def _model() -> type[nn.Module]:
    from ops.models.skyreels.model import SkyReelsDiT

    return SkyReelsDiT


def _pipeline_class(config: SkyReelsConfig) -> str:
    if config.first_frame != "none":
        return "SkyReelsV2ImageToVideoPipeline"
    # the pipeline of plain text to video gives no frame rate
    return f"SkyReelsV2{FORCING}Pipeline" if config.diffusion_forcing or config.sample_info else "SkyReelsV2Pipeline"


def _published(index: Json, fields: Json) -> PublishedUse:
    """As its pipelines are called by default, with 97 frames of 544 x 960 at 24 frames per second, and guidance of 5
    for image to video, as their examples have it. (Its authors make 121 frames of 720 x 1280 with weights for 720P.)"""
    from_image, forced = fields["in_channels"] > fields["out_channels"], FORCING in str(index.get("_class_name"))
    size: dict[str, object] = {"frames": 97, "height": 544, "width": 960, "fps": 24.0}
    steps: dict[str, object] = {"steps": 50, "guidance_scale": 5.0 if from_image else 6.0}
    return PublishedUse(
        clips={**size, **steps, **({"forcing": ForcingSchedule()} if forced else {})},
        dit={"first_frame": "channels"} if from_image else {},
        first_frame=forced,
    )


def _parity_inputs(config: SkyReelsConfig, sample: ParitySample) -> dict[str, Tensor]:
    """Wan's, with a time for each latent frame where there are clean ones or the weights are for diffusion forcing."""
    inputs: dict[str, object] = dict(WAN.parity_inputs(config, replace(sample, clean_frames=0)))
    if sample.clean_frames or config.diffusion_forcing:
        times = sample.timestep.expand(sample.latent.shape[1] // config.patch[0]).clone()
        first = sample.conditions.first_times
        times[: sample.clean_frames] = 0 if first is None else first
        inputs |= {"timestep": times[None], "enable_diffusion_forcing": True}
    if config.sample_info:
        inputs["fps"] = [int(config.frame_rate > sum(RATES) / 2)]
    return inputs  # type: ignore[return-value]  # two of its arguments are no tensors


def _export_notes(config: SkyReelsConfig, pad_to: int) -> list[str]:
    """Wan's, by the names of its own pipelines."""
    own, of_wan = _pipeline_class(config), "WanPipeline" if config.first_frame == "none" else "WanImageToVideoPipeline"
    return [note.replace(of_wan, own) for note in WAN.export_notes(config, pad_to)]


FAMILY = replace(
    WAN,
    config=SkyReelsConfig,
    model=_model,
    diffusers_class="SkyReelsV2Transformer3DModel",
    authors_class="WanModel",
    pipeline_class=_pipeline_class,
    key_map={**WAN.key_map, "sample_info": "inject_sample_info"},
    class_defaults={
        **WAN.class_defaults,
        "num_attention_heads": 16,
        "ffn_dim": 8192,
        "num_layers": 32,
        "inject_sample_info": False,
        "num_frame_per_block": 1,
    },
    # attention by blocks of frames, which no published weights were saved with
    fixed_fields={**WAN.fixed_fields, "num_frame_per_block": 1},
    published_heads={},
    converted={"fps_projection.0.": "fps_projection.net.0.proj.", "fps_projection.2.": "fps_projection.net.2."},
    published=_published,
    parity_inputs=_parity_inputs,
    index=lambda flow, empty: {},
    export_notes=_export_notes,
)
