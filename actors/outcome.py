"""How a run ends, and who is told what happens until then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Listener(Protocol):
    """Who is told what happens; the application writes files, the tests collect."""

    def on_step(self, metrics: Mapping[str, Any], timeline: Sequence[Mapping[str, Any]], plan: Any) -> None: ...
    def on_event(self, event: Mapping[str, Any]) -> None: ...
    def on_checkpoint(self, folder: Path, step: int) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended. `code` is the process's exit code: 0 ok, 1 failure, 75 stopped but resumable."""

    code: int
    reason: str
    last_step: int


class StopRun(RuntimeError):
    """The run ends here with this outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome
