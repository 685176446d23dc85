"""Ends of JSON-lines files, however long the files are: only the bytes that are needed are read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from ops.line_file import end_of_whole_lines

JsonObject = dict[str, object]

_CHUNK = 64 * 2**10


def backwards(path: Path) -> Iterator[tuple[int, JsonObject]]:
    """(offset, record) of the whole lines of a file, newest first. What is no JSON object is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        end, rest = end_of_whole_lines(file), b""
        while end > 0 or rest:
            start = max(0, end - _CHUNK)
            file.seek(start)
            data = file.read(end - start) + rest
            cut = data.find(b"\n") + 1 if start > 0 else 0  # what stands before it began in an earlier chunk
            at = start + len(data)
            for line in reversed(data[cut:].splitlines(keepends=True)):
                at -= len(line)
                if (record := json_object(line)) is not None:
                    yield at, record
            rest = data[:cut] if start > 0 else b""
            end = start


def offset_of_newest(path: Path, lines: int) -> int:
    """Where the newest `lines` whole lines of a file begin; 0 if it has no more than these."""
    with path.open("rb") as file:
        end = end_of_whole_lines(file)
        left = lines + 1  # line breaks: the one before the first of these lines, too
        while end > 0:
            start = max(0, end - _CHUNK)
            file.seek(start)
            data = file.read(end - start)
            found = data.count(b"\n")
            if found >= left:
                at = len(data)
                for _ in range(left):
                    at = data.rfind(b"\n", 0, at)
                return start + at + 1
            left, end = left - found, start
    return 0


def next_line(path: Path, start: int) -> int:
    """Where the first line of a file begins that begins at byte `start` or later."""
    if start == 0:
        return 0
    with path.open("rb") as file:
        file.seek(start - 1)
        file.readline()
        return file.tell()


def num_lines(path: Path, end: int | None = None) -> int:
    """Line breaks of a file, or of what stands before `end`."""
    found, left = 0, math.inf if end is None else end
    with path.open("rb") as file:
        while left > 0 and (data := file.read(int(min(_CHUNK, left)))):
            found, left = found + data.count(b"\n"), left - len(data)
    return found


def last_line(path: Path) -> JsonObject | None:
    """The newest whole record, or None."""
    return next((record for _, record in backwards(path)), None)


def json_object(line: bytes) -> JsonObject | None:
    """The object that a line holds, or None. The half line of a killed writer may have been completed by the next
    writer."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def number_in(record: JsonObject, key: str, otherwise: float) -> float:
    """The number under a key, or `otherwise` where there is none."""
    value = record.get(key)
    return value if isinstance(value, int | float) else otherwise
