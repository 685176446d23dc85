"""LoRA of Wan2.1-14B with the frozen weights of its blocks on the device and in host memory, from where each block is
copied (ops.models.frozen_blocks): one clip of 480p81, and one picture, whose pass is shorter than the copies.

In a rehearsal a small model, whose host memory is the device's.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import torch
from torch import nn

from app.bench.gpu.measurement import Earlier, NamedFigures, Place
from app.bench.gpu.models import CLIP_480P81, PICTURE_480P, SMALL_CLIP, WAN_14B, PackedCall, small
from app.bench.gpu.train_step import step_over
from ops.comm.collectives import Group
from ops.config import OptimizerConfig
from ops.models.base.config import DiTConfig
from ops.models.frozen_blocks import fetch_from_host, put_on_host
from ops.models.load import bare_dit
from ops.update.sync import FlatSync

_NORM_ERROR = 1e-2  # FlashAttention's backward adds in any order
_WEIGHTS_GIB = 27  # of the model, on the device


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraBlocks:
    """Seconds of a step and peak memory both ways."""

    name: str = "lora.wan-14b"
    estimate_s: float = 110.0

    def why_not(self, place: Place) -> str | None:
        if place.rehearse or torch.cuda.mem_get_info(place.device)[0] > 2 * _WEIGHTS_GIB * 2**30:
            return None
        return f"beside {_WEIGHTS_GIB} GiB of weights there is no room for a clip, with which to compare"

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        config = place.pick(replace(WAN_14B, lora_rank=16), replace(small(WAN_14B, 3), lora_rank=4))
        config = replace(config, gradient_checkpointing=True)
        clips = {"clip": place.pick(CLIP_480P81, SMALL_CLIP), "picture": place.pick(PICTURE_480P, SMALL_CLIP)}
        seconds: dict[str, float] = {}
        norms: dict[str, list[float]] = {}
        peaks: dict[str, float | None] = {}
        for way in ("on the device", "fetched"):
            dit = _made(config, place, on_host=way == "fetched")
            sync = FlatSync(dit, OptimizerConfig(learning_rate=1e-12, ema_decay=0.0), total_steps=1000)
            sync.form(Group.solo(), None)
            for what, clip in clips.items():
                torch.manual_seed(1)
                step = step_over(dit, sync, PackedCall.of(config, [clip], place.device, torch.bfloat16))
                norms.setdefault(way, []).append(step().grad_norm)
                seconds[f"{what} {way}"] = place.seconds(step, place.pick(3, 1)).seconds
                if what == "clip":
                    peaks[way] = place.peak_gib(step)
            del dit, sync, step
            gc.collect()
            if place.device.type == "cuda":
                torch.cuda.empty_cache()
        off = max(abs(one / other - 1) for one, other in zip(*norms.values(), strict=True))
        return {
            "right": off < _NORM_ERROR,
            "gradient norm off by": off,
            **{f"{what}, s": value for what, value in seconds.items()},
            **{
                f"takes more, {what}": seconds[f"{what} fetched"] / seconds[f"{what} on the device"] - 1
                for what in clips
            },
            **{f"peak GiB {way}": peak for way, peak in peaks.items()},
        }


def _made(config: DiTConfig, place: Place, on_host: bool) -> nn.Module:
    torch.manual_seed(0)  # both ways are compared
    with torch.device(place.device):
        dit = bare_dit(config).to(torch.bfloat16).train()
    if not on_host:
        return dit
    held = put_on_host(dit, config, 0, torch.bfloat16, place.device)
    return fetch_from_host(dit, held, torch.bfloat16, place.device)
