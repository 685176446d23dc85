"""A JSON-lines file that grows by whole lines, also where the disk is full for a while."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ops.standard_out import STDOUT, is_stdout

_CHUNK = 64 * 2**10


class LineFile:
    """Lines are added all together or not at all. Opened with the first of them, after the last whole line: a killed
    writer may have left half of one; on stdout after what is printed there, whatever that is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._cut_at: int | None = None  # where lines begin of which only a part was written

    def add(self, lines: Iterable[str]) -> None:
        """Raises OSError; what was written until then is cut off, now or before the next lines."""
        data = memoryview("".join(f"{line}\n" for line in lines).encode())
        try:
            file = self._opened()
            self._cut_at = os.fstat(file).st_size
            while data:
                data = data[os.write(file, data) :]
            self._cut_at = None
        except OSError:
            with suppress(OSError):  # the disk takes no change at all, or the file has moved to another server
                self._cut()
            with suppress(OSError):
                self.close()
            raise

    def tell(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size if self.path.exists() else 0

    def sync(self) -> None:
        """Lines that are there outlast a power cut. Raises OSError."""
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        """The next lines open it again."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _opened(self) -> int:
        if self._file is None:
            self._file = os.dup(STDOUT) if is_stdout(self.path) else self._at_its_end()
        return self._file

    def _at_its_end(self) -> int:
        self._cut()
        cut_torn_line(self.path)
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _cut(self) -> None:
        if self._cut_at is not None:
            os.truncate(self.path, self._cut_at)
            self._cut_at = None


def cut_torn_line(path: Path) -> None:
    """Leave whole lines only: a killed writer may have left half of one. Nothing happens to what does not exist or
    is no file, such as a pipe."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        size = file.seek(0, 2)
        whole = end_of_whole_lines(file)
        if whole < size:
            file.truncate(whole)


def end_of_whole_lines(file: BinaryIO) -> int:
    """Offset after the last line break; 0 without one."""
    end = file.seek(0, 2)
    while end > 0:
        start = max(0, end - _CHUNK)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0
