"""Results as JSON lines: one per measurement, written as it comes, read again by the next call."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from app.bench.gpu.measurement import NamedFigures

FILE = "results.jsonl"
RUNNING = "running"  # holds the name of the running measurement, also after the process has died of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The device, versions and commit under which a line was measured."""

    device: str
    torch: str
    triton: str
    cuda: str | None
    python: str
    commit: str | None  # None where there is no git
    command: str
    rehearsal: bool

    @property
    def versions(self) -> str:
        """What computed, for a person: figures of others are not those of these."""
        return f"torch {self.torch}, triton {self.triton}, CUDA {self.cuda or 'none'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultLine:
    """One measurement's outcome: figures, or an error, or why it was left out."""

    name: str
    facts: Facts
    at: str  # ISO 8601, UTC
    seconds: float  # that the measurement took
    figures: NamedFigures = field(default_factory=dict)
    error: str | None = None
    left_out: str | None = None

    @property
    def good(self) -> bool:
        return self.error is None and self.left_out is None

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"figures": {name: _plain(value) for name, value in self.figures.items()}})

    @staticmethod
    def from_json(text: str) -> ResultLine:
        values = json.loads(text)
        known = {one.name for one in fields(ResultLine)}
        return ResultLine(**{k: v for k, v in values.items() if k in known} | {"facts": Facts(**values["facts"])})


def read_lines(folder: Path) -> list[ResultLine]:
    """All lines of a folder, the last one of each name, in the order of their names' first lines.

    A line that was cut off by a death of the process is dropped.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    found: dict[str, ResultLine] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = ResultLine.from_json(text)
        except (ValueError, KeyError, TypeError):
            continue
        found[line.name] = line
    return list(found.values())


def append_line(folder: Path, line: ResultLine) -> None:
    """Add a line. A torn line before it is completed first."""
    path = folder / FILE
    torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if torn else "") + line.to_json() + "\n")


def begin_mark(folder: Path, name: str) -> None:
    """Note what is measured from now on."""
    (folder / RUNNING).write_text(name, encoding="utf-8")


def end_mark(folder: Path) -> tuple[str, float] | None:
    """Remove the note and return what it said and when it was written, if there was one."""
    path = folder / RUNNING
    if not path.is_file():
        return None
    name, began = path.read_text(encoding="utf-8").strip(), path.stat().st_mtime
    path.unlink()
    return (name, began) if name else None


def good_figures(lines: Iterable[ResultLine]) -> dict[str, NamedFigures]:
    return {line.name: line.figures for line in lines if line.good}


def _plain(value: object) -> object:
    """The value, or text for an infinity or NaN, which JSON lacks."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
