"""Lines of a JSON-lines file are all there or none of them, whatever the disk does."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.line_file import LineFile
from tests.blackbox.damage import Full, small_disk


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As many bytes are written as it holds, then the disk is full; while it is empty all are."""
    room: list[int] = []
    write = os.write

    def written(file: int, data: memoryview) -> int:
        if not room:
            return write(file, data)
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(file, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr("ops.line_file.os.write", written)
    return room


@pytest.mark.parametrize("bytes_written", range(12))
def test_lines_that_fail_halfway_are_not_there_and_come_once_with_the_next_try(
    tmp_path: Path, half: list[int], bytes_written: int
) -> None:
    path = tmp_path / "lines.jsonl"
    lines = LineFile(path)
    lines.add(["0"])
    half.append(bytes_written)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            lines.add(["11111", "22222"])
        assert path.read_text() == "0\n"
        half[0] = bytes_written
    half.clear()
    lines.add(["11111", "22222"])
    assert path.read_text() == "0\n11111\n22222\n"


def test_what_cannot_be_cut_at_once_is_cut_before_the_next_lines(
    tmp_path: Path, half: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, truncate = tmp_path / "lines.jsonl", os.truncate
    read_only = [True]

    def truncated(at: Path, size: int) -> None:
        if read_only:
            raise OSError(errno.EROFS, "Read-only file system")
        truncate(at, size)

    monkeypatch.setattr("ops.line_file.os.truncate", truncated)
    lines = LineFile(path)
    half.append(9)
    with pytest.raises(OSError, match="No space left"):
        lines.add(["11111", "22222"])
    assert path.read_text() == "11111\n222"
    half.clear()
    with pytest.raises(OSError, match="Read-only"):
        lines.add(["33333"])
    read_only.clear()
    lines.add(["33333"])
    assert path.read_text() == "33333\n"


def test_half_a_line_of_a_killed_writer_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"b')
    LineFile(path).add(["{}"])
    assert path.read_text() == '{"a": 1}\n{}\n'


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", mib=1) as own:
        if not own:
            pytest.skip("this machine mounts no file system")
        yield tmp_path / "disk"


def test_a_file_system_without_room(disk: Path) -> None:
    lines = LineFile(disk / "lines.jsonl")
    lines.add(["0"])
    full = Full(disk)
    with pytest.raises(OSError, match="No space left") as refused:
        lines.add(["1" * 9000, "2" * 9000])
    assert refused.value.errno == errno.ENOSPC and lines.path.read_text() == "0\n"
    full.back()
    lines.add(["1" * 9000, "2" * 9000])
    assert [len(line) for line in lines.path.read_text().splitlines()] == [1, 9000, 9000]
