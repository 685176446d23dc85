"""Files that appear whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ops.whole_file import whole_file, write_whole


def test_a_file_is_replaced_by_all_of_its_content(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    write_whole(path, "\u00e4\n")
    assert path.read_bytes() == b"\xc3\xa4\n"
    write_whole(path, b"\0\r\n", synced=True)
    assert path.read_bytes() == b"\0\r\n"
    assert os.listdir(tmp_path) == ["facts.json"]


def test_nobody_meets_a_file_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    write_whole(path, "before")
    with whole_file(path) as mine, whole_file(path) as other:
        mine.write_text("hal")
        other.write_text("by another process")
        assert path.read_text() == "before" and mine.parent == other.parent == tmp_path
    assert path.read_text() == "hal" and os.listdir(tmp_path) == ["facts.json"]


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path, fault: BaseException) -> None:
    path = tmp_path / "facts.json"
    write_whole(path, "before")
    with pytest.raises(type(fault)), whole_file(path) as part:
        part.write_text("hal")
        raise fault
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["facts.json"]


def test_a_synced_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("on disk"), fsync(file))[1])
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("named"), replace(*names))[1])
    write_whole(tmp_path / "facts.json", "now", synced=True)
    write_whole(tmp_path / "facts.json", "later")
    assert done == ["on disk", "named", "named"]
