"""What a process computes with: versions of the program and its libraries, the commit of its tree, driver, GPU."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from ops.code_path import ROOT

if TYPE_CHECKING:
    import torch

LAYERS = ("app", "actors", "data", "ops")
PACKAGES = ("ray", "torch", "diffusers", "transformers", "numpy", "pyarrow", "av")
_DRIVER = Path("/sys/module/nvidia/version")
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def software(root: Path = ROOT) -> dict[str, str]:
    """Versions of what a run computes with, here; "heddle" is a digest of the program's files below `root`."""
    found = {"python": platform.python_version(), "heddle": digest_of_program(root)}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    with suppress(OSError):
        found["driver"] = _DRIVER.read_text().strip()
    return found


def digest_of_program(root: Path = ROOT, folders: Sequence[str] = LAYERS) -> str:
    """The digest of the program's files in these folders."""
    digest = blake2b(digest_size=4)
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def environment(device: torch.device) -> tuple[tuple[str, str], ...]:
    """What `software` finds in a worker on this device, in order, with the commit, CUDA's version and the GPU's name
    where there are any. Never raises: what cannot be found is left out."""
    found: dict[str, str] = {}
    with suppress(Exception):  # files that go meanwhile, a package whose metadata is damaged
        found = software()
    if commit := commit_of(ROOT):
        found["commit"] = commit
    with suppress(Exception):  # nothing of this is worth a worker
        import torch

        if torch.version.cuda:
            found["cuda"] = torch.version.cuda
        if device.type == "cuda":
            found["gpu"] = torch.cuda.get_device_name(device)
    return tuple(sorted(found.items()))


def commit_of(root: Path) -> str:
    """The commit that the working tree of `root` is on, by git's files alone; "" where there is no such tree. Changes
    that are not committed do not show in it: the digest of `software` has them."""
    with suppress(OSError, ValueError):
        git = root / ".git"
        if git.is_file():  # of a worktree: "gitdir: PATH"
            git = (root / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()).resolve()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if _COMMIT.fullmatch(head):
            return head
        shared = git
        if (link := git / "commondir").is_file():
            shared = (git / link.read_text(encoding="utf-8").strip()).resolve()
        return _value(git, shared, head.removeprefix("ref:").strip())
    return ""


def _value(git: Path, shared: Path, name: str) -> str:
    """The commit of a branch: in a file of its own, or among those that are packed. Raises OSError, ValueError."""
    for folder in (git, shared):
        if (file := folder / name).is_file():
            found = file.read_text(encoding="utf-8").strip()
            return found if _COMMIT.fullmatch(found) else ""
    for line in (shared / "packed-refs").read_text(encoding="utf-8").splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name and _COMMIT.fullmatch(commit):
            return commit
    return ""
