"""What a command says and writes where a file that it is to write is where it prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from ops.standard_out import STDOUT, is_stdout


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
    with open(os.dup(STDOUT), "w", encoding="utf-8") as stream:
        stream.write(text)
