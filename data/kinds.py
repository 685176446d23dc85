"""The kinds of sources by name: the files of readers/kinds/, which are not loaded to be named; `auto` is the kind that
a source's files have."""

from __future__ import annotations

from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal

KINDS = tuple(sorted(module.name for module in iter_modules([str(Path(__file__).parent / "readers" / "kinds")])))

if TYPE_CHECKING:
    SourceKind = str
else:
    SourceKind = Literal["auto", *KINDS]
    """For configs: their reader refuses other names and offers the nearest."""
