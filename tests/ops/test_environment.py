"""What a process says of its environment; the commit is read from git's own files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from ops import environment as module
from ops.environment import commit_of, environment


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_git_however_the_tree_lies(tmp_path: Path) -> None:
    tree, beside = tmp_path / "tree", tmp_path / "beside"
    tree.mkdir()
    git(tree, "init", "-q", "-b", "main")
    assert commit_of(tree) == "", "nothing is committed"
    git(tree, "commit", "-q", "--allow-empty", "-m", "one")
    git(tree, "worktree", "add", "-q", "-b", "work/deep", str(beside))
    git(beside, "commit", "-q", "--allow-empty", "-m", "two")
    for _ in range(2):
        for folder in (tree, beside):
            assert commit_of(folder) == git(folder, "rev-parse", "HEAD")
        git(tree, "pack-refs", "--all")
    git(tree, "checkout", "-q", "--detach")
    assert commit_of(tree) == git(tree, "rev-parse", "HEAD")
    (tree / ".git" / "HEAD").write_bytes(b"\xff\xfe")
    assert commit_of(tree) == "" == commit_of(tmp_path)


def test_nothing_of_it_ends_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    told = dict(environment(torch.device("cpu")))
    assert told["torch"] == torch.__version__ and {"python", "heddle", "ray"} <= told.keys() and "gpu" not in told

    def gone(*_: object) -> dict[str, str]:
        raise FileNotFoundError("a file that went meanwhile")

    monkeypatch.setattr(module, "software", gone)
    assert "torch" not in dict(environment(torch.device("cuda", 99)))
