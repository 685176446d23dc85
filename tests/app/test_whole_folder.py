"""What a command writes into a folder is seen when it is complete, whatever the folder is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from app.export.whole_folder import check_free, whole_folder
from ops.typed import ConfigError


def write(to: Path) -> None:
    """As an export does."""
    check_free(to)
    with whole_folder(to, last="index") as work:
        assert not (set(os.listdir(to)) - {work.name} if to.is_dir() else to.exists()), "nothing is seen yet"
        (work / "part").mkdir()
        (work / "part" / "weights").write_text("1")
        (work / "index").touch()


@pytest.mark.parametrize("kind", ["none", "folder", "link", "link to none", "here", "mount", "object storage"])
def test_all_of_it_stands_there_in_the_end(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = real = tmp_path / "out"
    if kind in ("folder", "here", "mount", "object storage"):
        to.mkdir()
    elif kind.startswith("link"):
        real = tmp_path / "disk" / "real"
        real.mkdir(parents=True)
        to.symlink_to(real)
        if kind == "link to none":
            real.rmdir()
    if kind == "here":
        monkeypatch.chdir(to)
        to = Path(".")
    rename, moved = os.rename, list[str]()

    def rename_within(path: Path, place: Path) -> None:
        if kind == "mount" and real in (path, place):
            raise OSError(errno.EBUSY, "Device or resource busy")
        moved.append(place.name)
        if kind == "object storage" and path.is_dir():
            raise OSError(errno.ENOTSUP, "Operation not supported")
        rename(path, place)

    def keep(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    rmdir = Path.rmdir
    monkeypatch.setattr(os, "rename", rename_within)
    monkeypatch.setattr(Path, "rmdir", lambda path: keep(path) if path == real else rmdir(path))
    write(to)
    assert sorted(os.listdir(real)) == ["index", "part"] and (to / "part" / "weights").read_text() == "1"
    assert moved[-1] == ("index" if kind not in ("none", "link to none") else real.name), (
        "what names the others is last"
    )
    assert [name for name in os.listdir(real.parent) if name.startswith(".")] == []
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        check_free(to)


@pytest.mark.parametrize("there", [True, False])
def test_what_fails_leaves_nothing_and_what_was_killed_does_not_stay(there: bool, tmp_path: Path) -> None:
    to = tmp_path / "out"
    if there:
        to.mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt), whole_folder(to, last="index") as work:
        (work / "left").touch()
        raise KeyboardInterrupt
    assert sorted(tmp_path.rglob("*")) == before
    work.mkdir()
    (work / "left").touch()  # by one that was killed
    write(to)
    assert sorted(os.listdir(to)) == ["index", "part"] and os.listdir(tmp_path) == ["out"]


def test_what_cannot_be_moved_up_leaves_an_empty_folder_for_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"), whole_folder(tmp_path, "z") as work:
        for name in ("a", "z"):
            (work / name).touch()
        rename = os.rename
        patch.setattr(os, "rename", lambda path, place: (full if path.name == "z" else rename)(path, place))
        patch.setattr("shutil.copyfile", full)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path)
