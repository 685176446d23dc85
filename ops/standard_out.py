"""A file that is to be written may be where this process prints: /dev/stdout, so that another program reads it."""

from __future__ import annotations

import os
from pathlib import Path

STDOUT = 1  # its descriptor


def is_stdout(path: Path | None) -> bool:
    """Whether what is written there lies among what this process prints: in a pipe, or in the file of `> FILE`."""
    try:
        return path is not None and os.path.samestat(path.stat(), os.fstat(STDOUT))
    except OSError:  # there is no such file yet, or stdout is closed
        return False
