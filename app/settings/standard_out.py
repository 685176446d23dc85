"""What a command says where a file that it is to write is where it prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from ops.standard_out import is_stdout


@contextmanager
def talk_beside(*outs: Path | None) -> Iterator[None]:
    """Within, what is said to a person goes to stderr where one of the files is stdout, and does not lie in it."""
    if not any(map(is_stdout, outs)):
        yield
        return
    with redirect_stdout(sys.stderr):
        yield
