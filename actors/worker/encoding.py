"""Encode cascades: captions and clips are dealt out to the members of a bag, encoded in parts, shared and delivered.

Every member calls the same function with the same samples and ends with all results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from actors.messages import CascadeTask
from actors.worker.executor import Executor
from actors.worker.handoff import EncodeResult
from actors.worker.loading import EncoderSet
from ops.comm.collectives import Group
from ops.comm.units import share_units
from ops.flow.noise import NoiseKey, ScaledNoise
from ops.flow.objective import draw_picture_sigma
from ops.models.base.tiles import VAE_BATCH_PIXELS, Tile, clips_at_once
from ops.models.base.vae import latents_of
from ops.models.first_frame import FirstFrame
from ops.models.vae import clip_groups
from ops.packed.patches import patchify
from ops.packed.uploads import upload

if TYPE_CHECKING:
    from ops.config import PictureNoise
    from ops.models.text import TextEncoder


Encoded = Callable[[CascadeTask, list[EncodeResult]], None]


def nobody(task: CascadeTask, results: list[EncodeResult]) -> None:
    """No cache is kept: the encode results go to their DiT cascades alone."""


class Encoding:
    """The encode cascades of one worker, and where their results go."""

    def __init__(self, executor: Executor, on_encoded: Encoded = nobody) -> None:
        """`on_encoded` is called with the results of each encode cascade that this worker leads."""
        self.executor, self._on_encoded = executor, on_encoded

    def text(
        self,
        task: CascadeTask,
        captions: Sequence[str],
        pictures: Sequence[np.ndarray] = (),
        ok: Sequence[bool] = (),
    ) -> list[EncodeResult]:
        """Encode the captions of the task's samples; with the first frames of their clips (uint8 [H, W, 3]) for an
        encoder that sees them, of which `ok` says whether they were decoded."""
        executor = self.executor
        executor.ready(task)  # what that takes is no part of the cascade
        with executor.cascade(task) as measure:
            group = measure.meet()
            rows = encode_texts(executor.modules.text, captions, group, measure, executor.device, pictures)
            return self._deliver(task, rows, ok or [True] * len(rows))

    def vae(self, task: CascadeTask, video: np.ndarray | Tensor, ok: Sequence[bool]) -> list[EncodeResult]:
        """Encode pixels (uint8 [B, T, H, W, 3], the task's samples in order)."""
        executor = self.executor
        executor.ready(task)
        with executor.cascade(task) as measure:
            pixels, group = video if isinstance(video, Tensor) else torch.from_numpy(video), measure.meet()
            seen = [(one.step, one.key) for one in task.samples]
            noise = picture_noise(executor.train.picture_noise, executor.train.seed, seen)
            rows = encode_clips(executor.modules, executor.frame, pixels, group, measure, executor.device, noise)
            return self._deliver(task, rows, ok)

    def _deliver(self, task: CascadeTask, rows: Sequence[Tensor], ok: Sequence[bool]) -> list[EncodeResult]:
        """Keeps and publishes the results that the task names. Returns the published ones; none if their copy to the
        host has only been started."""
        executor = self.executor
        made = [EncodeResult(id=s.id, rows=rows[i], ok=bool(ok[i])) for i, s in enumerate(task.samples)]
        if executor.groups is not None and executor.groups.rank == task.bag[0]:
            self._on_encoded(task, made)
        kept = [made[i] for i in task.keep]
        if (outlasting := executor.own_outlasting()) is not None:
            outlasting.kept = kept
        else:
            for result in kept:
                executor.store.keep(task.module, result)
        published = [made[i] for i in task.publish]
        if executor.copies is None:
            return [replace(result, rows=result.rows.cpu()) for result in published]
        if published:
            executor.copies.start((task.generation, task.cascade), published)
        return []


class EncodeMeasure(Protocol):
    """What times a cascade, and repeats it in parts where memory is short."""

    def phase(self, name: str) -> None: ...

    def in_parts(self, encode: Callable[[range], list[Tensor]], samples: range) -> list[Tensor]: ...


class NoMeasure:
    """Where no cascade of a run is timed. A lack of memory is no reason to encode in parts."""

    def phase(self, name: str) -> None: ...

    def in_parts(self, encode: Callable[[range], list[Tensor]], samples: range) -> list[Tensor]:
        return encode(samples) if len(samples) else []


def picture_noise(law: PictureNoise | None, seed: int, samples: Sequence[tuple[int, str]]) -> list[ScaledNoise]:
    """What the VAE sees on the picture of each sample (step, key); nothing where pictures get no noise."""
    if law is None:
        return []
    return [
        ScaledNoise(draw_picture_sigma(law, seed, step, key), NoiseKey.of(seed, step, f"picture of {key}"))
        for step, key in samples
    ]


def encode_texts(
    encoder: TextEncoder,
    captions: Sequence[str],
    group: Group,
    measure: EncodeMeasure,
    device: torch.device,
    pictures: Sequence[np.ndarray],
) -> list[Tensor]:
    """[text tokens, E] of each caption, and of its clip's first frame for an encoder that sees it. They are dealt round
    robin."""

    def encode(part: range) -> list[Tensor]:
        texts = [captions[i] for i in part]
        return encoder.encode(texts, [pictures[i] for i in part]) if pictures else encoder.encode(texts)

    mine = range(group.rank, len(captions), group.size)
    measure.phase("encode")
    with torch.no_grad():
        rows = measure.in_parts(encode, mine)
    found = dict(zip(mine, rows, strict=True))
    if group.size > 1:
        measure.phase("handoff")
        found = share_units(found, len(captions), group, device)
    # fp32 whatever the encoder computes in: bf16 does not become NumPy, and all ways of a result give the same
    return [found[i].float() for i in range(len(captions))]


def encode_clips(
    modules: EncoderSet,
    frame: FirstFrame,
    pixels: Tensor,
    group: Group,
    measure: EncodeMeasure,
    device: torch.device,
    noise: Sequence[ScaledNoise] = (),
    *,
    batch_pixels: int = VAE_BATCH_PIXELS,
) -> list[Tensor]:
    """[tokens + tail, P] of each clip of uint8 [B, T, H, W, 3]. A worker alone encodes clips of up to `batch_pixels`
    together.

    Where the transformer gets first frames, these are encoded here, too, and stand in the same rows; `noise` is added
    to what the VAE sees of them.
    """
    measure.phase("encode")
    if group.size == 1:
        rows = _alone(modules, frame, pixels, noise, measure, device, batch_pixels)
    else:
        rows = _together(modules, frame, pixels, noise, group, measure, device)
    if not frame.tail:
        return rows
    at_once = clips_at_once(*pixels.shape[1:4], batch_pixels=batch_pixels)
    pictures = _images(modules, frame.pictures(pixels), at_once, group, measure, device)
    each = len(pictures) // len(rows)
    images = [torch.cat(pictures[i * each : (i + 1) * each]) for i in range(len(rows))]
    return [frame.packed(clip, image) for clip, image in zip(rows, images, strict=True)]


def _alone(
    modules: EncoderSet,
    frame: FirstFrame,
    pixels: Tensor,
    noise: Sequence[ScaledNoise],
    measure: EncodeMeasure,
    device: torch.device,
    batch_pixels: int,
) -> list[Tensor]:
    """[tokens, P] of each clip, some clips at a time."""

    def encode(part: range) -> list[Tensor]:
        clips = slice(part.start, part.stop)
        latents = latents_of(modules.vae, frame, upload([pixels[clips]], device)[0], noise[clips])
        return [patchify(latent.float(), modules.geometry.patch) for latent in latents]

    parts = clip_groups(len(pixels), *pixels.shape[1:4], batch_pixels=batch_pixels)
    return [rows for part in parts for rows in measure.in_parts(encode, part)]


@torch.no_grad()
def _together(
    modules: EncoderSet,
    frame: FirstFrame,
    pixels: Tensor,
    noise: Sequence[ScaledNoise],
    group: Group,
    measure: EncodeMeasure,
    device: torch.device,
) -> list[Tensor]:
    """[tokens, P] of each clip, encoded by a bag, which deals out the tiles of all clips. A rank uploads a clip once,
    if it has a tile of it."""
    vae, (frames, height, width) = modules.vae, pixels.shape[1:4]
    shapes = [(frames, height, width)]
    if frame.is_told:
        shapes.append((frame.still_frames(frames), height, width))
    units = [(which, tile) for which, shape in enumerate(shapes) for tile in vae.plan_tiles(*shape)]
    found: dict[int, Tensor] = {}
    for clip in range(len(pixels)):
        first = clip * len(units)
        mine = [n for n in range(len(units)) if (first + n) % group.size == group.rank]
        if not mine:
            continue
        (whole,) = upload([pixels[clip : clip + 1]], device)
        seen = [whole, frame.still(whole, noise[clip : clip + 1])] if frame.is_told else [whole]
        for n in mine:
            which, tile = units[n]
            found[first + n] = vae.encode_tile(seen[which], tile)
        del whole, seen
    measure.phase("handoff")
    found = share_units(found, len(units) * len(pixels), group, device)
    rows = []
    for clip in range(len(pixels)):
        parts: list[list[tuple[Tile, Tensor]]] = [[] for _ in shapes]
        for n, (which, tile) in enumerate(units):
            parts[which].append((tile, found[clip * len(units) + n]))
        latents = [vae.blend(tiles, shape)[0] for tiles, shape in zip(parts, shapes, strict=True)]
        joined = frame.joined(*latents) if frame.is_told else latents[0]
        rows.append(patchify(joined.float(), modules.geometry.patch))
    return rows


def _images(
    modules: EncoderSet, pictures: Tensor, at_once: int, group: Group, measure: EncodeMeasure, device: torch.device
) -> list[Tensor]:
    """[tokens, dim] of each picture of [B, H, W, 3]. They are dealt round robin, and encoded some at a time."""
    encoder = modules.image
    assert encoder is not None
    measure.phase("encode")
    mine = range(group.rank, len(pictures), group.size)
    parts = [mine[start : start + at_once] for start in range(0, len(mine), at_once)]
    rows = [row for part in parts for row in encoder.encode(pictures[list(part)])]
    found = dict(zip(mine, rows, strict=True))
    if group.size > 1:
        measure.phase("handoff")
        found = share_units(found, len(pictures), group, device)
    return [found[i] for i in range(len(pictures))]
