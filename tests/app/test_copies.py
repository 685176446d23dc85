"""A copied folder is another run; a moved one is the same."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from actors.names import run_id
from app.records.trackers import WANDB_ID
from app.run.copies import keep_apart


def started(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").touch()
    keep_apart(folder)
    (folder / WANDB_ID).write_text("page")
    return run_id(folder)


def test_a_copy_gets_ids_of_its_own_and_the_original_keeps_its(tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    ours = started(original)
    shutil.copytree(original, copy)
    assert f"{copy} is a copy of {original}" in keep_apart(copy)
    assert not (copy / WANDB_ID).exists() and run_id(copy) != ours
    theirs = run_id(copy)
    assert keep_apart(copy) == "" == keep_apart(original)
    assert (run_id(copy), run_id(original)) == (theirs, ours) and (original / WANDB_ID).exists()


@pytest.mark.parametrize("cut_short", [1, 2, 3])
def test_a_copy_whose_start_is_cut_short_gets_ids_of_its_own_at_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_short: int
) -> None:
    """It wrote on the original's pages."""
    original, copy = tmp_path / "original", tmp_path / "copy"
    ours, unlink, left = started(original), Path.unlink, [cut_short]
    shutil.copytree(original, copy)

    def killed(path: Path, missing_ok: bool = False) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "unlink", killed)
        keep_apart(copy)
    keep_apart(copy)
    assert run_id(copy) != ours and not (copy / WANDB_ID).exists()


def test_a_moved_folder_and_one_that_is_named_otherwise_stay_the_run_that_they_were(tmp_path: Path) -> None:
    ours = started(tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "second")
    assert keep_apart(tmp_path / "second") == "" and run_id(tmp_path / "second") == ours
    (tmp_path / "link").symlink_to(tmp_path / "second")
    assert keep_apart(tmp_path / "link") == "" and run_id(tmp_path / "link") == ours


def test_a_folder_whose_name_is_no_utf8_is_a_run_as_any_other(tmp_path: Path) -> None:
    original, copy = (tmp_path / os.fsdecode(name) for name in (b"run\xe9", b"copy\xe9"))
    ours = started(original)
    shutil.copytree(original, copy)
    assert keep_apart(original) == "" and keep_apart(copy)
    assert run_id(copy) != ours == run_id(original) and ours.startswith("run?-")


def test_a_folder_of_an_earlier_version_and_one_that_is_not_there_are_left_as_they_are(tmp_path: Path) -> None:
    new, empty = tmp_path / "new", tmp_path / "empty"
    assert keep_apart(new) == "" and not new.exists()
    empty.mkdir()
    assert keep_apart(empty) == "" and not any(empty.iterdir()), "a start refuses a folder that holds something"
    ours = run_id(tmp_path)
    assert keep_apart(tmp_path) == "" and run_id(tmp_path) == ours


@pytest.mark.parametrize("left", [None, ""])
def test_a_disk_that_is_full_when_the_id_is_written_leaves_a_run_that_gets_one_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str | None
) -> None:
    """An empty one would be that of every such run: their actors would have the same names."""
    if left is not None:
        (tmp_path / "run_id").write_text(left)  # as by a version that wrote it in place
    with monkeypatch.context() as patched:
        for name in ("write_text", "write_bytes"):
            patched.setattr(Path, name, full_disk)
        with pytest.raises(OSError, match="No space left"):
            run_id(tmp_path)
    ours = run_id(tmp_path)
    assert ours.startswith(f"{tmp_path.name}-") and run_id(tmp_path) == ours
    assert [file.name for file in tmp_path.iterdir()] == ["run_id"]


def full_disk(path: Path, content: str | bytes, **given: str) -> None:
    path.touch()  # there is room for a name
    raise OSError(errno.ENOSPC, "No space left on device", str(path))
