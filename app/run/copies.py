"""A run whose folder was copied: the copy is another run, with an id of its own.

The id (`actors/names.py`) names a run's actors in the cluster, so that a start finds what an earlier one has left
there. A copy that kept it would find the original's monitor and keepers, or they would meet in one cluster.
"""

from __future__ import annotations

import os
from pathlib import Path

from actors.names import RUN_ID, known_id
from app.records.trackers import MLFLOW_ID, WANDB_ID
from ops.whole_file import write_whole

PLACE = "run_place"  # in the run's folder: where it lay at its last start
_OWN = (WANDB_ID, MLFLOW_ID, RUN_ID)  # in the order in which they go: while it has the last, it counts as a copy


def keep_apart(folder: Path) -> str:
    """Called before a run starts in its folder, which may not exist, or be empty and is left so. A folder that was
    copied since its last start loses the ids of the original, which is where it lay then and still has the same id; one
    that was moved keeps them. Returns what to tell of it, or ""."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return ""
    place, said = folder / PLACE, ""
    original = Path(os.fsdecode(place.read_bytes()).rstrip("\n")) if place.is_file() else folder
    if not _is_same(original, folder) and (run := known_id(folder)) and run == known_id(original):
        for name in _OWN:
            (folder / name).unlink(missing_ok=True)
        said = f"{folder} is a copy of {original}: from here on it is a run of its own"
    write_whole(place, os.fsencode(f"{folder.resolve()}\n"))  # any bytes make a path
    return said


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
