"""Ray's files of one machine in a folder of their own, so that they go with it: sessions with logs (3 to 8 MB) and what
was spilled of the object store (as much as the disk has)."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from ops.listing import names_in
from ops.typed import ConfigError

_NO_SESSIONS = ("ray_current_cluster", "prom_metrics_service_discovery.json")


def check_no_sessions(folder: Path) -> None:
    """Called before Ray starts with this folder as its `--temp-dir`. Raises ConfigError where it has sessions of Ray
    already: their processes may live, and `remove_ray_files` cannot tell them from its own."""
    if found := sorted(name for name in names_in(folder) if name.startswith("session_")):
        raise ConfigError(
            f"--temp-dir {folder} has files of another Ray ({found[0]}), and those of this one are removed at its "
            f"end; give a folder of its own, or remove that one if no Ray on this machine uses it."
        )


def remove_ray_files(folder: Path, *, logs: bool) -> None:
    """Remove what Ray has spilled in a folder that was its `--temp-dir`; with `logs` all that it has made there, and
    the folder if nothing else is in it. What cannot be removed stays."""
    if not logs:
        for spilled in folder.glob("session_*/ray_spilled_objects*"):
            shutil.rmtree(spilled, ignore_errors=True)
        return
    for found in [*folder.glob("session_*"), *(folder / name for name in _NO_SESSIONS)]:
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found, ignore_errors=True)
        else:  # session_latest is a link
            with suppress(OSError):
                found.unlink()
    with suppress(OSError):
        folder.rmdir()
