"""Which Heddle wrote a config: a later one may have settings that this one does not know, which are no misspelling."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from app.settings.files import SET
from ops.code_path import ROOT
from ops.environment import commit_of
from ops.typed import ConfigError, UnknownKey

VERSION = "0.2.0"  # of pyproject.toml: also where the package is not installed
_LINE = re.compile(r"^# Written by Heddle (\d+(?:\.\d+)*)(?:, commit ([0-9a-f]+))?", re.MULTILINE)


def header() -> str:
    """The line of a written config that says it; between two versions the commit of the working tree does."""
    commit = f", commit {_commit()}" if _commit() else ""
    return f"# Written by Heddle {VERSION}{commit}.\n"


@cache
def _commit() -> str:
    """That of the working tree, as people write it; "" where the package is installed without one."""
    return commit_of(ROOT)[:10]


def writer(text: str) -> str:
    """The version that wrote this config; "" where it does not say."""
    return found[1] if (found := _LINE.search(text)) is not None else ""


def newer(text: str) -> str:
    """The version that wrote this config, if it is later than this one; else ""."""
    found = writer(text)
    return found if found and _parts(found) > _parts(VERSION) else ""


@contextmanager
def explained(text: str) -> Iterator[None]:
    """Around the reading of a config of this text: says of a key that a later Heddle has written that this is what it
    is."""
    try:
        yield
    except UnknownKey as error:
        version = newer(text)
        if error.node.where == SET:
            raise
        if not version:
            found = _LINE.search(text)
            if found is None or found[1] != VERSION or not _commit() or found[2] in (None, _commit()):
                raise
            raise ConfigError(
                f"{error} Where it is no misspelling: the file was written by Heddle {VERSION} at commit {found[2]}, "
                f"and this one is at {_commit()}."
            ) from None
        raise ConfigError(
            f"{error.key}{error.node.at()} is no setting of this Heddle, {VERSION}; the file was written by Heddle "
            f"{version}. Use that version or a later one."
        ) from None


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
