"""Which Heddle wrote a config: a later one may have settings that this one does not know, which are no misspelling."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ops.typed import ConfigError, UnknownKey

VERSION = "0.2.0"  # of pyproject.toml: also where the package is not installed
SET = "--set"  # where a node was written that no file has
_LINE = re.compile(r"^# Written by Heddle (\d+(?:\.\d+)*)", re.MULTILINE)


def header() -> str:
    """The line of a written config that says it."""
    return f"# Written by Heddle {VERSION}.\n"


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
        if not version or error.node.where == SET:
            raise
        raise ConfigError(
            f"{error.key}{error.node.at()} is no setting of this Heddle, {VERSION}; the file was written by Heddle "
            f"{version}. Use that version or a later one."
        ) from None


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
