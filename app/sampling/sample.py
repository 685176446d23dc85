"""`heddle sample`: clips from a checkpoint, as MP4 and a contact sheet.

    heddle sample --checkpoint runs/demo --prompt "a red circle moving up on a black background" --out red.mp4

The same functions make the samples of a running or finished training: `load_model` once, `make_clips` as often as
wanted, `write_clips` for the files.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from actors.state.checkpoint_files import CheckpointError, is_complete, latest, load, model_state
from app.device.profile import pick_device
from app.drawing.video import contact_sheet, write_mp4
from app.sampling.pictures import read_pictures
from app.settings.config import RunConfig, names
from ops.attention.varlen import check_backend
from ops.comm import Group
from ops.geometry import Geometry
from ops.models.base.config import DiTConfig
from ops.models.config import ModelConfig
from ops.models.families import FAMILIES
from ops.models.first_frame import FirstFrame
from ops.models.folders import resolve
from ops.models.image import ImageEncoder
from ops.models.load import build_dit, build_image, build_text, build_vae
from ops.models.text import TextEncoder
from ops.models.vae import VAE
from ops.models.weights import check_state
from ops.packing import patchify
from ops.ranges import SEED, above, between
from ops.sampling import LowNoiseExpert, SamplerConfig, SampleRequest, sample_latents
from ops.typed import ConfigError, build, parse

log = logging.getLogger(__name__)

# Clips are sampled together up to this many tokens; more only costs memory, the arithmetic is the same.
_BATCH_TOKENS = 32_768


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A checkpoint's modules, on one device, and the run they come from. With `low`, `dit` is for high noise."""

    dit: nn.Module
    low: LowNoiseExpert | None
    vae: VAE
    text: TextEncoder
    image: ImageEncoder | None
    geometry: Geometry
    config: RunConfig
    step: int
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSettings:
    """What is made and how. `of` takes a run's own settings."""

    frames: int
    height: int
    width: int
    fps: float
    seed: int  # prompt number i gets seed + i
    sampler: SamplerConfig
    negative_prompt: str = ""

    @staticmethod
    def of(config: RunConfig) -> ClipSettings:
        sample, flow = config.sample, config.train.flow
        sampler = SamplerConfig(
            steps=sample.steps,
            guidance_scale=sample.guidance_scale,
            flow_shift=flow.flow_shift,
            token_shift=flow.token_shift,
            num_train_timesteps=flow.num_train_timesteps,
            autocast=config.train.autocast == "bfloat16",
            wan_steps=FAMILIES[config.model.dit.architecture].wan_steps,
        )
        return ClipSettings(
            frames=sample.frames,
            height=sample.height,
            width=sample.width,
            fps=sample.fps,
            seed=sample.seed,
            sampler=sampler,
        )


def run(
    checkpoint: Path,
    prompts: Sequence[str],
    out: Path,
    *,
    images: Sequence[Path] = (),
    other: Path | None = None,
    ema: bool = True,
    frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    steps: int | None = None,
    guidance_scale: float | None = None,
    flow_shift: float | None = None,
    negative_prompt: str = "",
    seed: int | None = None,
    fps: float | None = None,
    device: str = "auto",
) -> list[Path]:
    """Body of the command. What is None comes from the checkpoint's own config; returns the files written."""
    if out.suffix not in ("", ".mp4"):
        raise ConfigError(f"--out {out} must end in .mp4, or be a folder for several clips.")
    given = {
        "guidance-scale": (guidance_scale, between(0, 1e6)),
        "flow-shift": (flow_shift, above(0, 1e6)),
        "fps": (fps, above(0, 1000)),
        "seed": (seed, between(0, SEED)),
    }
    for name, (value, allowed) in given.items():
        if value is not None and (fault := allowed.fault(value)):
            raise ConfigError(f"--{name} is {value}; {fault}.")
    _writable(out)
    model = load_model(checkpoint, ema=ema, device=device, other=other)
    prompts = prompts or model.config.sample.prompts
    if not prompts:
        raise ConfigError("no prompt: give --prompt, or sample.prompts in the run's config.")
    base = ClipSettings.of(model.config)
    sampler = replace(base.sampler, **_given(steps=steps, guidance_scale=guidance_scale, flow_shift=flow_shift))
    if flow_shift is not None:
        sampler = replace(sampler, token_shift=None)
    settings = replace(
        base,
        sampler=sampler,
        negative_prompt=negative_prompt,
        **_given(frames=frames, height=height, width=width, seed=seed, fps=fps),
    )
    first = first_frames(model, prompts, settings, images, "--image")
    videos = make_clips(model, prompts, settings, first)
    files = write_clips(out, videos, prompts, settings.fps)
    for file in files:
        print(file)
    return files


def reason(error: Exception) -> str:
    """What went wrong, without the path that the sentence around it names."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _writable(out: Path) -> None:
    """Raises ConfigError before the work begins when its files could not be written."""
    folder = out.parent if out.suffix else out
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be written ({reason(error)}); choose a folder that you may write."
        ) from None


def checkpoint_folder(path: Path) -> Path:
    """The checkpoint that `path` means: itself, the latest below it, or the latest of a run directory."""
    if not path.exists():
        raise ConfigError(f"checkpoint {path} does not exist.")
    if is_complete(path):
        return path
    found = latest(path) or latest(path / "checkpoints")
    if found is None:
        raise ConfigError(
            f"{path} is no complete checkpoint and holds none; give runs/NAME or "
            f"runs/NAME/checkpoints/step-N with a COMPLETE file."
        )
    return found


def default_out(checkpoint: Path, prompts: Sequence[str] = ()) -> Path:
    """RUN/samples/step-N.mp4 for a checkpoint of a run, samples/NAME.mp4 here for any other.

    Clips of given prompts are step-N-prompts.mp4: they replace none of the config's prompts.
    """
    folder = checkpoint if is_export(checkpoint) else checkpoint_folder(checkpoint)
    name = f"{folder.name}-prompts.mp4" if prompts else f"{folder.name}.mp4"
    if folder.parent.name == "checkpoints":
        return folder.parent.parent / "samples" / name
    return Path("samples") / name


def load_model(path: Path, *, ema: bool = True, device: str = "auto", other: Path | None = None) -> Model:
    """The modules of a checkpoint (or of the latest one of a run), with its EMA weights where it has them.

    `other` is a checkpoint of the other expert; without one it comes from the folder that the run began with.
    """
    if is_export(path):
        return _load_export(path, device)
    folder = checkpoint_folder(path)
    meta, _ = load(folder)
    config = run_config(meta, folder)
    target = pick_device(device)
    resolved, geometry = _for_device(config, config.model, target)
    dit = build_dit(replace(resolved.dit, lora_from=None), config.train.seed)
    put_weights(dit, model_state(folder, ema), str(folder))
    high, low = _experts(resolved.dit, dit.eval().to(target), _other_expert(resolved.dit, other, ema), target)
    return Model(
        dit=high,
        low=low,
        vae=build_vae(resolved.vae, target),
        text=build_text(resolved.text, target),
        image=build_image(resolved.image, target),
        geometry=geometry,
        config=replace(config, model=resolved),
        step=int(meta["step"]),
        device=target,
    )


def _other_expert(trained: DiTConfig, other: Path | None, ema: bool) -> nn.Module | None:
    """The transformer for the noise levels that the trained one is not for. Raises ConfigError where it is nowhere."""
    if not trained.two_experts:
        if other is not None:
            raise ConfigError(f"--other {other} is given, but this run trained one transformer for all noise levels.")
        return None
    if other is None:
        wanted = trained.other_expert()
        if not trained.path or not (Path(trained.path).expanduser() / wanted.part).is_dir():
            raise ConfigError(
                f"this run trained the expert for noise levels {trained.sigmas[0]:g} to {trained.sigmas[1]:g}; give "
                f"--other, a run of the other one."
            )
        return build_dit(replace(wanted, lora_rank=0, lora_from=None), 0)
    folder = checkpoint_folder(other)
    config = run_config(load(folder)[0], folder)
    dit = resolve(config.model)[0].dit
    if dit.sigmas != trained.other_expert().sigmas:
        raise ConfigError(
            f"--other {other} trained noise levels {dit.sigmas[0]:g} to {dit.sigmas[1]:g}, and this run "
            f"{trained.sigmas[0]:g} to {trained.sigmas[1]:g}; give a run of the other expert."
        )
    module = build_dit(replace(dit, lora_from=None), config.train.seed)
    put_weights(module, model_state(folder, ema), str(folder))
    return module


def _experts(
    trained: DiTConfig, dit: nn.Module, other: nn.Module | None, device: torch.device
) -> tuple[nn.Module, LowNoiseExpert | None]:
    """(for high noise, for low), or the one transformer and nothing."""
    if other is None:
        return dit, None
    other = other.eval().to(device)
    low, high = trained.sigmas
    return (dit, LowNoiseExpert(other, low)) if high == 1.0 else (other, LowNoiseExpert(dit, high))


def _for_device(config: RunConfig, model: ModelConfig, device: torch.device) -> tuple[ModelConfig, Geometry]:
    """The resolved model; attention that the run named but this device does not have becomes `auto`, with a note."""
    resolved, geometry = resolve(model)
    dtype = torch.bfloat16 if config.train.autocast == "bfloat16" else torch.float32
    try:
        check_backend(resolved.dit.attention, device, dtype, resolved.dit.head_dim, training=False)
    except ValueError as error:
        print(f"note: {error} Sampling uses auto.")
        resolved = replace(resolved, dit=replace(resolved.dit, attention="auto"))
    return resolved, geometry


def is_export(path: Path) -> bool:
    """Whether `path` is a folder of `heddle export`."""
    return (path / "heddle.yaml").is_file() and (path / "transformer" / "config.json").is_file()


def _load_export(folder: Path, device: str) -> Model:
    """The modules of an exported folder; what it does not hold (the haar codec, a random encoder) the config makes."""
    config = RunConfig.load(folder / "heddle.yaml")
    model, here = config.model, str(folder.resolve())
    model = replace(
        model,
        dit=replace(model.dit, path=here, lora_rank=0, lora_from=None),
        vae=replace(model.vae, path=here) if model.vae.path else model.vae,
        text=replace(model.text, path=here) if model.text.path else model.text,
        image=replace(model.image, path=here) if model.image and model.image.path else model.image,
    )
    target = pick_device(device)
    resolved, geometry = _for_device(config, model, target)
    dit = build_dit(resolved.dit, config.train.seed).eval().to(target)
    high, low = _experts(resolved.dit, dit, _other_expert(resolved.dit, None, True), target)
    return Model(
        dit=high,
        low=low,
        vae=build_vae(resolved.vae, target),
        text=build_text(resolved.text, target),
        image=build_image(resolved.image, target),
        geometry=geometry,
        config=replace(config, model=resolved),
        step=0,
        device=target,
    )


def run_config(meta: dict[str, object], folder: Path) -> RunConfig:
    """The run's config that a checkpoint carries."""
    text = meta.get("config")
    if not isinstance(text, str):
        raise CheckpointError(f"{folder}: meta.json holds no config; it was not written by a training run.")
    return build(RunConfig, parse(text, "meta.json"), names())


def put_weights(module: nn.Module, state: dict[str, Tensor], where: str) -> None:
    """Copy trained weights into the module. Parameters that were frozen in training keep what `build_dit` gave them."""
    expected = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    check_state(expected, state, where)
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(state[name])


def first_frames(
    model: Model, prompts: Sequence[str], settings: ClipSettings, images: Sequence[str | Path] = (), option: str = ""
) -> list[np.ndarray]:
    """The first frame of each clip, [height, width, 3], for a transformer that starts from one; else nothing.

    `images` were given by `option`; without them those of the run's config are used. Raises ConfigError where there are
    none, where the transformer takes none, and for broken ones.
    """
    sample = model.config.sample
    dit = model.config.model.dit
    may = dit.frame_times and model.config.train.flow.first_frame > 0
    if not dit.starts_from_image and not (may and (images or sample.images)):
        if images:
            raise ConfigError(f"{option} is given, but this transformer makes video from text alone; leave it out.")
        return []
    of_run = not images and list(prompts) == list(sample.prompts)
    given, where = (sample.images, "sample.images") if of_run else (images, option)
    if not given:
        if may:
            return []
        raise ConfigError("this transformer starts from a picture: give --image, one for all prompts or one for each.")
    return read_pictures(given, len(prompts), settings.height, settings.width, where)


def make_clips(
    model: Model,
    prompts: Sequence[str],
    settings: ClipSettings,
    first: Sequence[np.ndarray] = (),
    group: Group | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[np.ndarray]:
    """One uint8 [T, H, W, 3] clip per prompt, from the `first_frames` where the transformer starts from them. With a
    group every rank calls it and gets all clips."""
    requests = [
        SampleRequest(
            text=text,
            frames=settings.frames,
            height=settings.height,
            width=settings.width,
            seed=settings.seed + index,
            **(_told(model, first[index], settings.frames) if first else {}),
        )
        for index, text in enumerate(model.text.encode(list(prompts)))
    ]
    (negative,) = model.text.encode([settings.negative_prompt])
    clips = []
    for batch in _batches(requests, model.geometry.tokens(settings.frames, settings.height, settings.width)):
        latents = sample_latents(
            model.dit, batch, negative, model.geometry, settings.sampler, group, progress, model.low
        )
        with torch.no_grad():
            clips += [model.vae.decode(latent[None])[0].cpu().numpy() for latent in latents]
    return clips


@torch.no_grad()
def _told(model: Model, picture: np.ndarray, frames: int) -> dict[str, Tensor]:
    """What a `SampleRequest` says of the first frame [H, W, 3] of a clip."""
    frame, pixels = FirstFrame.of(model.config.model), torch.from_numpy(picture)[None]
    if not frame.channels:
        return {"first": patchify(model.vae.encode(pixels[:, None])[0], model.geometry.patch)}
    still = model.vae.encode(frame.still(pixels[:, None].expand(-1, frames, -1, -1, -1)))[0]
    told = {"condition": patchify(frame.joined(still[:0], still), model.geometry.patch)}
    return told | ({"image": model.image.encode(pixels)[0]} if model.image else {})


def write_clips(out: Path, videos: Sequence[np.ndarray], prompts: Sequence[str], fps: float) -> list[Path]:
    """`out`.mp4 (numbered when there are several; inside `out` when it is a folder) and one contact sheet beside.

    Their prompts, in order, are left in `out`.json, where the report finds the captions.
    """
    stem = out.with_suffix("") if out.suffix else out / "sample"
    one = len(videos) == 1
    files = [
        stem.with_name(f"{stem.name}.mp4" if one else f"{stem.name}-{index:02d}.mp4") for index in range(len(videos))
    ]
    for file, video in zip(files, videos, strict=True):
        write_mp4(file, video, fps)
    part = stem.with_name(f"{stem.name}.json.part")
    part.write_text(json.dumps(list(prompts)), encoding="utf-8")
    os.replace(part, stem.with_name(f"{stem.name}.json"))  # a report of the live run never reads half of it
    sheet = stem.with_name(f"{stem.name}.png")
    contact_sheet(sheet, videos, prompts, columns=1 if len(videos) <= 4 else 2)
    return [*files, sheet]


def sample_run(run_folder: Path, *, device: str = "auto") -> list[Path]:
    """The prompts of a run's config from its latest checkpoint, into RUN/samples. Empty when it has no prompts."""
    model = load_model(run_folder, device=device)
    prompts = model.config.sample.prompts
    if not prompts:
        return []
    settings = ClipSettings.of(model.config)
    out = run_folder / "samples" / f"step-{model.step}.mp4"
    first = first_frames(model, prompts, settings)
    return write_clips(out, make_clips(model, prompts, settings, first), prompts, settings.fps)


def _batches(requests: list[SampleRequest], tokens: int) -> Iterator[list[SampleRequest]]:
    size = max(1, _BATCH_TOKENS // tokens)
    for start in range(0, len(requests), size):
        yield requests[start : start + size]


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
