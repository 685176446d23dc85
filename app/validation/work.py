"""The loss of held-out clips at a checkpoint, computed by a worker of the run (`actors.worker.aside`) with its own
modules.

Each clip is encoded once, and its loss taken at some noise levels, which are drawn by its key as in training: the same
levels and the same noise every time, so that two checkpoints differ by their weights alone. A worker computes a clip
alone, whatever degree training has for it. Where it has no memory for one, the clip's bucket is left out as a whole, so
that the mean of a bucket is always that of the same clips.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from actors.aside_turns import MORE_ROOM, WAITS, NoMoreRoom
from actors.config import TrainConfig
from actors.feed.item_cache import KINDS, ItemCache
from actors.plan.types import Module
from actors.worker.aside import with_room
from actors.worker.encoding import NoMeasure, encode_clips, encode_texts, picture_noise
from actors.worker.loading import Modules
from actors.worker.meter import ran_out, release
from actors.worker.passes import clean_frames, compute_dtype, conditions_of, pass_settings
from app.sampling.live_clip import weights_of
from app.validation.clips import SEED, HeldOutClip
from data.cache import Cache
from data.config import CacheConfig
from data.engines.child import DecodeProcess, DecoderDied, DecoderHung
from data.ledger import BadSample
from data.types import Batch
from ops.comm.collectives import Group
from ops.config import TIMES
from ops.flow.objective import draw_expert
from ops.flow.sampling import evaluating
from ops.flow.train_pass import PassClip, held_out_pass
from ops.models.experts import transformers
from ops.models.first_frame import FirstFrame
from ops.models.text_pair import split
from ops.packed.conditions import Conditions
from ops.packed.packing import Layout
from ops.packed.packing import Sequence as PackedSequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipLoss:
    """The loss of one clip at one noise level."""

    bucket: str
    noise: float  # its level, from 0 to 1
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipLosses:
    """Losses of some clips. A bucket that is left out has none of them, and no clip that counts as unread."""

    losses: tuple[ClipLoss, ...]
    unread: tuple[str, ...] = ()  # the buckets of clips that could not be decoded
    no_room: Mapping[str, str] = field(default_factory=dict)  # bucket -> what the device said when it had no memory

    @staticmethod
    def together(parts: Sequence[ClipLosses], no_room: Mapping[str, str]) -> ClipLosses:
        """The losses of all parts; buckets that one part leaves out, or that `no_room` has, are left out of all."""
        left_out = dict(no_room)
        for part in parts:
            left_out = {**part.no_room, **left_out}
        return ClipLosses(
            losses=tuple(one for part in parts for one in part.losses if one.bucket not in left_out),
            unread=tuple(bucket for part in parts for bucket in part.unread if bucket not in left_out),
            no_room=left_out,
        )


def nobody_else(piece: str) -> None:
    """`before` where no run goes on beside: a device holds no weights but those of the clips."""
    if piece == MORE_ROOM:
        raise NoMoreRoom


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptClips:
    """Where the encode results of held-out clips are, of a run that takes its own from a cache."""

    cache: CacheConfig
    modules: tuple[Module, ...]  # of whose results it has all
    shapes: Mapping[tuple[Module, str], tuple[range, int]]  # rows and their numbers, of a module and a bucket
    spares_pixels: bool  # nothing is made of them

    @staticmethod
    def over(cache: ItemCache, clips: Sequence[HeldOutClip], modules: tuple[Module, ...]) -> KeptClips:
        """Where the results of these clips are."""
        buckets = {clip.bucket: clip.job.bucket for clip in clips}
        shapes = {(module, name): cache.shape(module, one) for name, one in buckets.items() for module in modules}
        spared = all(module in modules for module in cache.encoders.see_pixels)
        return KeptClips(cache=cache.cache.config, modules=modules, shapes=shapes, spares_pixels=spared)

    def of(self, clip: HeldOutClip) -> dict[Module, Tensor]:
        """The results of a clip. Raises BadSample where one is missing, DataIOError where storage fails."""
        assert clip.kept is not None, "it was named when the clips were found"
        store, found = Cache(self.cache), dict[Module, Tensor]()
        for module in self.modules:
            (name,) = clip.kept.of(module)
            found[module] = torch.from_numpy(store.take(KINDS[module], name, *self.shapes[module, clip.bucket]))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutPart:
    """Some held-out clips, and how their losses are taken."""

    train: TrainConfig
    draws: int  # noise levels of each clip
    timeout_s: float  # of the decoder, for one clip
    clips: tuple[HeldOutClip, ...]
    kept: KeptClips | None = None  # of a run that takes its own results from a cache

    def run(self, modules: Modules, device: torch.device, before: Callable[[str], None] = nobody_else) -> ClipLosses:
        """Clips are decoded in a process of their own while others are computed; what is not decoded by then is waited
        for between two pieces. Raises DataIOError where storage fails."""
        found: list[ClipLoss] = []
        unread: list[str] = []
        no_room: dict[str, str] = {}
        with closing(self._decoded(before)) as decoded:
            for clip, batch in decoded:
                if clip.bucket in no_room:
                    continue
                if batch is None or not batch.ok[0]:
                    unread.append(clip.bucket)
                    continue
                try:
                    kept = self.kept.of(clip) if self.kept is not None else {}
                except BadSample as error:
                    log.warning("a held-out clip of %s is left out: %s", clip.bucket, error)
                    unread.append(clip.bucket)
                    continue
                try:
                    found += with_room(partial(self._losses, clip, batch, kept, modules, device, before), before)
                except Exception as error:
                    if not ran_out(error):
                        raise
                    release(error)
                    no_room[clip.bucket] = " ".join(str(error).split())[:300]
                    log.warning("held-out clips of %s are left out: %s", clip.bucket, no_room[clip.bucket])
        done = ClipLosses(losses=tuple(found), unread=tuple(unread), no_room=no_room)
        return ClipLosses.together([done], {})

    def _losses(
        self,
        clip: HeldOutClip,
        batch: Batch,
        kept: Mapping[Module, Tensor],
        modules: Modules,
        device: torch.device,
        before: Callable[[str], None],
    ) -> list[ClipLoss]:
        """The losses of one clip, in pieces of an aside."""
        before(f"encode {clip.bucket}")
        encoded, found = _EncodedClip.of(clip, batch, kept, modules, self.train, device), []
        for draw in range(self.draws):
            before(f"loss {clip.bucket}")
            found.append(encoded.loss(draw))
        return found

    @property
    def _needs_pixels(self) -> bool:
        return self.kept is None or not self.kept.spares_pixels

    def _decoded(self, before: Callable[[str], None]) -> Generator[tuple[HeldOutClip, Batch | None]]:
        """Each clip with its pixels and caption, or None where that ended the decoder; the one after it is decoded
        meanwhile."""
        with DecodeProcess() as process, ThreadPoolExecutor(1) as ahead:

            def decode(clip: HeldOutClip) -> Batch | None:
                job = clip.job if self._needs_pixels else replace(clip.job, pixels=False)
                try:
                    return process.decode(job, self.timeout_s)
                except (DecoderDied, DecoderHung):
                    return None

            coming = ahead.submit(decode, self.clips[0])
            try:
                for clip, later in zip(self.clips, (*self.clips[1:], None), strict=True):
                    if not coming.done():
                        before(WAITS)  # for seconds, or for all that a clip which hangs the decoder may take
                    batch = coming.result()
                    if later is not None:
                        coming = ahead.submit(decode, later)
                    yield clip, batch
            finally:
                process.abandon()  # after a failure the clip ahead may hang it, and a turn waits for this thread


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutWork:
    """A `HeldOutPart` at a checkpoint of a live run, as an aside."""

    folder: str  # of the checkpoint; "": the weights that the run begins with
    step: int
    round: int  # of the run: a checkpoint that is made again has another one
    number: int  # among those of the round
    part: HeldOutPart

    @property
    def name(self) -> str:
        return f"step-{self.step} held out {self.number} of round {self.round}"

    def weights(self, modules: Modules) -> Mapping[str, Tensor]:
        """The EMA of the checkpoint where it has one, or the first weights. Raises what `weights_of` raises."""
        return weights_of(self.folder, modules, self.part.train)

    def make(self, modules: Modules, device: torch.device, before: Callable[[str], None]) -> ClipLosses:
        """Raises what `HeldOutPart.run` raises."""
        return self.part.run(modules, device, before)


@dataclass(frozen=True, kw_only=True, slots=True)
class _EncodedClip:
    """A clip as the transformer gets it, but for noise."""

    clip: HeldOutClip
    modules: Modules
    train: TrainConfig
    device: torch.device
    grid: tuple[int, int, int]
    rows: Tensor  # [tokens, P]
    text: Tensor  # [text tokens, E]
    conditions: Conditions

    @staticmethod
    @torch.no_grad()
    def of(
        clip: HeldOutClip,
        batch: Batch,
        kept: Mapping[Module, Tensor],
        modules: Modules,
        train: TrainConfig,
        device: torch.device,
    ) -> _EncodedClip:
        """Encode pixels (uint8 [1, T, H, W, 3]) and caption of the batch, as far as they are not `kept`."""
        frame, solo, measure = FirstFrame.of(modules.config), Group.solo(), NoMeasure()
        dtype = compute_dtype(modules.dit)
        if (text := kept.get("text")) is None:
            seen = [batch.video[0, 0]] if modules.config.text.sees_picture else []
            (text,) = encode_texts(modules.text, batch.captions, solo, measure, device, seen)
        if (rows := kept.get("vae")) is None:
            noise = picture_noise(train.picture_noise, SEED, [(0, clip.key)])
            (rows,) = encode_clips(modules, frame, torch.from_numpy(batch.video), solo, measure, device, noise)
        (text,), pooled = split([text.to(device, dtype)], modules.config.text)
        rows = rows.to(device, dtype)
        grid = modules.geometry.token_grid(*clip.job.shape[1:4])
        tokens = math.prod(grid)
        return _EncodedClip(
            clip=clip,
            modules=modules,
            train=train,
            device=device,
            grid=grid,
            rows=rows[:tokens],
            text=text,
            conditions=conditions_of(frame, [rows[tokens:]], pooled),
        )

    def loss(self, draw: int) -> ClipLoss:
        """The loss at the noise level of this draw, by the expert that it falls to."""
        model, flow, key = self.modules.config, self.train.flow, self.clip.key
        frame = FirstFrame.of(model)
        clean = clean_frames(frame, flow, SEED, draw, key, self.grid)
        rate, images = self.clip.own_rate, frame.image_tokens
        sequence = PackedSequence(self.grid, len(self.text), images, clean, rate, flow.by_frame)
        experts = [expert.sigmas for expert in model.dit.experts]
        expert = draw_expert(flow, SEED, draw, key, sequence.tokens, experts)
        dit = transformers(self.modules.dit)[expert]
        with evaluating(dit):
            (found,) = held_out_pass(
                dit,
                [PassClip(rows=self.rows, text=self.text, key=key, weight=1.0)],
                Layout([sequence], 1, 0, self.device, in_halves=model.dit.in_halves),
                Group.solo(),
                pass_settings(self.modules, self.train, expert, SEED, draw),
                self.conditions,
            )
        noise = found.level if model.dit.diffusion is None else found.level / TIMES
        return ClipLoss(bucket=self.clip.bucket, noise=noise, loss=found.loss)
