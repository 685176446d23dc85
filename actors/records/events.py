"""What happens to a run: one class per kind of event, the line of it in events.jsonl, and the words for a person.

    tell(WorkerDied(worker="w3", why="in 'dit' of step 7"))          # whoever has seen it
    listener.on_event(event.stamped(generation))                     # the controller: when, and in which generation
    {"time": 1795391317.9, "event": "dead", "generation": 1, "worker": "w3", "why": ...}     # events.jsonl
    event_of(line).describe()                                        # "worker w3 died (in 'dit' of step 7)"

A new kind is one class here: its name in the file, its fields, its words, and whether it disturbs the running step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from actors.records.lines import line_of, record_of


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Something that happened to a run. Made by whoever saw it, stamped by the controller, written by the recorder."""

    event: ClassVar[str]  # its name in events.jsonl
    disturbs: ClassVar[bool] = False  # a step may take longer because of it

    time: float = 0.0  # unix seconds
    generation: int | None = None  # the one that was running; left out of the line when None

    def describe(self) -> str:
        """One line for a person; empty for events that nobody needs to read."""
        return ""

    def stamped(self, generation: int) -> Self:
        """The event as it is written: it happens now, in this generation unless it names its own."""
        return replace(self, time=time.time(), generation=generation if self.generation is None else self.generation)

    def line(self) -> dict[str, object]:
        """Its object in events.jsonl."""
        details = line_of(self)
        line = {"time": details.pop("time"), "event": self.event, **details}
        if self.generation is None:
            del line["generation"]
        return line


def _because(why: str) -> str:
    return f" ({why})" if why else ""


# -- the run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SettingsChanged(RunEvent):
    """A resumed run trains on with other settings than before."""

    event: ClassVar[str] = "changed"
    settings: tuple[str, ...]

    def describe(self) -> str:
        return f"settings changed since the last start: {', '.join(self.settings)}"


@dataclass(frozen=True, kw_only=True)
class RunStarted(RunEvent):
    """The data is open and the state is found. `data` is what the index offers, `origin` where the state comes from."""

    event: ClassVar[str] = "start"
    from_step: int
    pid: int
    data: Mapping[str, object]
    origin: str

    def describe(self) -> str:
        return f"data is ready; starting at step {self.from_step} (state: {self.origin})"


@dataclass(frozen=True, kw_only=True)
class RunStopping(RunEvent):
    """Somebody wants the run to end; the running steps are finished first."""

    event: ClassVar[str] = "stopping"
    why: str

    def describe(self) -> str:
        return f"stopping{_because(self.why)}"


@dataclass(frozen=True, kw_only=True)
class RunFailed(RunEvent):
    """The run cannot go on; `code` is its exit code."""

    event: ClassVar[str] = "fail"
    why: str
    code: int

    def describe(self) -> str:
        return f"stopping{_because(self.why)}"


@dataclass(frozen=True, kw_only=True)
class RunFinished(RunEvent):
    """All steps are committed and on disk. `ledger` accounts for every draw of the data."""

    event: ClassVar[str] = "finish"
    step: int
    ledger: Mapping[str, object]

    def describe(self) -> str:
        return f"finished after {self.step + 1} steps"


# -- workers and generations -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerReady(RunEvent):
    """A worker has loaded its modules."""

    event: ClassVar[str] = "ready"
    worker: str
    node: str
    pid: int
    host: str

    def describe(self) -> str:
        return f"worker {self.worker} is ready on {self.host}"


@dataclass(frozen=True, kw_only=True)
class WorkerLost(RunEvent):
    """A worker did not start, or was lost before it was seated."""

    event: ClassVar[str] = "lost"
    disturbs: ClassVar[bool] = True
    worker: str
    why: str

    def describe(self) -> str:
        return f"worker {self.worker} was lost{_because(self.why)}"


@dataclass(frozen=True, kw_only=True)
class WorkerDied(RunEvent):
    """A worker died in a generation; `why` says in which cascade."""

    event: ClassVar[str] = "dead"
    disturbs: ClassVar[bool] = True
    worker: str
    why: str

    def describe(self) -> str:
        return f"worker {self.worker} died{_because(self.why)}"


@dataclass(frozen=True, kw_only=True)
class WorkerSilent(RunEvent):
    """No heartbeat of a worker has come for workers.suspect_s."""

    event: ClassVar[str] = "suspect"
    worker: str

    def describe(self) -> str:
        return f"worker {self.worker} is silent"


@dataclass(frozen=True, kw_only=True)
class WorkerReplaced(RunEvent):
    """A silent or frozen worker is ended and another takes its place."""

    event: ClassVar[str] = "replace"
    disturbs: ClassVar[bool] = True
    worker: str
    why: str

    def describe(self) -> str:
        return f"worker {self.worker} is replaced{_because(self.why)}"


@dataclass(frozen=True, kw_only=True)
class MemoryRanOut(RunEvent):
    """A cascade ran out of memory. Its step is planned again without it, as are those that come."""

    event: ClassVar[str] = "memory"
    disturbs: ClassVar[bool] = True
    worker: str
    step: int
    cascade: str
    degree: int
    peak_gib: float  # that it had taken
    room_gib: float  # that the worker had for it; 0: unknown

    def describe(self) -> str:
        room = f" of {self.room_gib:.2f}" if self.room_gib else ""
        return f"{self.cascade} ran out of memory on {self.worker} ({self.peak_gib:.2f}{room} GiB); it is avoided"


@dataclass(frozen=True, kw_only=True)
class WorkerLeaving(RunEvent):
    """A worker asks to leave: its node is about to be taken away, or an operator wants it."""

    event: ClassVar[str] = "leaving"
    worker: str

    def describe(self) -> str:
        return f"worker {self.worker} announces that it leaves"


@dataclass(frozen=True, kw_only=True)
class WorkerDrained(RunEvent):
    """A leaving worker has finished its steps and goes."""

    event: ClassVar[str] = "drain"
    worker: str
    why: str

    def describe(self) -> str:
        return f"worker {self.worker} finishes and leaves{_because(self.why)}"


@dataclass(frozen=True, kw_only=True)
class WorkerStalled(RunEvent):
    """A cascade runs far beyond its prediction. `worker` is the one that the others wait for."""

    event: ClassVar[str] = "stall"
    disturbs: ClassVar[bool] = True
    detail: str
    worker: str

    def describe(self) -> str:
        return self.detail


@dataclass(frozen=True, kw_only=True)
class StackDumped(RunEvent):
    """The stacks of a worker that is late; they are read in the file."""

    event: ClassVar[str] = "stack"
    worker: str
    stack: str


@dataclass(frozen=True, kw_only=True)
class GenerationFormed(RunEvent):
    """A new set of workers goes on; `cluster` counts them by node, `seconds` is what forming took."""

    event: ClassVar[str] = "generation"
    disturbs: ClassVar[bool] = True
    workers: tuple[str, ...]
    cluster: tuple[int, ...]
    why: str
    from_step: int
    seconds: float
    gradients: str = ""  # "own", "node" or "host"; older runs do not say

    def describe(self) -> str:
        shared = ", one gradient per node" if self.gradients in ("node", "host") else ""
        return f"generation {self.generation}: {len(self.workers)} workers{shared}{_because(self.why)}"


@dataclass(frozen=True, kw_only=True)
class GenerationEnded(RunEvent):
    """A generation is over. No words: the next one tells it."""

    event: ClassVar[str] = "end"
    why: str
    clean: bool


@dataclass(frozen=True, kw_only=True)
class WorkersAwaited(RunEvent):
    """There are too few workers to go on."""

    event: ClassVar[str] = "wait"
    disturbs: ClassVar[bool] = True
    detail: str

    def describe(self) -> str:
        return self.detail


@dataclass(frozen=True, kw_only=True)
class PlanAdapted(RunEvent):
    """The workers cannot follow the planner's settings, so plans follow the nearest ones; empty: they can again."""

    event: ClassVar[str] = "adapted"
    settings: tuple[str, ...]

    def describe(self) -> str:
        return "; ".join(self.settings) or "plans follow the settings of planner again"


@dataclass(frozen=True, kw_only=True)
class PoolResized(RunEvent):
    """Somebody asked for another number of workers."""

    event: ClassVar[str] = "resize"
    target: int

    def describe(self) -> str:
        return f"asked for {self.target} workers"


@dataclass(frozen=True, kw_only=True)
class MonitorRestarted(RunEvent):
    """The monitor was lost; a new one has been told what the old one knew."""

    event: ClassVar[str] = "monitor_restarted"

    def describe(self) -> str:
        return "the monitor was lost and is started again"


# -- steps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepsRecovered(RunEvent):
    """The first step has finished since a loss, which was so many seconds ago."""

    event: ClassVar[str] = "recovered"
    step: int
    seconds: float

    def describe(self) -> str:
        return f"recovered: step {self.step} finished {self.seconds:.1f} s after the loss"


@dataclass(frozen=True, kw_only=True)
class StepsLost(RunEvent):
    """No whole snapshot is newer than `to_step`: the committed steps after it are computed again."""

    event: ClassVar[str] = "fallback"
    disturbs: ClassVar[bool] = True
    to_step: int
    lost_steps: int

    def describe(self) -> str:
        first, last = self.to_step + 1, self.to_step + self.lost_steps
        return f"no whole snapshot is left: steps {first} to {last} run again"


@dataclass(frozen=True, kw_only=True)
class StepSkipped(RunEvent):
    """The gradient of a step was not finite, so that it changed nothing. `samples` did not decode or are suspect."""

    event: ClassVar[str] = "skipped"
    step: int
    loss: float
    grad_norm: float
    samples: tuple[str, ...]

    def describe(self) -> str:
        return f"step {self.step} skipped: loss {self.loss}, gradient norm {self.grad_norm}"


@dataclass(frozen=True, kw_only=True)
class SpeedsLearned(RunEvent):
    """Plans count on other speed factors of the workers from now on."""

    event: ClassVar[str] = "speeds"
    speed: Mapping[str, float]

    def describe(self) -> str:
        return "plans now count on speeds " + ", ".join(f"{w} {s:.2f}" for w, s in self.speed.items())


@dataclass(frozen=True, kw_only=True)
class ProfileRefused(RunEvent):
    """What an earlier start of the run has learned of costs does not hold here; it is learned anew."""

    event: ClassVar[str] = "profile_refused"
    why: str

    def describe(self) -> str:
        return f"costs are learned anew{_because(self.why)}"


@dataclass(frozen=True, kw_only=True)
class FeederLost(RunEvent):
    """What is not committed is decoded again, by a new feeder."""

    event: ClassVar[str] = "feeder_lost"
    disturbs: ClassVar[bool] = True
    why: str

    def describe(self) -> str:
        return f"the feeder was lost and is started again{_because(self.why)}"


# -- snapshots and checkpoints -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SnapshotsForecast(RunEvent):
    """What snapshots take of the memory of each node with a keeper."""

    event: ClassVar[str] = "snapshots"
    keepers: int
    mib_per_keeper: float

    def describe(self) -> str:
        return f"snapshots take {self.mib_per_keeper:.1f} MiB of host memory on each of {self.keepers} nodes"


@dataclass(frozen=True, kw_only=True)
class MemoryShort(RunEvent):
    """A node cannot spare what snapshots will take of it."""

    event: ClassVar[str] = "memory_short"
    host: str
    mib_needed: int
    mib_room: int

    def describe(self) -> str:
        return f"warning: snapshots take {self.mib_needed:,} MiB on {self.host}, which can spare {self.mib_room:,} MiB"


@dataclass(frozen=True, kw_only=True)
class KeeperLost(RunEvent):
    """A keeper is gone; another takes its place."""

    event: ClassVar[str] = "keeper_lost"
    disturbs: ClassVar[bool] = True
    keeper: str

    def describe(self) -> str:
        return "a snapshot keeper was lost and is replaced"


@dataclass(frozen=True, kw_only=True)
class KeeperSlow(RunEvent):
    """A keeper is late, but alive."""

    event: ClassVar[str] = "keeper_slow"
    keeper: str
    seconds: float

    def describe(self) -> str:
        return f"{self.keeper} has not answered for {self.seconds:.0f} s; it lives and is waited for"


@dataclass(frozen=True, kw_only=True)
class KeepersSilent(RunEvent):
    """Keepers that may hold the newest state do not answer: the run ends rather than drop what they hold."""

    event: ClassVar[str] = "keeper_silent"
    silent: tuple[str, ...]
    seconds: float

    def describe(self) -> str:
        return f"{', '.join(self.silent)} may hold the newest state and stayed silent; nothing is dropped"


@dataclass(frozen=True, kw_only=True)
class CommitSlow(RunEvent):
    """A finished step waits for its keepers for long."""

    event: ClassVar[str] = "keepers_slow"
    step: int
    seconds: float

    def describe(self) -> str:
        return f"step {self.step} has waited for {self.seconds:.0f} s to be held by its keepers"


@dataclass(frozen=True, kw_only=True)
class KeepersRepaired(RunEvent):
    """Keepers are replaced once more since the last commit."""

    event: ClassVar[str] = "keepers_repaired"
    repairs: int
    why: str

    def describe(self) -> str:
        return f"the keepers were repaired for the {self.repairs}. time without a commit{_because(self.why)}"


@dataclass(frozen=True, kw_only=True)
class SnapshotsFailed(RunEvent):
    """Repairs of the keepers do not help: the run ends."""

    event: ClassVar[str] = "snapshots_failed"
    repairs: int
    why: str

    def describe(self) -> str:
        return f"the keepers cannot take the state{_because(self.why)}; the workers' own goes to disk"


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(RunEvent):
    """A checkpoint is whole on disk."""

    event: ClassVar[str] = "checkpoint"
    step: int
    folder: str

    def describe(self) -> str:
        return f"checkpoint after {self.step + 1} steps"


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(RunEvent):
    """A checkpoint was not written."""

    event: ClassVar[str] = "checkpoint_failed"
    step: int
    why: str

    def describe(self) -> str:
        return f"the checkpoint after {self.step + 1} steps was not written{_because(self.why)}"


@dataclass(frozen=True, kw_only=True)
class CheckpointDamaged(RunEvent):
    """A whole checkpoint has other bytes than those that were written."""

    event: ClassVar[str] = "checkpoint_damaged"
    folder: str
    why: str

    def describe(self) -> str:
        return f"checkpoint {self.folder} is passed over{_because(self.why)}"


@dataclass(frozen=True, kw_only=True)
class CheckpointPassedOver(RunEvent):
    """A newer checkpoint is not complete, so that the run continues from another one."""

    event: ClassVar[str] = "checkpoint_passed_over"
    folder: str
    why: str

    def describe(self) -> str:
        return f"checkpoint {self.folder} is passed over{_because(self.why)}"


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(RunEvent):
    """An event that another version has written. It is kept, not told."""

    event: ClassVar[str] = ""
    name: str
    details: Mapping[str, object] = field(default_factory=dict)

    def line(self) -> dict[str, object]:
        return {"time": self.time, "event": self.name, **self.details}


KINDS: dict[str, type[RunEvent]] = {kind.event: kind for kind in RunEvent.__subclasses__() if kind.event}


def event_of(line: Mapping[str, object]) -> RunEvent:
    """An object of events.jsonl, of this or an earlier version. Raises RecordError for a value of the wrong type."""
    name = str(line.get("event", ""))
    if name in KINDS:
        return record_of(KINDS[name], line)
    details = {key: value for key, value in line.items() if key not in ("time", "event")}
    return record_of(UnknownEvent, {"time": line.get("time", 0.0), "name": name, "details": details})
