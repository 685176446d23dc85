"""What the controller of a virtual run says, does and uses."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from actors.records.events import RunEvent
from actors.records.metrics_line import StepMetrics
from actors.records.span_record import SpanRecord
from actors.step import StepAssignment
from app.bench.cluster.setups import Disturbance
from app.run.recorder import Recorder


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What the controller has used when a step was committed."""

    at: float  # unix seconds
    thread_s: float  # CPU seconds of the controller's own thread
    process_s: float  # of its whole process, with Ray's threads
    rss_mib: float
    threads_s: Mapping[str, float]  # of it by the names of its threads


@dataclass
class Watching:
    """The listener of a run: keeps what it hears, as the real one writes it, and disturbs the machines in time."""

    recorder: Recorder
    disturbances: Sequence[Disturbance] = ()
    disturb: Callable[[str], None] = lambda what: None
    steps: list[StepMetrics] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    told: list[tuple[float, RunEvent]] = field(default_factory=list)
    disturbed: list[tuple[float, str]] = field(default_factory=list)

    def newest_line(self) -> tuple[int, int] | None:
        return self.recorder.newest_line()

    def on_step(self, metrics: StepMetrics, timeline: Sequence[SpanRecord], plan: StepAssignment) -> None:
        """Called by the controller's thread."""
        self.recorder.on_step(metrics, timeline, plan)
        self.steps.append(metrics)
        self.samples.append(
            Sample(
                at=time.time(),
                thread_s=time.thread_time(),
                process_s=time.process_time(),
                rss_mib=psutil.Process().memory_info().rss / 2**20,
                threads_s=seconds_of_threads(),
            )
        )
        for one in self.disturbances:
            if one.step == metrics.step:
                self.disturbed.append((time.time(), one.what))
                self.disturb(one.what)

    def on_event(self, event: RunEvent) -> None:
        self.recorder.on_event(event)
        self.told.append((time.time(), event))

    def before_checkpoint(self) -> None:
        self.recorder.before_checkpoint()

    def on_checkpoint(self, folder: Path, step: int) -> None: ...


def seconds_of_threads() -> dict[str, float]:
    """CPU seconds of the threads of this process by their names, of which Ray's come in groups."""
    found: dict[str, float] = {}
    for folder in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        user, system = rest.split()[11:13]
        found[name] = found.get(name, 0.0) + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return found
