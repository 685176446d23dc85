"""Ray's files of one machine in a folder of their own, so that they go with it: sessions with logs (3 to 8 MB) and what
was spilled of the object store (as much as the disk has)."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

_NO_SESSIONS = ("ray_current_cluster", "prom_metrics_service_discovery.json")


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
