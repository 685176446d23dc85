"""A file that is to be written may be where this process prints: /dev/stdout, so that another program reads it."""

from __future__ import annotations

import os
from os.path import samestat
from pathlib import Path

STDOUT = 1  # its descriptor


def is_stdout(path: Path | None) -> bool:
    """Whether what is written there lies among what this process prints: in a pipe, or in the file of `> FILE`. Nothing
    does in the null device, which is the stdout of many services."""
    try:
        found = None if path is None else path.stat()
        return found is not None and samestat(found, os.fstat(STDOUT)) and not samestat(found, os.stat(os.devnull))
    except OSError:  # there is no such file yet, or stdout is closed
        return False
