"""A file that a command is to write may be where it prints: /dev/stdout, so that another program reads it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

_STDOUT = 1  # its descriptor


def is_stdout(path: Path | None) -> bool:
    """Whether what is written there lies among what this process prints: in a pipe, or in the file of `> FILE`."""
    try:
        return path is not None and os.path.samestat(path.stat(), os.fstat(_STDOUT))
    except OSError:  # there is no such file yet, or stdout is closed
        return False


@contextmanager
def talk_beside(*outs: Path | None) -> Iterator[None]:
    """Within, what is said to a person goes to stderr where one of the files is stdout, and does not lie in it."""
    if not any(map(is_stdout, outs)):
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def write_out(path: Path, text: str) -> None:
    """Into the file; on stdout after what is there, which opening /dev/stdout removes from the file of `>> FILE`."""
    if not is_stdout(path):
        path.write_text(text, encoding="utf-8")
        return
    with open(os.dup(_STDOUT), "w", encoding="utf-8") as stream:
        stream.write(text)
