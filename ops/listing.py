"""What folders hold, or the error that keeps storage from saying it.

Since Python 3.13 `Path.glob` and `rglob` give nothing where a folder cannot be listed, whatever keeps it from that: a
file server that does not answer for a moment looks like one that holds nothing. Where that makes a difference, these
are used.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def is_nothing(error: OSError) -> bool:
    """Whether an error says that nothing is there: links that lead to each other lead nowhere."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def names_in(folder: Path) -> list[str]:
    """Names of what is in a folder, hidden ones too, in no order; none without a folder. Raises any other OSError."""
    try:
        return os.listdir(folder)
    except OSError as error:
        if is_nothing(error):
            return []
        raise


def nearest_folder(path: Path) -> Path:
    """The folder, or the first one above it that is there."""
    return next(place for place in (path, *path.parents) if place.is_dir())


def paths_below(folder: Path) -> list[Path]:
    """What is in a folder and in those below it, in no order. Links to folders are not followed, and folders that may
    not be read are passed over. Raises any other OSError."""

    def refuse(error: OSError) -> None:
        if not (is_nothing(error) or isinstance(error, PermissionError)):
            raise error

    return [
        Path(place, name) for place, folders, files in os.walk(folder, onerror=refuse) for name in (*folders, *files)
    ]
