"""A folder that storage does not list for a moment is none that holds nothing."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.feed import encoders
from actors.pool.workers import weights_bytes
from actors.state.checkpoint_files import step_folders
from app.check.facts import digest_of
from app.export.frozen_parts import link_tree
from app.run.ray_files import check_no_sessions
from app.settings import resume
from data.dataset import index_build
from data.errors import DataIOError
from data.storage import expand
from data.tools.convert import check_out
from ops.listing import names_in, paths_below
from tests.families.kit import MODEL


@pytest.mark.parametrize(
    "ask",
    [
        step_folders,
        resume._trained,
        resume._contents,
        lambda folder: encoders._stamp([folder]),
        lambda folder: weights_bytes(replace(MODEL, dit=replace(MODEL.dit, path=str(folder)))),
        lambda folder: digest_of(str(folder)),
        lambda folder: link_tree(folder, folder / "to"),
        check_no_sessions,
        index_build._states_in,
        check_out,
        lambda folder: expand(f"{folder}/*.tar", (".tar",)),
        lambda folder: expand(f"{folder}/**/*.tar", (".tar",)),
    ],
    ids=[
        *("checkpoints", "state", "same files", "encoder", "weights", "nodes", "export", "sessions", "index", "shards"),
        *("pattern", "deep pattern"),
    ],
)
def test_what_cannot_be_listed_now_is_not_taken_for_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Path], Any]
) -> None:
    """Since Python 3.13 globs of a Path give nothing there: a run whose checkpoints were not listed began anew."""

    def silent(folder: object = ".") -> Any:
        raise OSError(errno.EIO, "Input/output error", str(folder))

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter(()))
    monkeypatch.setattr(Path, "rglob", lambda folder, pattern: iter(()))
    monkeypatch.setattr(os, "scandir", silent)
    monkeypatch.setattr(os, "listdir", silent)
    with pytest.raises((OSError, DataIOError), match="Input/output error"):
        ask(tmp_path)


def test_entries_are_those_of_a_folder_and_none_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / ".c").touch()
    (tmp_path / "link").symlink_to("a")
    assert sorted(names_in(tmp_path / "a")) == [".c", "b"]
    assert names_in(tmp_path / "gone") == names_in(tmp_path / "a" / ".c") == []
    assert sorted(paths_below(tmp_path)) == sorted(tmp_path.rglob("*"))
    assert paths_below(tmp_path / "gone") == []
