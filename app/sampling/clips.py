"""Clips of a trained model, and the files they become: MP4, a contact sheet, the prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from app.drawing.video import SHEET_CLIPS, contact_sheet, sheet_frames, write_mp4
from app.records.progress import ProgressBar
from app.sampling.model import Model, SavedModel, saved_model
from app.sampling.pictures import Wanted, for_each, read_picture
from app.sampling.prompts import EncodedPrompts
from app.settings.config import RunConfig
from app.settings.prompt_line import PromptLine, about_prompt, named
from ops.comm.collectives import Group
from ops.config import ForcingSchedule
from ops.counted import counted
from ops.flow.forced_sampling import sample_forced
from ops.flow.forcing import forwards
from ops.flow.noise import NoiseKey
from ops.flow.sampling import SamplerConfig, SampleRequest, sample_latents
from ops.flow.schedulers import Scheduler
from ops.geometry import Geometry
from ops.models.added_lora import LoraFile
from ops.models.base.vae import DecodeNoise
from ops.models.decoding import decode_together
from ops.models.families import FAMILIES
from ops.models.first_frame import FirstFrame
from ops.packed.patches import patchify
from ops.typed import ConfigError
from ops.whole_file import whole_file, write_whole

T = TypeVar("T")

# Clips are sampled together up to this many tokens; more only costs memory, the arithmetic is the same.
_BATCH_TOKENS = 32_768


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipChanges:
    """What a person asks for instead of the run's own settings; None leaves a setting as it is."""

    frames: int | None = None
    height: int | None = None
    width: int | None = None
    fps: float | None = None
    seed: int | None = None
    steps: int | None = None
    timesteps: tuple[float, ...] | None = None  # instead of steps
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None  # unset: a given guidance_scale is that of both experts
    flow_shift: float | None = None
    negative_prompt: str | None = None
    decode_timestep: float | None = None
    decode_noise_scale: float | None = None  # unset: as large as a given decode_timestep
    forcing: Mapping[str, float] = field(default_factory=dict)  # settings of `ForcingSchedule`, by their names
    no_forcing: bool = False  # all frames at once, whatever sample.forcing says

    @staticmethod
    def of_line(line: PromptLine) -> ClipChanges:
        """What the options of a prompt change for its clip."""
        return ClipChanges(
            frames=line.frames,
            height=line.height,
            width=line.width,
            seed=line.seed,
            steps=line.steps,
            guidance_scale=line.guidance_scale,
            flow_shift=line.flow_shift,
            negative_prompt=line.negative_prompt,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSettings:
    """Size, length, seeds and sampler of clips. `of` takes those of a run."""

    frames: int
    height: int
    width: int
    fps: float
    seed: int  # prompt number i gets seed + i, unless its line has one
    sampler: SamplerConfig
    negative_prompt: str = ""
    decode_timestep: float = 0.0
    decode_noise_scale: float | None = None  # None: as large as the time

    @staticmethod
    def of(config: RunConfig, scheduler: Scheduler | None = None) -> ClipSettings:
        """Those of a run; a published pipeline may have a `scheduler` by whose steps its clips are made."""
        sample, family = config.sample, FAMILIES[config.model.dit.architecture]
        flow = sample.flow_of(config.train.flow)
        unshifted = config.model.dit.sampled_unshifted
        sampler = SamplerConfig(
            steps=len(sample.timesteps) or sample.steps,
            timesteps=sample.timesteps,
            guidance_scale=sample.guidance_scale,
            guidance_scale_2=sample.guidance_scale_2,
            flow_shift=1.0 if unshifted else flow.flow_shift,
            token_shift=None if unshifted else flow.token_shift,
            num_train_timesteps=flow.num_train_timesteps,
            autocast=config.train.autocast == "bfloat16",
            whole_times=family.whole_times,
            spacing=config.model.dit.spacing,
            scheduler=scheduler,
            passes_sigmas=family.passes_sigmas,
            forcing=sample.forcing,
        )
        return ClipSettings(
            frames=1 if config.model.dit.images_only else sample.frames,
            height=sample.height,
            width=sample.width,
            fps=config.model.dit.clip_rate or sample.fps,
            seed=sample.seed,
            sampler=sampler,
            negative_prompt=sample.negative_prompt,
            decode_timestep=sample.decode_timestep,
            decode_noise_scale=sample.decode_noise_scale,
        )

    def changed(self, changes: ClipChanges) -> ClipSettings:
        """The same but for what `changes` gives. Raises ValueError for what cannot be sampled."""
        scheduler, shift = self.sampler.scheduler, changes.flow_shift
        if self.sampler.timesteps and shift is not None and changes.steps is None:
            raise ValueError(
                f"--flow-shift is {shift:g}, and this run's sample.timesteps are not shifted; give --steps, too, for "
                f"levels that are."
            )
        spaced = changes.timesteps is None and (changes.steps is not None or shift is not None)
        times = () if spaced else changes.timesteps
        steps = len(changes.timesteps) if changes.timesteps else changes.steps
        forcing = None if changes.no_forcing else self.sampler.forcing
        if changes.forcing:
            forcing = replace(forcing or ForcingSchedule(), **changes.forcing)  # type: ignore[arg-type]  # by their names
        sampler = replace(
            self.sampler,
            steps=_given(steps, self.sampler.steps),
            timesteps=_given(times, self.sampler.timesteps),
            guidance_scale=_given(changes.guidance_scale, self.sampler.guidance_scale),
            guidance_scale_2=changes.guidance_scale_2
            if changes.guidance_scale is not None
            else _given(changes.guidance_scale_2, self.sampler.guidance_scale_2),
            flow_shift=_given(shift, self.sampler.flow_shift),
            token_shift=self.sampler.token_shift if shift is None else None,
            scheduler=scheduler if scheduler is None or shift is None else scheduler.shifted(shift),
            forcing=forcing,
        )
        return replace(
            self,
            frames=_given(changes.frames, self.frames),
            height=_given(changes.height, self.height),
            width=_given(changes.width, self.width),
            fps=_given(changes.fps, self.fps),
            seed=_given(changes.seed, self.seed),
            negative_prompt=_given(changes.negative_prompt, self.negative_prompt),
            sampler=sampler,
            decode_timestep=_given(changes.decode_timestep, self.decode_timestep),
            decode_noise_scale=changes.decode_noise_scale
            if changes.decode_timestep is not None
            else _given(changes.decode_noise_scale, self.decode_noise_scale),
        )

    def of_each(self, prompts: Sequence[str]) -> list[ClipSettings]:
        """Those of each prompt, by the options on its line, with the seed of its own clip. Raises ConfigError, naming
        the prompt, for what cannot be sampled."""
        found = []
        for number, prompt in enumerate(prompts):
            with about_prompt(number, prompt):
                asked = PromptLine.of(prompt)
                own = self.changed(ClipChanges.of_line(asked))
            found.append(own if asked.seed is not None else replace(own, seed=self.seed + number))
        return found

    def forwards(self, geometry: Geometry) -> int:
        """How often a clip goes through the transformer with its prompt."""
        if self.sampler.forcing is None:
            return self.sampler.steps
        frames = geometry.token_grid(self.frames, self.height, self.width)[0]
        return forwards(self.sampler.forcing, frames, geometry.vae_stride[0], self.sampler.steps)

    @property
    def work(self) -> float:
        """What a clip costs, for comparison with another one of the same model: pixels times forwards."""
        passes = self.sampler.steps * (2 if self.sampler.is_guided else 1)
        return float(self.frames * self.height * self.width * passes)

    def decode_noise(self, seed: int) -> DecodeNoise:
        """What a decoder that takes some gets for the clip of this seed."""
        share = _given(self.decode_noise_scale, self.decode_timestep)
        return DecodeNoise(time=self.decode_timestep, share=share, key=NoiseKey.of(seed, 0, "decode"))


def _given(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipOrder:
    """All that clips are made from; `config` is the run's with its model resolved. Paths are absolute."""

    checkpoint: Path
    other: Path | None
    loras: tuple[LoraFile, ...]
    ema: bool
    prompts: tuple[str, ...]  # with the options on their lines
    first: tuple[np.ndarray | None, ...]  # the `first_frames`
    settings: ClipSettings
    config: RunConfig
    geometry: Geometry


Crew = Callable[[ClipOrder], list[Path]]  # returns the files that it has written


def batch_limit(settings: ClipSettings, geometry: Geometry) -> int:
    """Clips that are sampled together. Raises ValueError for a size that the model cannot make."""
    return max(1, _BATCH_TOKENS // geometry.tokens(settings.frames, settings.height, settings.width))


def first_frames(
    config: RunConfig,
    prompts: Sequence[str],
    settings: ClipSettings,
    images: Sequence[str | Path] = (),
    option: str = "",
    last_images: Sequence[str | Path] = (),
) -> list[np.ndarray | None]:
    """The pictures that each clip is made from, for a transformer that takes some: uint8 [1, height, width, 3], or [2,
    ...] with the last frame, for one that takes that, too; None for a prompt without, where it need not have one. Else
    nothing.

    A prompt's own ones come first (--i and --ei on its line). `images` were given by `option`, `last_images` by its
    double for last frames; without them those of the run's config are used. Raises ConfigError where there are none,
    where the transformer takes none, and for broken ones.
    """
    sample, dit, lines = config.sample, config.model.dit, [PromptLine.of(prompt) for prompt in prompts]
    if last_images and not dit.takes_last_frame:
        raise ConfigError("--last-image is given, but this transformer takes no last frame; leave it out.")
    for number, line in enumerate(lines):
        if line.last_image and not dit.takes_last_frame:
            said = named(number, prompts[number])
            raise ConfigError(f"{said} has --ei, and this transformer takes no last frame; leave it out.")
    may, own = dit.frame_times and config.train.flow.knows_given_frames, any(line.image for line in lines)
    if not dit.starts_from_image and not (may and (images or sample.images or own)):
        if images:
            raise ConfigError(f"{option} is given, but this transformer makes video from text alone; leave it out.")
        if own:
            number = next(number for number, line in enumerate(lines) if line.image)
            raise ConfigError(
                f"{named(number, prompts[number])} has --i, and this transformer makes video from text alone; leave it "
                f"out."
            )
        return []
    of_run = not images and not last_images and list(prompts) == list(sample.prompts)
    given, where = (sample.images, "sample.images") if of_run else (images, option)
    wanted = for_each(given, [line.image for line in lines], where)
    if not any(wanted) and may:
        return []
    if None in wanted and not may:
        raise ConfigError("this transformer starts from a picture: give --image, one for all prompts or one for each.")
    sizes = [(own.height, own.width) for own in settings.of_each(prompts)]
    first = _read(wanted, sizes)
    if not dit.takes_last_frame:
        return [None if picture is None else picture[None] for picture in first]
    given, where = (sample.last_images, "sample.last_images") if of_run else (last_images, "--last-image")
    wanted = for_each(given, [line.last_image for line in lines], where)
    if None in wanted:
        raise ConfigError(
            "this transformer makes clips between two pictures: give --last-image as well, one for all prompts or one "
            "for each."
        )
    last = _read(wanted, sizes)
    return [np.stack([a, b]) for a, b in zip(first, last, strict=True) if a is not None and b is not None]


def _read(wanted: Sequence[Wanted | None], sizes: Sequence[tuple[int, int]]) -> list[np.ndarray | None]:
    """The pictures in their sizes, each read once."""
    files = dict.fromkeys((one, size) for one, size in zip(wanted, sizes, strict=True) if one is not None)
    read = {(one, size): read_picture(*one, *size) for one, size in files}
    return [read[one, size] if one is not None else None for one, size in zip(wanted, sizes, strict=True)]


@dataclass(frozen=True, slots=True)
class ClipGroup:
    """Prompts whose clips have all but their texts, seeds and pictures in common, by their numbers."""

    numbers: tuple[int, ...]
    texts: tuple[str, ...]
    settings: ClipSettings  # of which the seed does not count
    seeds: tuple[int, ...]
    first: tuple[np.ndarray, ...]  # of each, or none


def groups_of(
    prompts: Sequence[str], settings: ClipSettings, first: Sequence[np.ndarray | None] = ()
) -> list[ClipGroup]:
    """The prompts in groups, in the order of the first ones in them: one group where no line has options."""
    groups: list[tuple[ClipSettings, bool, list[int]]] = []
    each = settings.of_each(prompts)
    for number, own in enumerate(each):
        alike, pictured = replace(own, seed=0), bool(first) and first[number] is not None
        found = next((numbers for other, has, numbers in groups if (other, has) == (alike, pictured)), None)
        if found is None:
            groups.append((alike, pictured, [number]))
        else:
            found.append(number)
    return [
        ClipGroup(
            numbers=tuple(numbers),
            texts=tuple(PromptLine.of(prompts[number]).text for number in numbers),
            settings=own,
            seeds=tuple(each[number].seed for number in numbers),
            first=tuple(picture for number in numbers if pictured and (picture := first[number]) is not None),
        )
        for own, pictured, numbers in groups
    ]


def clips_of(
    saved: SavedModel,
    prompts: Sequence[str],
    settings: ClipSettings,
    first: Sequence[np.ndarray | None] = (),
    tell: Callable[[str], None] | None = None,
) -> Iterator[tuple[int, np.ndarray]]:
    """(number of a prompt, its clip, uint8 [T, H, W, 3]) as they are made, from the `first_frames` where the
    transformer takes them; what a prompt's line says instead of `settings` counts for its clip. Prompts are encoded
    once, before the transformer is there. `tell` gets a line where others are left of those that are made together,
    which are files by then, and lines of their steps where no bar shows them; without it nothing is shown."""
    groups = groups_of(prompts, settings, first)
    told = saved.encode_each([(group.texts, group.settings.negative_prompt, group.first) for group in groups])
    model = saved.load()
    begin, count = time.monotonic(), 0
    for group, rows in zip(groups, told, strict=True):
        size = batch_limit(group.settings, model.geometry)
        for start in range(0, len(group.numbers), size):
            batch = slice(start, start + size)
            encoded = replace(rows, prompts=rows.prompts[batch])
            made = _shown_clips(model, encoded, group.settings, group.first[batch], group.seeds[batch], tell)
            yield from zip(group.numbers[batch], made, strict=True)
            count += len(made)
            if tell is not None and count < len(prompts):
                tell(clips_left(count, len(prompts), (time.monotonic() - begin) / count))


def _shown_clips(
    model: Model,
    told: EncodedPrompts,
    settings: ClipSettings,
    first: Sequence[np.ndarray],
    seeds: Sequence[int],
    tell: Callable[[str], None] | None,
) -> list[np.ndarray]:
    """Clips of one batch, and meanwhile how many of their steps are done: of a large model they take minutes."""
    steps = settings.forwards(model.geometry)
    with ProgressBar(f"steps of {counted(len(seeds), 'clip')}", quiet=tell is None, tell=tell) as bar:
        return make_clips(model, told, settings, first, progress=lambda done: bar(done, steps), seeds=seeds)


def clips_left(done: int, count: int, seconds_each: float) -> str:
    """'3/40 clips, 0:12:20 left'."""
    return f"{done}/{counted(count, 'clip')}, {timedelta(seconds=round(seconds_each * (count - done)))} left"


def make_clips(
    model: Model,
    told: EncodedPrompts,
    settings: ClipSettings,
    first: Sequence[np.ndarray] = (),
    group: Group | None = None,
    progress: Callable[[int], None] | None = None,
    half: Group | None = None,
    seeds: Sequence[int] | None = None,
) -> list[np.ndarray]:
    """Clips of these settings from encoded prompts, with the `seeds`, by default that of the settings and those that
    follow it. With a group every rank calls it and the first gets the clips, the others none:
    they denoise and decode together. With a `half` of it, guidance's two branches run side by side."""
    _check_frames(model, settings, from_picture=bool(first))
    requests = clip_requests(model, told, settings, first, seeds)
    dropped = FirstFrame.of(model.config.model).dropped_frames
    clips = []
    for batch in _batches(requests, batch_limit(settings, model.geometry)):
        given = (model.dit, batch, told.negative.text, model.geometry, settings.sampler, group, progress)
        if settings.sampler.forcing is None:
            latents = sample_latents(*given, model.low, told.negative.vector, half)
        else:
            latents = sample_forced(*given, told.negative.vector, half)
        noise = [settings.decode_noise(request.seed) for request in batch]
        videos = decode_together(model.vae, latents, group or Group.solo(), model.device, noise)
        clips += [video[dropped:].cpu().numpy() for video in videos]
    return clips


def _check_frames(model: Model, settings: ClipSettings, from_picture: bool) -> None:
    """Raises ConfigError for clips without a frame of their own, ValueError for a size that the model cannot make."""
    told, geometry, frames = FirstFrame.of(model.config.model), model.geometry, settings.frames
    if frames <= told.dropped_frames:
        raise ConfigError(
            f"sample.frames {frames}: of clips of this transformer the first {told.dropped_frames} frames are not "
            f"shown. Ask for more."
        )
    grid = geometry.token_grid(frames, settings.height, settings.width)
    if from_picture and not told.channels and grid[0] == 1:
        unit = geometry.vae_stride[0] * geometry.patch[0]
        raise ConfigError(
            f"sample.frames {frames}: a clip of one latent frame that starts from a picture is that picture. Ask for "
            f"{frames + unit} frames or more (--frames)."
        )


def clip_requests(
    model: Model,
    told: EncodedPrompts,
    settings: ClipSettings,
    first: Sequence[np.ndarray] = (),
    seeds: Sequence[int] | None = None,
) -> list[SampleRequest]:
    """What the sampler is asked for, one for each prompt."""
    seeds = range(settings.seed, settings.seed + len(told.prompts)) if seeds is None else seeds
    requests = [
        SampleRequest(
            text=rows.text,
            pooled=rows.vector,
            image=rows.image,
            negative=rows.negative,
            frames=settings.frames,
            height=settings.height,
            width=settings.width,
            seed=seed,
        )
        for seed, rows in zip(seeds, told.prompts, strict=True)
    ]
    return [_told_of(model, *pair) for pair in zip(requests, first, strict=True)] if first else requests


@torch.no_grad()
def _told_of(model: Model, request: SampleRequest, pictures: np.ndarray) -> SampleRequest:
    """The request with what the frames [1 or 2, H, W, 3] that its clip is made from say, by the VAE."""
    frame, pixels, patch = FirstFrame.of(model.config.model), torch.from_numpy(pictures), model.geometry.patch
    if not frame.channels:
        first = patchify(model.vae.encode(pixels[None, :1])[0], patch)
        return replace(request, first=first, hint=first if frame.hint_share else None, hint_share=frame.hint_share)
    clip = torch.cat([pixels[:1].expand(request.frames - 1, -1, -1, -1), pixels[-1:]])
    still = model.vae.encode(frame.still(clip[None]))[0]
    grid = model.geometry.latent_grid(request.frames, *pictures.shape[1:3])
    return replace(
        request,
        condition=patchify(frame.joined(still.new_empty(0, *grid), still), patch),
        hint=patchify(still, patch) if frame.hint_share else None,
        hint_share=frame.hint_share,
    )


def _batches(requests: list[SampleRequest], size: int) -> Iterator[list[SampleRequest]]:
    for start in range(0, len(requests), size):
        yield requests[start : start + size]


def write_clips(out: Path, clips: Iterable[tuple[int, np.ndarray]], prompts: Sequence[str], fps: float) -> list[Path]:
    """`out`.mp4 (numbered when there are several; inside `out` when it is a folder) and one contact sheet beside. Each
    of `clips_of` the prompts is a file before the next one is asked for.

    Their prompts, in order, are left in `out`.json, where the report finds the captions.
    """
    files, sheet = clip_files(out, len(prompts))
    sheet.parent.mkdir(parents=True, exist_ok=True)
    record_file(sheet).unlink(missing_ok=True)  # by which workers would take these clips for theirs
    shown: dict[int, np.ndarray] = {}
    for number, clip in clips:
        with whole_file(files[number]) as part:
            write_mp4(part, clip, fps)
        if number < SHEET_CLIPS:
            shown[number] = sheet_frames(clip)
    write_whole(sheet.with_suffix(".json"), json.dumps(list(prompts)))
    contact_sheet(sheet, [shown[number] for number in sorted(shown)], prompts, columns=1 if len(prompts) <= 4 else 2)
    return [*files, sheet]


def is_clip_folder(out: Path) -> bool:
    """Whether `out` means a folder of clips: one that is there may have any name, as samples/wan2.1."""
    return not out.suffix or out.is_dir()


def clip_files(out: Path, count: int) -> tuple[list[Path], Path]:
    """(the clips, their contact sheet) that `out` means: numbered when there are several, inside of a folder."""
    stem = out / "sample" if is_clip_folder(out) else out.with_suffix("")
    names = [f"{stem.name}.mp4"] if count == 1 else [f"{stem.name}-{index:02d}.mp4" for index in range(count)]
    return [stem.with_name(name) for name in names], stem.with_name(f"{stem.name}.png")


def record_file(sheet: Path) -> Path:
    """Where `heddle sample --workers` keeps, beside the contact sheet, which of these clips are finished."""
    return sheet.with_name(f"{sheet.stem}.clips.jsonl")


def sample_run(run_folder: Path, *, device: str = "auto") -> list[Path]:
    """The prompts of a run's config from its latest checkpoint, into RUN/samples. Empty when it has no prompts."""
    saved = saved_model(run_folder, device=device)
    prompts = saved.config.sample.prompts
    if not prompts:
        return []
    settings = ClipSettings.of(saved.config)
    out = run_folder / "samples" / f"step-{saved.step}.mp4"
    first = first_frames(saved.config, prompts, settings)
    return write_clips(out, clips_of(saved, prompts, settings, first), prompts, settings.fps)
