"""`heddle sample`: clips from a checkpoint, as MP4 and a contact sheet.

    heddle sample --checkpoint runs/demo --prompt "a red circle moving up on a black background" --out red.mp4

The functions it calls make the samples of a running or finished training, too: `saved_model` reads its settings,
`clips_of` makes clips, `write_clips` their files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from app.sampling.clips import (
    ClipChanges,
    ClipOrder,
    ClipSettings,
    Crew,
    clip_files,
    clips_of,
    first_frames,
    is_clip_folder,
    write_clips,
)
from app.sampling.model import SavedModel, one_checkpoint, saved_model
from app.sampling.published import is_pipeline, published_notes
from app.settings.config import RunConfig
from app.settings.prompt_line import PromptLine, about_prompt, may_have_options
from app.settings.prompts import prompt_notes
from app.settings.rules import check_decode, check_forcing
from app.settings.sections import LongPrompts
from app.settings.terminal import say
from ops.config import TIMES
from ops.counted import counted, first_of
from ops.geometry import Geometry
from ops.models.added_lora import LoraFile
from ops.ranges import SEED, above, between
from ops.typed import ConfigError

_NAME_BYTES = 150  # of a file that nobody has named: of the 255 that there may be, its kinds take some at its end
_DIGEST = 6  # letters
_PART_BYTES = 24  # that a file's name has more while it is written (ops.whole_file)


def run(
    checkpoint: Path,
    prompts: Sequence[str],
    out: Path,
    *,
    changes: ClipChanges | None = None,
    images: Sequence[Path] = (),
    last_images: Sequence[Path] = (),
    other: Path | None = None,
    loras: Sequence[LoraFile] = (),
    ema: bool = True,
    device: str = "auto",
    long_prompts: LongPrompts | None = None,
    crew: Crew | None = None,
) -> list[Path]:
    """Body of the command. Prompts and settings that are not given are those of the run. Returns the files written.
    With a `crew` its workers make the clips, and this process loads no weights."""
    changes = changes or ClipChanges()
    if out.suffix != ".mp4" and not is_clip_folder(out):
        raise ConfigError(
            f"--out {out} must end in .mp4, or be a folder for several clips; make one with a dot in its name before."
        )
    _check_ranges(changes)
    _writable(out)
    saved = saved_model(checkpoint, ema=ema, device=device, other=other, loras=loras)
    config, geometry = saved.config, saved.geometry
    for note in published_notes(checkpoint) if is_pipeline(checkpoint) else []:
        print(f"note: {note}")
    _check_fit(changes, saved, checkpoint)
    of_run = not prompts
    prompts, rule = prompts or config.sample.prompts, long_prompts or config.sample.long_prompts
    if not prompts:
        raise ConfigError("no prompt: give --prompt, or sample.prompts in the run's config.")
    settings = ClipSettings.of(config, saved.scheduler).changed(changes)
    if (saved := saved.at_rate(settings.fps)).config != config:
        config = saved.config
        print(f"note: the transformer gets {settings.fps:g} frames per second, as --fps says.")
    own_images = list(prompts) == list(config.sample.prompts) and config.sample.images
    with _about_run(prompts) if of_run else nullcontext():
        for number, (prompt, own) in enumerate(zip(prompts, settings.of_each(prompts), strict=True)):
            line = PromptLine.of(prompt)
            with about_prompt(number, prompt):
                _check_fit(ClipChanges.of_line(line), saved, checkpoint)
                _check_settings(own, config, geometry, bool(images or own_images or line.image))
    first = first_frames(config, prompts, settings, images, "--image", last_images)
    for note in prompt_notes(prompts, config.model.text, rule, settings.negative_prompt):
        print(f"note: {note}")
    if crew is None:
        _say(f"making    {_in_words(prompts, settings)}")
        files = write_clips(out, clips_of(saved, prompts, settings, first, _say), prompts, settings.fps)
    else:
        order = ClipOrder(
            checkpoint=(saved.trained or checkpoint).resolve(),
            other=other and one_checkpoint(other).resolve(),
            loras=tuple(replace(one, path=str(Path(one.path).expanduser().resolve())) for one in loras),
            ema=ema,
            prompts=tuple(prompts),
            first=tuple(first),
            settings=settings,
            config=config,
            geometry=geometry,
        )
        files = crew(order)
    print(*files, sep="\n")
    return files


def _say(text: str) -> None:
    """Now, also into a log: a clip takes minutes."""
    say(text, sys.stdout)


def _in_words(prompts: Sequence[str], settings: ClipSettings) -> str:
    """How many clips of which frames, heights and widths."""
    sizes = dict.fromkeys(f"{own.frames}x{own.height}x{own.width}" for own in settings.of_each(prompts))
    return f"{counted(len(prompts), 'clip')} of {first_of(list(sizes))}"


@contextmanager
def _about_run(prompts: Sequence[str]) -> Iterator[None]:
    """What is found wrong in the block with prompts of a run's own, which nobody changes in a checkpoint: raises
    ConfigError for ValueError."""
    try:
        yield
    except ValueError as error:
        if not any(map(may_have_options, prompts)):
            raise
        raise ConfigError(f"{error} It is in sample.prompts of the run: give --prompt instead.") from None


def _check_ranges(changes: ClipChanges) -> None:
    """Raises ConfigError where a number cannot be."""
    given = {
        "guidance-scale": (changes.guidance_scale, between(0, 1e6)),
        "guidance-scale-2": (changes.guidance_scale_2, between(0, 1e6)),
        "flow-shift": (changes.flow_shift, above(0, 1e6)),
        "fps": (changes.fps, above(0, 1000)),
        "seed": (changes.seed, between(0, SEED)),
        "decode-timestep": (changes.decode_timestep, between(0, 1)),
        "decode-noise-scale": (changes.decode_noise_scale, between(0, 1)),
    }
    for name, (value, allowed) in given.items():
        if value is not None and (fault := allowed.fault(value)):
            raise ConfigError(f"--{name} is {value}; {fault}.")


def _check_fit(changes: ClipChanges, saved: SavedModel, checkpoint: Path) -> None:
    """Raises ConfigError where the transformer of this checkpoint has no such setting."""
    dit = saved.config.model.dit
    if dit.images_only and changes.frames not in (None, 1):
        raise ConfigError(f"--frames is {changes.frames}, and this transformer makes pictures; leave it out.")
    if dit.diffusion is not None and changes.flow_shift is not None:
        raise ConfigError(
            f"--flow-shift is {changes.flow_shift:g}, and this transformer is sampled by DDIM, which has none; leave "
            f"it out."
        )
    if changes.timesteps and (dit.diffusion is not None or saved.scheduler is not None):
        raise ConfigError(
            f"--timesteps is given, and clips of {checkpoint} are made by a scheduler, which has its own; leave it out."
        )
    if changes.forcing and not dit.levels_by_frame:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in changes.forcing)
        raise ConfigError(f"{named}: this transformer takes one noise level for all frames of a clip; leave it out.")
    if changes.guidance_scale_2 is not None and not dit.two_experts:
        raise ConfigError(
            f"--guidance-scale-2 is {changes.guidance_scale_2:g}, of the expert for low noise, and this is one "
            f"transformer for all noise levels; leave it out."
        )


def _check_settings(settings: ClipSettings, config: RunConfig, geometry: Geometry, from_picture: bool) -> None:
    """Raises ConfigError where clips of this size, or of this number of steps, cannot be made or decoded."""
    try:
        grid = geometry.token_grid(settings.frames, settings.height, settings.width)
    except ValueError as error:
        size = f"{settings.frames} x {settings.height} x {settings.width}"
        raise ConfigError(f"clips of {size} (--frames, --height, --width) cannot be made: {error}") from None
    check_forcing(settings.sampler.forcing, grid[0], geometry, from_picture)
    if config.model.dit.diffusion is not None and (steps := settings.sampler.steps) > TIMES:
        raise ConfigError(
            f"clips of {steps} steps (--steps) cannot be made: this transformer is trained by diffusion, with {TIMES} "
            f"times; give {TIMES} or less."
        )
    told = settings.decode_timestep, settings.decode_noise_scale
    check_decode(config.model.vae, replace(config.sample, decode_timestep=told[0], decode_noise_scale=told[1]))


def _writable(out: Path) -> None:
    """Raises ConfigError before the work begins when its files could not be written. Leaves nothing."""
    folder = out if is_clip_folder(out) else out.parent
    missing = list(takewhile(lambda above: not above.exists(), (folder, *folder.parents)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        _, sheet = clip_files(out, 1)
        with suppress(FileNotFoundError):
            sheet.with_name(f".{sheet.name}{'-' * _PART_BYTES}").lstat()
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be written ({error.strerror or error}); choose a folder that you may write, or a "
            f"shorter name."
        ) from None
    with suppress(OSError):  # somebody has put a file there meanwhile
        for made in missing:
            made.rmdir()


def default_out(checkpoint: Path, prompts: Sequence[str] = (), loras: Sequence[LoraFile] = ()) -> Path:
    """RUN/samples/step-N.mp4 for a checkpoint of a run, samples/NAME.mp4 here for any other.

    Given prompts add words of theirs to the name, and a digest: their clips replace those of no other prompts, and the
    same command finds what it has begun. So do files of `loras` with their scales.
    """
    folder = one_checkpoint(checkpoint)
    added = [f"{Path(one.path).stem}-{one.scale:g}" for one in loras]
    name = _with_words(_short("-".join((folder.name, *added))), prompts) + ".mp4"
    if folder.parent.name == "checkpoints":
        return folder.parent.parent / "samples" / name
    return Path("samples") / name


def _with_words(name: str, prompts: Sequence[str]) -> str:
    if not prompts:
        return name
    words = re.findall(r"\w{1,20}", prompts[0].lower())[:5]
    left = _NAME_BYTES - _DIGEST - 1
    return f"{_cut('-'.join((name, *words)), left)}-{_digest(json.dumps(list(prompts)))}"


def _short(name: str) -> str:
    """A name that leaves room for words; one that is cut ends in a digest, as others may begin alike."""
    most = _NAME_BYTES * 2 // 3
    return name if len(os.fsencode(name)) <= most else f"{_cut(name, most - _DIGEST - 1)}-{_digest(name)}"


def _cut(name: str, most_bytes: int) -> str:
    """The beginning of a name, in whole characters."""
    return os.fsencode(name)[:most_bytes].decode(errors="ignore").rstrip("-")


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:_DIGEST]
