"""Reads the folder of a run, tolerantly: the run may be alive, or may have died in the middle of a line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import yaml

from actors.records.events import RunEvent, event_of
from actors.records.lines import RecordError
from actors.records.metrics_line import StepMetrics, metrics_of
from actors.records.plan_record import PlanRecord, plan_of
from actors.records.span_record import SpanRecord, span_of
from app.records.tails import JsonObject, next_line, num_lines, offset_of_newest
from ops.typed import ConfigError

R = TypeVar("R")
METRICS = "metrics.jsonl"
ENVIRONMENT = "env.json"  # what the workers compute with now
WORKERS, OLDER_WORKERS = "workers.jsonl", "workers.1.jsonl"  # figures of single workers, of the newest steps
TIMELINE, OLDER_TIMELINE = "timeline.jsonl", "timeline.1.jsonl"
_LATER = "later-than-"  # folders begin so of what came after a checkpoint to which the run has gone back


@dataclass(frozen=True, slots=True)
class RunDir:
    """Readers of one run folder. A file that does not exist reads as empty."""

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """Raises ConfigError when `path` is not the folder of a run."""
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(f"run directory {folder} does not exist; give that of a run, such as runs/demo.")
        if not (folder / "config.yaml").is_file():
            raise ConfigError(
                f"{folder} is not a run directory, for it has no config.yaml; give that of a run, such as runs/demo."
            )
        return cls(folder)

    def name(self) -> str:
        """The run's name, or that of its folder."""
        return str(self._setting("run", "name") or self.path.name)

    def prompts(self) -> list[str]:
        """What the samples of the run show."""
        given = self._setting("sample", "prompts")
        return [str(prompt) for prompt in given] if isinstance(given, list) else []

    def _setting(self, section: str, key: str) -> object:
        """A value of config.yaml, which an earlier version may have written; None where it has none."""
        value: object = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        for name in (section, key):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def metrics(self) -> Records[StepMetrics]:
        """One record per step, in step order, as the file has them."""
        return Records((self.path / METRICS,), metrics_of)

    def events(self) -> Records[RunEvent]:
        return Records((self.path / "events.jsonl",), event_of)

    def spans(self) -> Records[SpanRecord]:
        """Executed spans of the timeline, in the order they were written."""
        return Records((self.path / OLDER_TIMELINE, self.path / TIMELINE), span_of)

    def newest_spans(self, most: int) -> tuple[Records[SpanRecord], bool]:
        """The newest spans, at most `most` of them, and whether there are older ones. What is older is not read."""
        paths, left = self.spans().paths, most
        starts: dict[Path, int] = {}
        for path in reversed([path for path in paths if path.is_file()]):
            if left > 0:
                starts[path] = offset_of_newest(path, left)
                left = 0 if starts[path] else left - num_lines(path)
        older = any(starts.values()) or any(path.is_file() for path in paths if path not in starts)
        return Records(tuple(path for path in paths if path in starts), span_of, starts=starts), older

    def plans(self) -> dict[int, PlanRecord]:
        """Executed plans of the newest steps, and of some older ones."""
        plans = {}
        for path in (self.path / "plans").glob("step-*.json"):
            step = path.stem.removeprefix("step-")
            if step.isdigit():
                plans[int(step)] = _plan(path)
        return dict(sorted(plans.items()))

    def samples(self) -> list[Path]:
        """Pictures and clips of samples/, newest step first, prompts in order; without those that were put aside, and
        links to nothing."""
        folder = self.path / "samples"
        found = [path for path in folder.rglob("*") if path.suffix in (".mp4", ".png") and path.is_file()]
        files = [path for path in found if not path.relative_to(folder).parts[0].startswith(_LATER)]
        return sorted(files, key=lambda path: (-_step_of(path), path.name))


def _plan(path: Path) -> PlanRecord:
    try:
        return plan_of(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:  # no JSON, or no plan
        raise ConfigError(f"{path} is not a plan: {error}") from None


def _step_of(path: Path) -> int:
    """N of step-N-01.mp4; -1 for other names."""
    match = re.match(r"step-(\d+)", path.name)
    return int(match[1]) if match else -1


@dataclass(frozen=True, slots=True)
class Records(Generic[R]):
    """Records of JSON-lines files, read one by one whenever they are gone through; none is held.

    Going through them raises ConfigError with the number of a line that is no record.
    """

    paths: tuple[Path, ...]
    record_of: Callable[[JsonObject], R]
    starts: Mapping[Path, int] = field(default_factory=dict)  # bytes of a file that are not read, whole lines

    def __iter__(self) -> Iterator[R]:
        for path in self.paths:
            for number, line in numbered_lines(path, self.starts.get(path, 0)):
                try:
                    yield self.record_of(line)
                except RecordError as error:
                    raise ConfigError(f"{path} line {number}: {error}") from None

    def count(self) -> int:
        """How many there are: lines are counted, and only the last one is parsed."""
        return sum(_count(path) for path in self.paths if path.is_file())


def _count(path: Path) -> int:
    found, last = 0, b""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                found, last = found + 1, line
    try:
        json.loads(last)
    except ValueError:  # torn, or there is none
        return max(0, found - 1)
    return found


def numbered_lines(path: Path, start: int) -> Iterator[tuple[int, JsonObject]]:
    """Objects of a JSON-lines file with the number of each line, from 1; those that begin at byte `start` or later.
    (A live run may have moved another file to this place since `start` was found.)

    A torn last line (the writer died) is left out; a torn line before it raises ConfigError.
    """
    if not path.is_file():
        return
    torn: ConfigError | None = None
    start = next_line(path, start)
    with path.open(encoding="utf-8") as file:
        file.seek(start)
        for number, line in enumerate(file, start=1 + (num_lines(path, start) if start else 0)):
            if not line.strip():
                continue
            if torn is not None:
                raise torn
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                torn = ConfigError(f"{path} line {number} is not JSON: {error.msg}.")
                continue
            yield number, record
