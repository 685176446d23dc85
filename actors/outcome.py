"""How a run ends, and who is told what happens until then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from actors.records.events import RunEvent
from actors.records.metrics_line import StepMetrics
from actors.records.span_record import SpanRecord
from actors.step import StepAssignment


class Listener(Protocol):
    """Who is told what happens; the application writes files, the tests collect."""

    def on_step(self, metrics: StepMetrics, timeline: Sequence[SpanRecord], plan: StepAssignment) -> None: ...
    def on_event(self, event: RunEvent) -> None: ...
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


class Superseded(RuntimeError):
    """Another start has taken over this run's folder: this controller must not write there any more."""


def continues(error: BaseException) -> bool:
    """Whether another controller can go on from the keepers: faults of the cluster, not of what ran on it."""
    from ray.exceptions import RayError, RayTaskError

    return isinstance(error, RayError) and not isinstance(error, RayTaskError)


def only_in_memory(step: int, on_disk: int, run_dir: Path) -> str:
    """One sentence for a run whose last committed step could not be written."""
    disk = f"on disk is the checkpoint after {on_disk + 1} steps" if on_disk >= 0 else "no checkpoint is on disk"
    return (
        f"{step + 1} steps are committed, {disk}, and the rest is only in the memory of the cluster, whose keepers "
        f"stay: make room in {run_dir} and continue with --resume on this cluster. A local cluster ends with its "
        f"run, which then continues from the disk."
    )


EXIT_RESUMABLE = 75  # EX_TEMPFAIL: start the run again when there is capacity
