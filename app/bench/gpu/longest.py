"""The longest sequence that a training step holds, with and without the fused ops (AdaptiveLoad, Table 1).

Batches and lengths as there: three clips of 1,600 tokens for each latent frame, 48,000 tokens at 233 frames. A model of
14B does not fit one GPU, so as many of its blocks are trained as do, the same number for both.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from app.bench.gpu.measurement import Earlier, NamedFigures, Place, RunsAnywhere
from app.bench.gpu.models import WAN_14B, PackedCall
from app.bench.gpu.train_step import AS_TRAINED, fused_ops, make_trained, step_config, step_over
from ops.models.base.config import DiTConfig
from ops.packed.packing import Sequence

PER_FRAME = (40, 40)  # tokens of a latent frame
TEXT = 512
PUBLISHED = 30  # latent frames of 48,000 tokens
MOST = 240
CLIPS = (3, 1)  # as published; one where not even a block fits with three
ROOM = 0.7  # of the free memory; the ops without fusion keep more for the backward than the memory model counts


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestSequence(RunsAnywhere):
    """Seconds of a step of the published length, and the longest one before memory runs out."""

    fused: bool
    estimate_s: float = 270.0

    @property
    def name(self) -> str:
        return f"longest.wan-14b.{'fused' if self.fused else 'unfused'}"

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        settings = replace(AS_TRAINED, fused=self.fused)
        count, config = fitting(place)
        dit, sync = make_trained(config, settings, place)

        def step_of(frames: int) -> Callable[[], object]:
            call = PackedCall.of(config, clips(place, count, frames), place.device)
            return step_over(dit, sync, call)

        def fits(frames: int) -> bool:
            try:
                step_of(frames)()
                place.synchronize()
            except torch.OutOfMemoryError:
                return False
            finally:
                gc.collect()
                if place.device.type == "cuda":
                    torch.cuda.empty_cache()
            return True

        published, most = place.pick(PUBLISHED, 1), place.pick(MOST, 2)
        with fused_ops(self.fused):
            longest = largest(fits, most)
            seconds = None if longest < published else place.seconds(step_of(published), place.pick(3, 1)).seconds
            peak = place.peak_gib(step_of(longest)) if longest else None
        height, width = PER_FRAME
        return {
            "blocks": config.num_layers,
            "clips": count,
            "seconds": seconds,
            "longest tokens": longest * height * width,
            "peak GiB": peak,
        }


def clips(place: Place, count: int, frames: int) -> list[Sequence]:
    return [place.pick(Sequence((frames, *PER_FRAME), TEXT), Sequence((frames, 2, 2), 5))] * count


def fitting(place: Place) -> tuple[int, DiTConfig]:
    """Clips of a step and the model: its blocks for which the published length has room. Raises RuntimeError if no
    block has."""
    for count in CLIPS:
        try:
            return count, step_config(WAN_14B, AS_TRAINED, place, clips(place, count, PUBLISHED), ROOM)
        except RuntimeError:
            if count == CLIPS[-1]:
                raise
    raise AssertionError("the last number of clips returns or raises")


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, where all smaller ones do; 0 if none does. Few calls that fail."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def measurements() -> list[LongestSequence]:
    return [LongestSequence(fused=False), LongestSequence(fused=True)]
