"""The folder of a run: whether a start may use it, and its config.yaml."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from app.settings.config import RunConfig
from ops.models.folders import resolved
from ops.typed import ConfigError, as_plain
from ops.whole_file import write_whole

CONFIG = "config.yaml"
LORA = "lora"  # in the run's folder: files of the factors, in a folder for each checkpoint
LORA_SCRATCH = ".lora"  # beside it, while a run goes on: files that are not whole, links to checkpoints that wait
LORA_STOPPED = "stopped"  # in that: a run that waits for its last files has been asked to end


def run_dir(config: RunConfig) -> Path:
    """The folder of this run."""
    return Path(config.run.dir) / config.run.name


def check_run_dir(config: RunConfig, resume: bool = False, overwrite: bool = False) -> Path:
    """The run's folder. An existing one needs `resume` or `overwrite`, else ConfigError.

    Only a folder that looks like a run (it has a config.yaml) or is empty is ever overwritten.
    """
    folder = run_dir(config)
    check_place(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run directory {folder} is a file; choose another run.name.")
    occupied = folder.is_dir() and any(folder.iterdir())
    if occupied and resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other; give one.")
    if occupied and not (resume or overwrite):
        raise ConfigError(
            f"run directory {folder} already exists; continue it with --resume, start again with "
            f"--overwrite, or choose another run.name."
        )
    if occupied and not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"run directory {folder} holds files but no config.yaml, so it is not a run; choose another run.name."
        )
    return folder


def check_place(folder: Path) -> None:
    """Raises ConfigError when a file stands where a folder above the run's is needed, or nothing can be made there."""
    above = [parent for parent in folder.absolute().parents if parent.exists()]
    for parent in above:
        if not parent.is_dir():
            raise ConfigError(f"run directory {folder} cannot be made: {parent} is a file; choose another run.dir.")
    if not os.access(above[0], os.W_OK | os.X_OK):
        why = f"may not be written by user {os.geteuid()}"
        if os.statvfs(above[0]).f_flag & os.ST_RDONLY:
            why = "is read-only"
        raise ConfigError(f"run directory {folder} cannot be made: {above[0]} {why}; choose another run.dir.")


def prepare_run_dir(config: RunConfig, resume: bool = False, overwrite: bool = False) -> Path:
    """Make the run's folder, empty with `overwrite`, and save the resolved config in it. Raises as check_run_dir.

    A resume leaves the config as it is until its first step is done (`save_config`): till then it may be refused.
    """
    folder = check_run_dir(config, resume, overwrite)
    if overwrite and folder.is_dir():
        _empty(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (resume and (folder / CONFIG).is_file()):
        save_config(config, folder)
    return folder


def _empty(folder: Path) -> None:
    """Remove what is in a run's folder, which may be a link or a mount point, and config.yaml last: until then it is
    the folder of a run, which the next start may empty."""
    entries = sorted(folder.iterdir(), key=lambda entry: entry.name == CONFIG)
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def save_config(config: RunConfig, folder: Path) -> bool:
    """Write the resolved config into the run's folder. Returns whether it was another one."""
    path, text = folder / CONFIG, _true_numbers(config) + config.to_yaml()
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    write_whole(path, text)
    return True


def _true_numbers(config: RunConfig) -> str:
    """Comment lines for config.yaml: numbers of the model that follow from its folders or other parts and differ from
    the settings. The settings stay as they are, since a resumed run is compared with them."""
    if (known := resolved(config.model)) is None:
        return ""
    said, true = (dict(leaves({"model": as_plain(model)})) for model in (config.model, known))
    found = [f"#   {name}: {value}" for name, value in true.items() if said.get(name) != value]
    if not found:
        return ""
    head = "# What the folders and other parts of the model decide; what is written for these below is not used."
    return "\n".join([head, *found, ""])


def leaves(
    tree: Mapping[str, object], known: Mapping[str, object] | None = None, path: str = ""
) -> Iterator[tuple[str, object]]:
    """(section.key, value). Lists end a path, and so does a mapping that is itself a value of `known`."""
    for name, value in tree.items():
        key = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping) and value and key not in (known or {}):
            yield from leaves(value, known, key)
        else:
            yield key, value
