"""Whether the files that a command is to write, by --out, can be written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ops.typed import ConfigError


def check_writable(files: Iterable[Path | None]) -> None:
    """Before a command begins, for what it writes at its end: a mistyped --out costs no run. Makes missing folders.
    None stands for an option that was not given.

    Raises ConfigError for a file that cannot be written.
    """
    for path in files:
        if path is None:
            continue
        try:
            if path.parent.is_file():
                raise NotADirectoryError(None, f"{path.parent} is a file")
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(None, "Is a directory")
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise PermissionError(None, "Permission denied")
        except OSError as error:
            raise ConfigError(
                f"--out {path} cannot be written ({error.strerror}); give a file in a folder that you may write."
            ) from None
