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
from actors.worker.executor import CascadeMeasure, Executor
from actors.worker.handoff import EncodeResult
from actors.worker.loading import Modules
from ops.comm import Group
from ops.models.first_frame import FirstFrame
from ops.packing import patchify
from ops.units import share_units

if TYPE_CHECKING:
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
        with CascadeMeasure(executor, task) as measure:
            group = measure.meet()
            rows = encode_texts(executor.modules.text, captions, group, measure, executor.device, pictures)
            return self._deliver(task, rows, ok or [True] * len(rows))

    def vae(self, task: CascadeTask, video: np.ndarray | Tensor, ok: Sequence[bool]) -> list[EncodeResult]:
        """Encode pixels (uint8 [B, T, H, W, 3], the task's samples in order)."""
        executor = self.executor
        with CascadeMeasure(executor, task) as measure:
            pixels, group = video if isinstance(video, Tensor) else torch.from_numpy(video), measure.meet()
            rows = encode_clips(executor.modules, executor.frame, pixels, group, measure, executor.device)
            return self._deliver(task, rows, ok)

    def _deliver(self, task: CascadeTask, rows: Sequence[Tensor], ok: Sequence[bool]) -> list[EncodeResult]:
        """Keeps and publishes what the task asks for. Returns what is published, unless its copy has just begun."""
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


def encode_texts(
    encoder: TextEncoder,
    captions: Sequence[str],
    group: Group,
    measure: EncodeMeasure,
    device: torch.device,
    pictures: Sequence[np.ndarray] = (),
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
    # fp32 whatever the encoder computes in: bf16 does not become NumPy, and all ways of a result give the same
    found = {i: row.float() for i, row in zip(mine, rows, strict=True)}
    if group.size > 1:
        measure.phase("handoff")
        found = share_units(found, len(captions), group, device)
    return [found[i] for i in range(len(captions))]


def encode_clips(
    modules: Modules, frame: FirstFrame, pixels: Tensor, group: Group, measure: EncodeMeasure, device: torch.device
) -> list[Tensor]:
    """[tokens + tail, P] of each clip of uint8 [B, T, H, W, 3].

    Where the transformer gets first frames, these are encoded here, too, and stand in the same rows.
    """
    latents = list(_latents(modules, pixels, group, measure, device))
    if frame.is_told:
        still = list(_latents(modules, frame.still(pixels), group, measure, device))
        latents = [frame.joined(latent, told) for latent, told in zip(latents, still, strict=True)]
    rows = [patchify(latent.float(), modules.geometry.patch) for latent in latents]
    if not frame.tail:
        return rows
    images = _images(modules, pixels[:, 0], group, measure, device)
    return [frame.packed(clip, image) for clip, image in zip(rows, images, strict=True)]


def _latents(modules: Modules, pixels: Tensor, group: Group, measure: EncodeMeasure, device: torch.device) -> Tensor:
    """[B, C, t, h, w] of [B, T, H, W, 3]. A bag deals out the tiles."""
    vae, (frames, height, width) = modules.vae, pixels.shape[1:4]
    measure.phase("encode")
    with torch.no_grad():
        if group.size == 1:
            parts = measure.in_parts(
                lambda part: [vae.encode(pixels[part.start : part.stop].to(device))], range(len(pixels))
            )
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        tiles = vae.plan_tiles(frames, height, width)
        units = [(b, t) for b in range(pixels.shape[0]) for t in range(len(tiles))]
        found = {
            u: vae.encode_tile(pixels[b : b + 1].to(device), tiles[t]).float()
            for u, (b, t) in enumerate(units)
            if u % group.size == group.rank
        }
        measure.phase("handoff")
        found = share_units(found, len(units), group, device)
        shape = (frames, height, width)
        per_clip = len(tiles)
        return torch.cat(
            [
                vae.blend([(tiles[t], found[b * per_clip + t]) for t in range(per_clip)], shape)
                for b in range(pixels.shape[0])
            ]
        )


def _images(
    modules: Modules, pictures: Tensor, group: Group, measure: EncodeMeasure, device: torch.device
) -> list[Tensor]:
    """[tokens, dim] of each picture of [B, H, W, 3]. They are dealt round robin."""
    encoder = modules.image
    assert encoder is not None
    measure.phase("encode")
    mine = range(group.rank, len(pictures), group.size)
    found = dict(zip(mine, encoder.encode(pictures[list(mine)]), strict=True)) if len(mine) else {}
    if group.size > 1:
        measure.phase("handoff")
        found = share_units(found, len(pictures), group, device)
    return [found[i] for i in range(len(pictures))]
