"""LoRA of Wan2.1-14B with the frozen weights of its blocks on the device and in host memory, from where each block is
copied (ops.models.frozen_blocks): one clip of 480p81, and one picture, whose pass is shorter than the copies. And the
same of few blocks that are held in 8 bits.

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
from ops.models.added_lora import NOTHING_ADDED
from ops.models.base.config import DiTConfig
from ops.models.frozen_blocks import fetch_from_host, put_on_host
from ops.models.load import bare_dit
from ops.update.sync import FlatSync

_NORM_ERROR = 1e-2  # FlashAttention's backward adds in any order
_WHOLE = replace(WAN_14B, lora_rank=16, gradient_checkpointing=True)
_FEW = replace(_WHOLE, num_layers=4, frozen_dtype="float8")  # blocks in 8 bits, of which few are as good as many


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraBlocks:
    """Seconds of a step and peak memory both ways."""

    name: str
    config: DiTConfig
    needs_gib: float
    estimate_s: float

    def why_not(self, place: Place) -> str | None:
        if place.has_gib(self.needs_gib):
            return None
        return f"{self.needs_gib:g} GiB are not free: weights are made in fp32, and a clip beside all of them compares"

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        config = place.pick(self.config, replace(small(self.config, 3), lora_rank=4))
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
                step = step_over(dit, sync, PackedCall.of(config, [clip], place.device))
                norms.setdefault(way, []).append(step().grad_norm)
                # the first step has compiled, and has met the order of the blocks
                seconds[f"{what} {way}"] = place.seconds(step, place.pick(2, 1), warm_up=0).seconds
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


def measurements() -> list[LoraBlocks]:
    """The whole model first."""
    return [
        LoraBlocks(name="lora.wan-14b", config=_WHOLE, needs_gib=58.0, estimate_s=170.0),
        LoraBlocks(name="lora.float8", config=_FEW, needs_gib=24.0, estimate_s=25.0),
    ]


def _made(config: DiTConfig, place: Place, on_host: bool) -> nn.Module:
    torch.manual_seed(0)  # both ways are compared
    with torch.device(place.device):
        dit = bare_dit(config).to(torch.bfloat16).train()
    if not on_host:
        return dit
    held = put_on_host(dit, config, 0, torch.bfloat16, place.device, [NOTHING_ADDED])
    return fetch_from_host(dit, held, torch.bfloat16, place.device)
