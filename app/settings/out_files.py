"""The files that a command is to write, by --out and the like: whether they can be written, and pages as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ops.typed import ConfigError
from ops.whole_file import write_whole

PAGES = (".html", ".htm")


def check_page(path: Path | None, option: str = "--out") -> None:
    """As `check_writable`, for an HTML page. Raises ConfigError also where the page would replace a file that is none,
    such as a run's records."""
    if path is not None and path.is_file() and path.suffix.lower() not in PAGES:
        raise ConfigError(f"{option} {path} is there and no page; give a file that ends in {PAGES[0]}.")
    check_writable([path], option)


def put_page(path: Path, text: str) -> None:
    """In the place of an earlier one, which a full disk leaves as it was. What is no file, such as a pipe, and a file
    in a folder that takes no others, are written as they are."""
    target = Path(os.path.realpath(path))  # what a link leads to, whose place is not for a page
    if path.exists() and not path.is_file():  # /dev/stdout leads to what has no path
        path.write_text(text, encoding="utf-8")
    elif not os.access(target.parent, os.W_OK | os.X_OK):
        target.write_text(text, encoding="utf-8")
    else:
        write_whole(target, text)


def check_writable(files: Iterable[Path | None], option: str = "--out") -> None:
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
                f"{option} {path} cannot be written ({error.strerror}); give a file in a folder that you may write."
            ) from None
