"""A folder that appears when all that is in it is written, also where an empty one is there already: a mount point,
the current folder, a link to another disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ops.typed import ConfigError

_WITHIN = ".heddle-export.part"


@contextmanager
def whole_folder(to: Path, last: str) -> Iterator[Path]:
    """Where to write what shall stand in `to`: an empty folder that is not seen, on the same file system. It gets its
    name when the block ends, and is removed when the block raises.

    An empty folder that is there is not replaced, as a mount point cannot be: the hidden one lies in it, and what it
    has is moved up in the end, the entry `last` after the others; copied where the file system renames no folders, as
    mounts of object storage. Nothing of it stays where that fails.
    """
    target = Path(os.path.realpath(to))  # of a link the folder itself
    there = target.is_dir()
    work = target / _WITHIN if there else target.with_name(f".{target.name}.part")
    shutil.rmtree(work, ignore_errors=True)  # of one that was killed
    work.mkdir(parents=True)
    try:
        yield work
    except BaseException:
        shutil.rmtree(work)
        raise
    if not there:
        work.rename(target)
        return
    moved: list[Path] = []
    try:
        for entry in sorted(work.iterdir(), key=lambda one: one.name == last):
            moved.append(target / entry.name)
            shutil.move(entry, moved[-1], copy_function=shutil.copyfile)
    except BaseException:
        for path in (work, *moved):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise
    work.rmdir()


def check_free(to: Path) -> None:
    """Raises ConfigError where `to` is there, and is no empty folder; what `whole_folder` has left there when it was
    killed does not count."""
    if to.exists() and (not to.is_dir() or any(entry.name != _WITHIN for entry in to.iterdir())):
        raise ConfigError(f"{to} exists and is not an empty folder; choose another --to.")
