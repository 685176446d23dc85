"""Which checkpoint a person means: the latest of a run, the one after a number of steps, or the one that a path names.

A folder is named after the last step in it, and steps count from 0: step-249 is what 250 steps have made. People count
steps, so commands take 250 (`--after`) and their messages have both. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from actors.state.checkpoint_files import (
    CheckpointError,
    Meta,
    ParameterMeta,
    complete,
    damage,
    is_complete,
    latest,
    meta_of,
    newest_step,
    root_of,
    step_folder,
    step_folders,
    step_of,
    trained_parameters,
)
from app.records.metrics import newest_line
from app.records.most_steps import note_steps, noted_steps
from app.settings.config import RunConfig, names
from app.settings.run_folder import CONFIG, run_dir
from app.settings.written_by import explained, writer
from data.config import DataConfig
from ops.counted import counted
from ops.models.folders import resolve
from ops.typed import ConfigError, build, parse

_MOST_NAMED = 12  # checkpoints in a message
_GIVE = "Give the folder of a run, such as runs/demo, or a checkpoint in it."


def checkpoint_folder(path: Path, after: int | None = None, *, verify: bool = True) -> Path:
    """The checkpoint that `path` means: itself, the latest below it, or the latest of a run directory; with `after` the
    one of a run after as many steps. Raises ConfigError where there is none, with those that there are. What `path`
    does not name itself is read as a whole for damage, with `after` where `verify` says so."""
    if after is not None:
        return _after(path, after, verify)
    if not path.exists():
        beside = complete(path.parent)
        there = _there_are(beside) if beside else _GIVE
        raise ConfigError(f"checkpoint {path} does not exist. {there}")
    named, root = f"checkpoint {path}", path.parent
    try:
        if is_complete(path):
            return path
        named, root = f"the latest checkpoint of {path}", root_of(path) if root_of(path).is_dir() else path
        found = latest(path) or latest(root_of(path))
    except PermissionError as error:
        others: list[Path] = []
        with suppress(OSError):  # the folder itself may not be listed
            others = complete(root)
        raise ConfigError(
            f"{named} cannot be read: {error}. Have it readable, or name another one by its "
            f"folder.{f' {_there_are(others)}' if others else ''}"
        ) from None
    if found is None:
        raise ConfigError(
            f"{path} is no complete checkpoint and holds none; give runs/NAME or "
            f"runs/NAME/checkpoints/step-N with a COMPLETE file."
        )
    return found


def steps_of(checkpoint: Path) -> int:
    """How many steps have made it."""
    return step_of(checkpoint) + 1


def earlier_checkpoint(config: RunConfig, steps: int | None, *, resume: bool, verify: bool = True) -> Path | None:
    """The checkpoint of the run after as many steps; None where it does not go back. Raises ConfigError where there is
    none, and where the run has gone back to it before: a batch system that starts a command again would throw the run
    back each time. `verify` reads all of it for damage."""
    if steps is None:
        return None
    if not resume:
        raise ConfigError(f"--back-to {steps} is for a run that is continued: give --resume, too.")
    folder = run_dir(config)
    checkpoint = checkpoint_folder(folder, steps, verify=verify)
    if (aside := later_folder(folder, checkpoint)).exists():
        raise ConfigError(
            f"{aside} exists: the run has gone back to {counted(steps, 'step')} before. Leave --back-to out to go on, "
            f"or move that folder elsewhere to go back once more."
        )
    return checkpoint


def check_same_weights(config: RunConfig, earlier: Path | None = None) -> None:
    """Raises ConfigError where a resume would read trained weights in the place of others: the state is one vector, in
    the order of names that its checkpoint lists, `earlier` or the newest. Another version of this program, or of the
    library that makes the transformer, may list others of as many numbers."""
    checkpoint, meta = _state_of(config, earlier)
    if checkpoint is None or not (theirs := meta.get("parameters")):
        return
    if apart := first_apart(theirs, trained_parameters(resolve(config.model)[0])):
        version = f" Heddle {written}" if (written := writer(str(meta.get("config", "")))) else ""
        raise ConfigError(
            f"--resume would read weights of {checkpoint} in the place of others: {apart}. Use the version{version} "
            f"that wrote it, with its libraries (the run's report lists their versions), or the settings of model.dit "
            f"that it was trained with."
        )


def first_apart(theirs: Sequence[ParameterMeta], ours: Sequence[ParameterMeta]) -> str:
    """The first trained weight of a checkpoint (there) or of this run (here) that the other has not, or not in the same
    shape, else the first in another place; "" where they are the same."""
    if theirs == ours:
        return ""
    there, here = ({one["name"]: list(one["shape"]) for one in listed} for listed in (theirs, ours))
    for name in (*here, *there):
        if here.get(name) != there.get(name):
            return f"{name} is {_shape(there.get(name))} there and {_shape(here.get(name))} here"
    other, mine = next((a["name"], b["name"]) for a, b in zip(theirs, ours) if a != b)
    return f"where {other} lies there, {mine} lies here"


def _shape(shape: list[int] | None) -> str:
    return "missing" if shape is None else str(shape)


def _state_of(config: RunConfig, earlier: Path | None) -> tuple[Path | None, Meta]:
    """The checkpoint that a resume goes on from, as far as its meta.json tells, and that file. A checkpoint with a
    damaged meta.json is passed over, as the start does."""
    with suppress(OSError):  # what storage does not give now the start looks for again
        for folder in [earlier] if earlier is not None else reversed(step_folders(root_of(run_dir(config)))):
            if is_complete(folder):  # raises LaterFormat
                with suppress(CheckpointError):
                    return folder, meta_of(folder)
    return None, {}


def steps_begun(config: RunConfig, back_to: int | None = None) -> int:
    """How many steps a resume of the run takes for done, at most, as far as storage says: keepers that are alive hold
    more than the newest checkpoint, and what they hold is in the metrics. 0 where there is no run."""
    if back_to is not None:
        return back_to
    folder, line = run_dir(config), None
    newest = newest_step(folder)
    with suppress(OSError):
        line = newest_line(folder)
    return 1 + max(-1 if newest is None else newest, line[0] if line is not None else -1)


def data_before(config: RunConfig) -> DataConfig | None:
    """The data section of the run's last start that has made a step, as its folder keeps it; None where it does not."""
    try:
        return RunConfig.load(run_dir(config) / CONFIG).data
    except (OSError, ConfigError):
        return None


def most_steps(config: RunConfig) -> int:
    """The most steps that the run has ever had, as has been noted where it took some again: a crash may have cost some
    since, or it has gone back."""
    return max(noted_steps(run_dir(config)), steps_begun(config))


def note_most_steps(config: RunConfig) -> None:
    """Called before a resume takes any step again: the newest checkpoint may be later than the newest line of metrics,
    of which `Metrics` notes that it goes. Only a run with pictures is asked for it: `check_more_than_first`."""
    if any(buckets.has_pictures for buckets in config.data.tables):
        note_steps(run_dir(config), steps_begun(config))


def later_folder(run: Path, checkpoint: Path) -> Path:
    """Where what came after a checkpoint lies, once the run has gone back to it."""
    return run / f"later-than-{steps_of(checkpoint)}-steps"


def later_folders(run: Path) -> list[Path]:
    """All of them: a run may go back more than once, and have gone on where that was cut short."""
    return sorted(run.glob("later-than-*-steps*"))


def run_config(meta: Meta, folder: Path) -> RunConfig:
    """The run's config that a checkpoint carries."""
    text = meta.get("config")
    if not isinstance(text, str):
        raise CheckpointError(f"{folder}: meta.json holds no config; it was not written by a training run.")
    with explained(text):
        return build(RunConfig, parse(text, "meta.json"), names())


def _after(path: Path, steps: int, verify: bool) -> Path:
    if is_complete(path):
        raise ConfigError(
            f"{path} is one checkpoint, after {counted(steps_of(path), 'step')}: give its run, or leave --after "
            f"{steps} out."
        )
    if not path.exists():
        raise ConfigError(f"checkpoint {path} does not exist. {_GIVE}")
    root = root_of(path) if root_of(path).is_dir() else path
    folder = step_folder(root, steps - 1)
    if not is_complete(folder):
        raise ConfigError(f"{path} has no checkpoint after {counted(steps, 'step')}. {_there_are(complete(root))}")
    if verify and (why := damage(folder)):
        raise ConfigError(f"{folder} is damaged: {why}. {_there_are([f for f in complete(root) if f != folder])}")
    return folder


def _there_are(folders: Sequence[Path]) -> str:
    """The newest of them, oldest first."""
    if not folders:
        return "There is none."
    named = [f"{steps_of(folder)} ({folder.name})" for folder in folders[-_MOST_NAMED:]]
    older = "older ones, and those " if len(folders) > _MOST_NAMED else "those "
    return f"There are {older}after {', '.join(named)} steps."
