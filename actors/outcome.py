"""How a run ends, and what listens to it until then."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from actors.records.events import CheckpointWritten, RunEvent
from ops.counted import counted

if TYPE_CHECKING:  # the command line asks for exit codes, and has no time for NumPy
    from actors.records.metrics_line import StepMetrics
    from actors.records.span_record import SpanRecord
    from actors.step import StepAssignment

log = logging.getLogger(__name__)


class Exit(IntEnum):
    """Exit codes of every process of this program; `heddle --help` lists them, docs/records.md explains them."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    PLAN = 3
    DATA = 4
    RESUMABLE = 75  # EX_TEMPFAIL: start the run again when there is capacity
    INTERRUPTED = 130


class Listener(Protocol):
    """What a run calls when something happens; the application writes files, the tests collect."""

    def on_step(self, metrics: StepMetrics, timeline: Sequence[SpanRecord], plan: StepAssignment) -> None:
        """Raises NotRecorded where the step has no line then, and the same call may succeed later."""
        ...

    def on_event(self, event: RunEvent) -> None: ...
    def before_checkpoint(self) -> None:
        """One begins to be written. What `on_step` has written shall outlast a power cut, as the checkpoint will."""
        ...

    def on_checkpoint(self, folder: Path, step: int) -> None: ...
    def newest_line(self) -> tuple[int, int] | None:
        """(step, generation) of the newest line of metrics, also of an earlier controller's; None without one."""
        ...


Tell = Callable[[RunEvent], None]  # what a part of the run says into events.jsonl; nothing comes back


def silent(event: RunEvent) -> None:
    """Does nothing."""


class Events:
    """Tells the listener what happens, with the time and the generation. All parts of a run are given the same one."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._generation = 0
        self._ending = False

    def begin(self, generation: int) -> None:
        """What happens from now on happens in this generation."""
        self._generation = generation

    def end(self) -> None:
        """The run ends: from now on the state comes first, also where no event can be written any more."""
        self._ending = True

    def tell(self, event: RunEvent) -> None:
        """Raises what the listener raises, unless the run ends."""
        try:
            self.listener.on_event(event.stamped(self._generation))
        except Exception:
            if not self._ending:
                raise
            log.warning("not written: %s", event)

    def before_checkpoint(self) -> None:
        """One begins to be written."""
        self.listener.before_checkpoint()

    def checkpoint(self, folder: Path, step: int) -> None:
        """This folder holds the whole state after `step`. Raises as `tell`: at the end of a run another state may still
        have to be written."""
        self.tell(CheckpointWritten(step=step, folder=folder.name))
        try:
            self.listener.on_checkpoint(folder, step)
        except Exception:
            if not self._ending:
                raise
            log.warning("the listener failed at checkpoint %s", folder.name, exc_info=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended. `code` is the process's exit code."""

    code: int
    reason: str
    last_step: int


class StopRun(RuntimeError):
    """The run ends here with this outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


class NotRecorded(RuntimeError):
    """The run's files take nothing now, for a reason that may pass: its cause is the OSError."""


class Superseded(RuntimeError):
    """Another start has taken over this run's folder: this controller must not write there any more."""


def continues(error: BaseException) -> bool:
    """Whether another controller can go on from the keepers: faults of the cluster, not of what ran on it."""
    from ray.exceptions import RayError, RayTaskError

    return isinstance(error, RayError) and not isinstance(error, RayTaskError)


def only_in_memory(step: int, on_disk: int, run_dir: Path, *, unread: bool = False) -> str:
    """One sentence for a run whose last committed step could not be written; or, with `unread`, for one of which it
    could not be read which step that is: then keepers hold none after `step`."""
    disk = (
        f"on disk is the checkpoint after {counted(on_disk + 1, 'step')}"
        if on_disk >= 0
        else "no checkpoint is on disk"
    )
    first = f"when {run_dir} can be read again" if unread else f"make room in {run_dir} and"
    steps = f"up to {step + 1}" if unread else f"{step + 1}"
    return (
        f"{steps} steps are committed, {disk}, and the rest is only in the memory of the cluster, whose keepers "
        f"stay: {first} continue with --resume on this cluster. A local cluster ends with its "
        f"run, which then continues from the disk."
    )
