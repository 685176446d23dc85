"""`heddle sample`: clips from a checkpoint, as MP4 and a contact sheet.

    heddle sample --checkpoint runs/demo --prompt "a red circle moving up on a black background" --out red.mp4

The functions behind it make the samples of a running or finished training: `load_model` once, `make_clips` as often as
wanted, `write_clips` for the files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from app.sampling.clips import ClipChanges, ClipSettings, first_frames, make_clips, write_clips
from app.sampling.model import checkpoint_folder, is_export, load_model
from ops.ranges import SEED, above, between
from ops.typed import ConfigError


def run(
    checkpoint: Path,
    prompts: Sequence[str],
    out: Path,
    *,
    changes: ClipChanges | None = None,
    images: Sequence[Path] = (),
    other: Path | None = None,
    ema: bool = True,
    device: str = "auto",
) -> list[Path]:
    """Body of the command. Prompts and settings that are not given are those of the run. Returns the files written."""
    changes = changes or ClipChanges()
    if out.suffix not in ("", ".mp4"):
        raise ConfigError(f"--out {out} must end in .mp4, or be a folder for several clips.")
    given = {
        "guidance-scale": (changes.guidance_scale, between(0, 1e6)),
        "flow-shift": (changes.flow_shift, above(0, 1e6)),
        "fps": (changes.fps, above(0, 1000)),
        "seed": (changes.seed, between(0, SEED)),
    }
    for name, (value, allowed) in given.items():
        if value is not None and (fault := allowed.fault(value)):
            raise ConfigError(f"--{name} is {value}; {fault}.")
    _writable(out)
    model = load_model(checkpoint, ema=ema, device=device, other=other)
    prompts = prompts or model.config.sample.prompts
    if not prompts:
        raise ConfigError("no prompt: give --prompt, or sample.prompts in the run's config.")
    settings = ClipSettings.of(model.config).changed(changes)
    first = first_frames(model, prompts, settings, images, "--image")
    videos = make_clips(model, prompts, settings, first)
    files = write_clips(out, videos, prompts, settings.fps)
    for file in files:
        print(file)
    return files


def _writable(out: Path) -> None:
    """Raises ConfigError before the work begins when its files could not be written."""
    folder = out.parent if out.suffix else out
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be written ({error.strerror or error}); choose a folder that you may write."
        ) from None


def default_out(checkpoint: Path, prompts: Sequence[str] = ()) -> Path:
    """RUN/samples/step-N.mp4 for a checkpoint of a run, samples/NAME.mp4 here for any other.

    Clips of given prompts are step-N-prompts.mp4: they replace none of the config's prompts.
    """
    folder = checkpoint if is_export(checkpoint) else checkpoint_folder(checkpoint)
    name = f"{folder.name}-prompts.mp4" if prompts else f"{folder.name}.mp4"
    if folder.parent.name == "checkpoints":
        return folder.parent.parent / "samples" / name
    return Path("samples") / name
