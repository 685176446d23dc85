"""What happens to a run: one class per kind of event, the line of it in events.jsonl, and the words for a person.

    tell(WorkerDied(worker="w3", why="last heard of in 'dit' of step 7"))          # whoever has seen it
    listener.on_event(event.stamped(generation))                     # the controller: when, and in which generation
    {"time": 1795391317.9, "event": "dead", "generation": 1, "worker": "w3", "why": ...}     # events.jsonl
    event_of(line).describe()                            # "worker w3 died (last heard of in 'dit' of step 7)"

A new kind is one class here: its name in the file, its fields, its words, and whether it disturbs the running step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self, TypeVar, dataclass_transform

from actors.records.lines import finite, line_of, record_of
from data.in_words import DROPPED, EpochForecast, dropped_sentence
from ops.counted import counted, first_of, loss_in_words

E = TypeVar("E", bound="RunEvent")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Something that happened to a run. Made by whoever saw it, stamped by the controller, written by the recorder.

    Each kind below is a frozen dataclass, without the decorator. It is declared with its name in events.jsonl (`event`)
    and, if a step may take longer because of it, with `disturbs`.
    """

    event: ClassVar[str]
    disturbs: ClassVar[bool]

    time: float = 0.0  # unix seconds
    generation: int | None = None  # the one that was running; left out of the line when None

    def __init_subclass__(cls, *, event: str, disturbs: bool = False) -> None:
        cls.event, cls.disturbs = event, disturbs
        dataclass(frozen=True, kw_only=True)(cls)

    def describe(self) -> str:
        """One line for a person; empty for events that nobody needs to read."""
        return ""

    def stamped(self, generation: int) -> Self:
        """The event as it is written: it happens now, in this generation unless it names its own."""
        return replace(self, time=time.time(), generation=generation if self.generation is None else self.generation)

    def line(self) -> dict[str, object]:
        """The event's object in events.jsonl."""
        details = line_of(self)
        line = {"time": details.pop("time"), "event": self.event, **details}
        if self.generation is None:
            del line["generation"]
        return line


def _because(why: str) -> str:
    return f" ({why})" if why else ""


def _parts(asides: tuple[str, ...]) -> str:
    return f"{counted(len(asides), 'part')} of samples and held-out losses"


# -- the run -----------------------------------------------------------------------------------------------------------


class SettingsChanged(RunEvent, event="changed"):
    """A resumed run trains on with other settings than before."""

    settings: tuple[str, ...]

    def describe(self) -> str:
        return f"settings changed since the last start: {', '.join(self.settings)}"


class SamplesDropped(RunEvent, event="dropped"):
    """Samples of the index that this run never trains, at each of its starts. `reasons`: in words, how many; `listed`
    of them stand in dropped.jsonl of the run's folder."""

    indexed: int
    planned: int
    reasons: Mapping[str, int]
    listed: int

    def describe(self) -> str:
        most = "warning: " if self.planned < self.indexed - self.planned else ""
        which = "them" if self.listed == self.indexed - self.planned else f"the first {self.listed:,}"
        named = f"; {DROPPED} names {which}" if self.listed else ""
        return f"{most}{dropped_sentence(self.indexed, self.planned, self.reasons)}{named}"

    @classmethod
    def of(cls, data: Mapping[str, object]) -> Self | None:
        """From the account of the data at a start; None where no sample is dropped."""
        found = record_of(cls, data)
        return found if found.planned < found.indexed else None


class RunStarted(RunEvent, event="start"):
    """The data is open and the state is found. `data` is what the index offers, and what the run's steps draw of it;
    `origin` is where the state comes from."""

    from_step: int
    pid: int
    data: Mapping[str, object]
    origin: str

    def describe(self) -> str:
        told = self.data.get("forecast")
        epochs = f"; {record_of(EpochForecast, told).sentence}" if isinstance(told, Mapping) else ""
        return f"data is ready; starting at step {self.from_step} (state: {self.origin}){epochs}"


class RunStopping(RunEvent, event="stopping"):
    """Somebody wants the run to end; the running steps are finished first."""

    why: str

    def describe(self) -> str:
        return f"stopping{_because(self.why)}"


class RunFailed(RunEvent, event="fail"):
    """The run cannot go on; `code` is its exit code."""

    why: str
    code: int

    def describe(self) -> str:
        return f"stopping{_because(self.why)}"


class RunFinished(RunEvent, event="finish"):
    """All steps are committed and on disk. `ledger` accounts for every draw of the data; it is empty where the feeder
    has died since, and the data cannot be opened any more."""

    step: int
    ledger: Mapping[str, object]

    def describe(self) -> str:
        return f"finished after {counted(self.step + 1, 'step')}"


# -- workers and generations -------------------------------------------------------------------------------------------


class WorkerReady(RunEvent, event="ready"):
    """A worker has loaded its modules."""

    worker: str
    node: str
    pid: int
    host: str

    def describe(self) -> str:
        return f"worker {self.worker} is ready on {self.host}"


class WorkerLost(RunEvent, event="lost", disturbs=True):
    """A worker did not start, or was lost before it was seated."""

    worker: str
    why: str

    def describe(self) -> str:
        return f"worker {self.worker} was lost{_because(self.why)}"


class WorkerDied(RunEvent, event="dead", disturbs=True):
    """A worker died in a generation; `why` says what it was doing at its last heartbeat."""

    worker: str
    why: str

    def describe(self) -> str:
        return f"worker {self.worker} died{_because(self.why)}"


class WorkerSilent(RunEvent, event="suspect"):
    """No heartbeat of a worker has come for workers.suspect_s."""

    worker: str

    def describe(self) -> str:
        return f"worker {self.worker} is silent"


class LinkSlow(RunEvent, event="slow_link"):
    """Data moves slower from one host to another than between others, and steps wait for it."""

    host: str
    other: str
    mib_per_s: float
    usual_mib_per_s: float  # a quarter of the other links has it, or more
    busy_s: float  # for which some was on its way
    over_s: float  # since it was last looked at
    more: int = 0  # other links that are slow as well
    end: str = ""  # the host at an end of them all, if there is one

    def describe(self) -> str:
        more = f"; so {'is' if self.more == 1 else 'are'} {counted(self.more, 'other link')}" if self.more else ""
        end = f", all of {self.end}" if self.end else ""
        return (
            f"the network is slow from {self.host} to {self.other}: {self.mib_per_s:.3g} MiB/s, "
            f"{self.usual_mib_per_s:.3g} between others; data was on its way for {self.busy_s:.0f} of "
            f"{self.over_s:.0f} s{more}{end}"
        )


class WorkerReplaced(RunEvent, event="replace", disturbs=True):
    """A silent or frozen worker is ended and another takes its place."""

    worker: str
    why: str

    def describe(self) -> str:
        return f"worker {self.worker} is replaced{_because(self.why)}"


class MemoryRanOut(RunEvent, event="memory", disturbs=True):
    """A cascade ran out of memory. Its step is planned again without it, as are those that come."""

    worker: str
    step: int
    cascade: str
    degree: int
    peak_gib: float  # that it had taken
    room_gib: float  # that the worker had for it; 0: unknown

    def describe(self) -> str:
        room = f" of {self.room_gib:.2f}" if self.room_gib else ""
        return f"{self.cascade} ran out of memory on {self.worker} ({self.peak_gib:.2f}{room} GiB); it is avoided"


class WorkerLeaving(RunEvent, event="leaving"):
    """A worker asks to leave: its node is about to be taken away, or an operator wants it."""

    worker: str

    def describe(self) -> str:
        return f"worker {self.worker} announces that it leaves"


class WorkerDrained(RunEvent, event="drain"):
    """A leaving worker has finished its steps and goes."""

    worker: str
    why: str

    def describe(self) -> str:
        return f"worker {self.worker} finishes and leaves{_because(self.why)}"


class WorkerStalled(RunEvent, event="stall", disturbs=True):
    """A cascade runs far beyond its prediction. `worker` is the one that the others wait for."""

    detail: str
    worker: str

    def describe(self) -> str:
        return self.detail


class StackDumped(RunEvent, event="stack"):
    """The stacks of a worker that is late; they are read in the file."""

    worker: str
    stack: str


class GenerationFormed(RunEvent, event="generation", disturbs=True):
    """A new set of workers goes on; `cluster` counts them by node, `seconds` is what forming took."""

    workers: tuple[str, ...]
    cluster: tuple[int, ...]
    why: str
    from_step: int
    seconds: float
    gradients: str = ""  # "own", "node" or "host"; older runs do not say
    parameters: str = ""  # "replicated" or "node"; older runs do not say

    def describe(self) -> str:
        shared = ", one gradient per node" if self.gradients in ("node", "host") else ""
        shared += ", weights once per node" if self.parameters == "node" else ""
        return f"generation {self.generation}: {counted(len(self.workers), 'worker')}{shared}{_because(self.why)}"


class ClusterSeen(RunEvent, event="cluster"):
    """Where the GPUs of a generation sit, as its plans count on it. `nodes` by host: a letter or number for each GPU;
    `nccl`: what the workers' environment sets of NCCL. `from_file`: workers.cluster says so."""

    nodes: Mapping[str, str]
    nccl: Mapping[str, str]
    from_file: bool = False

    def describe(self) -> str:
        alike: dict[str, list[str]] = {}
        for host, words in self.nodes.items():
            alike.setdefault(words, []).append(host)
        listed = "; ".join(f"{first_of(hosts)}: {words}" for words, hosts in alike.items())
        set_of = ", ".join(f"{name} {value or 'not set'}" for name, value in self.nccl.items())
        return f"cluster{' (workers.cluster)' if self.from_file else ''}: {listed}{f'; {set_of}' if set_of else ''}"


class EnvironmentSeen(RunEvent, event="environment"):
    """What the workers compute with from a step on: told at every start, and where it becomes another one. In
    `software`, versions by name: "heddle" is a digest of the program's files, "commit" that of its working tree."""

    from_step: int
    software: Mapping[str, str]
    gpus: Mapping[str, int] = field(default_factory=dict)  # name -> how many workers have one
    hosts: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()  # since the last event of the run: "torch 2.9.1 -> 2.10.0"

    def describe(self) -> str:
        if not self.changed:
            return ""
        said = f"the environment is another one from step {self.from_step} on: {', '.join(self.changed)}"
        if " or " not in self.software.get("heddle", ""):
            return said
        return (
            f"{said}. Workers with other files of Heddle may fail, or compute otherwise: give all nodes the same, or "
            f"end the run and --resume"
        )

    @property
    def facts(self) -> dict[str, str]:
        """All that is compared, by name."""
        return {**self.software, **({"GPUs": " + ".join(self.gpus)} if self.gpus else {})}

    def after(self, before: EnvironmentSeen) -> EnvironmentSeen:
        """This event, with what has changed since `before`."""
        old, new = before.facts, self.facts
        return replace(
            self,
            changed=tuple(
                f"{name} {short_fact(old.get(name, 'none'))} -> {short_fact(new.get(name, 'none'))}"
                for name in dict.fromkeys([*old, *new])
                if old.get(name) != new.get(name)
            ),
        )


def short_fact(value: str) -> str:
    """A commit as people write it; anything else as it is."""
    return value[:10] if len(value) in (40, 64) and set(value) <= set("0123456789abcdef") else value


class ClusterRefused(RunEvent, event="cluster_refused"):
    """workers.cluster does not match the workers that are there now: plans count on what they report."""

    why: str

    def describe(self) -> str:
        return f"plans count on what the workers tell of their GPUs: {self.why}"


class WeightsFetched(RunEvent, event="weights_fetched"):
    """`train.memory.parameters: auto` has put the weights of blocks once into host memory of each node, as GPUs have no
    room for them otherwise."""

    gib_per_node: float

    def describe(self) -> str:
        return (
            f"warning: the GPUs have no room for all weights in any other way, so those of the blocks lie once in host "
            f"memory of each node ({self.gib_per_node:.2f} GiB) and are fetched block by block; on GPUs only "
            f"short runs have done this so far (train.memory.parameters: auto)"
        )


class GenerationEnded(RunEvent, event="end"):
    """A generation is over. No words: the next generation's event says it."""

    why: str
    clean: bool


class WorkersAwaited(RunEvent, event="wait", disturbs=True):
    """There are too few workers to go on."""

    detail: str

    def describe(self) -> str:
        return self.detail


class WorkersLeftOut(RunEvent, event="left_out"):
    """These workers are ready, and with them the generation would have too little memory, or nodes out of reach."""

    workers: tuple[str, ...]
    why: str

    def describe(self) -> str:
        one = len(self.workers) == 1
        return f"{', '.join(self.workers)} {'waits' if one else 'wait'} until others come or go: {self.why}"


class NodeRests(RunEvent, event="rest"):
    """No worker is started on a node for a while, unless the run needs it."""

    host: str  # "": on none, as nobody knows which it is
    seconds: float
    why: str

    def describe(self) -> str:
        span = f"{self.seconds / 60:g} min" if self.seconds < 3600 else f"{self.seconds / 3600:g} h"
        return f"no worker is started on {self.host or 'any node'} for {span} unless the run needs it: {self.why}"


class DecodingAwaited(RunEvent, event="decode_wait", disturbs=True):
    """The run waits for clips, and workers leave no CPU to decode them where that may be done."""

    cpus: float  # `data.engine.decode_cpus`
    nodes_avoided: int  # nothing is decoded on these, which workers do not reach
    cpus_avoided: float  # beside workers there

    def describe(self) -> str:
        share = "1 CPU" if self.cpus == 1 else f"{self.cpus:g} CPUs"
        node = "no node within reach" if self.nodes_avoided else "no node"
        told = f"waiting for clips: {node} has {share} beside its workers to decode them (data.engine.decode_cpus). "
        if self.nodes_avoided:
            one = self.nodes_avoided == 1
            told += (
                f"{counted(self.nodes_avoided, 'node')} out of reach {'has' if one else 'have'} {self.cpus_avoided:g} "
                f"of them, but nothing is decoded there until they are tried again. "
            )
        return (
            f"{told}The run goes on as soon as there are: add a node, take a worker away (heddle workers scale, above "
            f"workers.min), or resume with a lower workers.cpus_per_worker or data.engine.decode_cpus"
        )


class PlanAdapted(RunEvent, event="adapted"):
    """The workers cannot follow the planner's settings, so plans follow the nearest ones; empty: they can again."""

    settings: tuple[str, ...]

    def describe(self) -> str:
        return "; ".join(self.settings) or "plans follow the settings of planner again"


class PoolResized(RunEvent, event="resize"):
    """Somebody asked for another number of workers."""

    target: int

    def describe(self) -> str:
        return f"asked for {counted(self.target, 'worker')}"


class MonitorSilent(RunEvent, event="monitor_silent"):
    """The monitor has not answered for so long, and is ended so that Ray starts it again."""

    seconds: float

    def describe(self) -> str:
        return f"the monitor has not answered for {self.seconds:.0f} s and is started again"


class MonitorRestarted(RunEvent, event="monitor_restarted"):
    """The monitor was lost; a new one has got what the old one knew."""

    def describe(self) -> str:
        return "the monitor was lost and is started again"


# -- steps -------------------------------------------------------------------------------------------------------------


class StepsRecovered(RunEvent, event="recovered"):
    """The first step has finished after a loss, which was `seconds` ago."""

    step: int
    seconds: float

    def describe(self) -> str:
        return f"recovered: step {self.step} finished {self.seconds:.1f} s after the loss"


class StepsLost(RunEvent, event="fallback", disturbs=True):
    """No whole snapshot is newer than `to_step`: the committed steps after it are computed again."""

    to_step: int
    lost_steps: int

    def describe(self) -> str:
        first, last = self.to_step + 1, self.to_step + self.lost_steps
        return f"no whole snapshot is left: steps {first} to {last} run again"


class StepSkipped(RunEvent, event="skipped"):
    """The gradient of a step was not finite, so that it changed nothing. `samples` did not decode or are suspect."""

    step: int
    loss: float
    grad_norm: float
    samples: tuple[str, ...]
    workers: tuple[str, ...] = ()  # on which losses were not finite

    def describe(self) -> str:
        where = f" (losses of {first_of(self.workers)})" if self.workers else ""
        return f"step {self.step} skipped: loss {self.loss}, gradient norm {self.grad_norm}{where}"


class SpeedsLearned(RunEvent, event="speeds"):
    """Plans count on other speed factors of the workers from now on."""

    speed: Mapping[str, float]

    def describe(self) -> str:
        if not self.speed:
            return "plans now count on workers of equal speed"
        return "plans now count on speeds " + ", ".join(f"{w} {s:.2f}" for w, s in self.speed.items())


class BatchesResized(RunEvent, event="batches"):
    """Measured costs have moved the best batch sizes. `sizes` by bucket: clips before and now, of those that moved by
    more than `change`. `target_s` 0: a batch takes what one clip of the longest bucket does, or its launches.
    Not `applied`: a suggestion."""

    from_step: int
    sizes: Mapping[str, tuple[int, int]]
    change: float
    target_s: float
    applied: bool

    def describe(self) -> str:
        listed = first_of([f"{bucket} {before} -> {now}" for bucket, (before, now) in self.sizes.items()], most=6)
        what = f"batch sizes from step {self.from_step} on" if self.applied else "better batch sizes would be"
        target = (
            f"{self.target_s:g} s a batch" if self.target_s else "as long as one clip of the longest bucket or launches"
        )
        return f"{what}: {listed} (measured costs, {target})"


class DeviceAssumed(RunEvent, event="device_assumed"):
    """Nobody knows how fast the workers' GPUs are: what the first plans count on."""

    why: str

    def describe(self) -> str:
        return f"warning: {self.why}"


class ProfileRefused(RunEvent, event="profile_refused"):
    """What an earlier start of the run has learned of costs does not hold here; it is learned anew."""

    why: str

    def describe(self) -> str:
        return f"costs are learned anew{_because(self.why)}"


class FeederLost(RunEvent, event="feeder_lost", disturbs=True):
    """What is not committed is decoded again, by a new feeder."""

    why: str

    def describe(self) -> str:
        return f"the feeder was lost and is started again{_because(self.why)}"


class FeederRenewed(RunEvent, event="feeder_renewed", disturbs=True):
    """The feeder had grown by too much. Another one, opened beside it, has the same samples from a step on; nothing is
    decoded or computed twice that was asked for before."""

    from_step: int
    settled_mib: int  # that the one before it had in its first steps
    grown_mib: int  # and in its last

    def describe(self) -> str:
        return (
            f"another feeder takes over at step {self.from_step}, as this one has grown from {self.settled_mib:,} to "
            f"{self.grown_mib:,} MiB"
        )


# -- snapshots and checkpoints -----------------------------------------------------------------------------------------


class SnapshotsForecast(RunEvent, event="snapshots"):
    """What keepers take of the memory of their nodes."""

    keepers: int
    mib_per_keeper: float
    enabled: bool = True  # snapshot.enabled; without it keepers hold the state that a checkpoint is written from

    def describe(self) -> str:
        where = "the node" if self.keepers == 1 else f"each of {self.keepers:,} nodes"
        return f"{_what_keepers_hold(self.enabled)} {self.mib_per_keeper:.1f} MiB of host memory on {where}"


class SnapshotsSpaced(RunEvent, event="snapshots_spaced"):
    """With `snapshot.every: auto` another interval was chosen."""

    every: int  # steps
    why: str

    def describe(self) -> str:
        steps = "step" if self.every == 1 else f"{self.every:,} steps"
        return f"a snapshot every {steps} from now on: {self.why}"


class MemoryShort(RunEvent, event="memory_short"):
    """A node cannot spare what its keeper will take of it."""

    host: str
    mib_needed: int
    mib_room: int
    enabled: bool = True  # snapshot.enabled

    def describe(self) -> str:
        return (
            f"warning: {_what_keepers_hold(self.enabled)} {self.mib_needed:,} MiB on {self.host}, which can spare "
            f"{self.mib_room:,} MiB"
        )


def _what_keepers_hold(enabled: bool) -> str:
    return "snapshots take" if enabled else "snapshots are off; what checkpoints are written from takes"


class KeeperLost(RunEvent, event="keeper_lost", disturbs=True):
    """A keeper is gone; another takes its place."""

    keeper: str

    def describe(self) -> str:
        return "a snapshot keeper was lost and is replaced"


class KeeperSlow(RunEvent, event="keeper_slow"):
    """A keeper is late, but alive."""

    keeper: str
    seconds: float

    def describe(self) -> str:
        return f"{self.keeper} has not answered for {self.seconds:.0f} s; it lives and is waited for"


class KeepersSilent(RunEvent, event="keeper_silent"):
    """Keepers that may hold the newest state do not answer: the run ends rather than drop what they hold."""

    silent: tuple[str, ...]
    seconds: float

    def describe(self) -> str:
        return f"{', '.join(self.silent)} may hold the newest state and stayed silent; nothing is dropped"


class CommitSlow(RunEvent, event="keepers_slow"):
    """A finished step waits for its keepers for long."""

    step: int
    seconds: float

    def describe(self) -> str:
        return f"step {self.step} has waited for {self.seconds:.0f} s to be held by its keepers"


class StorageAwaited(RunEvent, event="storage_wait", disturbs=True):
    """A finished step cannot be recorded, as the run's files take nothing: no further step is begun until they do."""

    step: int
    why: str
    seconds: float  # until now
    longest_s: float

    def describe(self) -> str:
        since = f", for {self.seconds:.0f} s by now" if self.seconds else ""
        return (
            f"step {self.step} waits to be recorded{since}: {self.why}. Training goes on by itself as soon as it can "
            f"be; after {self.longest_s / 3600:g} h the run ends"
        )


class StorageBack(RunEvent, event="storage_back"):
    """The run's files can be written again."""

    seconds: float

    def describe(self) -> str:
        return f"the run's files can be written again, after {self.seconds:.0f} s"


class DataAwaited(RunEvent, event="data_unreachable", disturbs=True):
    """Storage of the data does not answer: no further step is begun until it does."""

    step: int
    why: str
    seconds: float  # until now
    longest_s: float

    def describe(self) -> str:
        since = f", for {self.seconds:.0f} s by now" if self.seconds else ""
        return (
            f"step {self.step} waits for its clips{since}: {self.why.rstrip('.')}. Training goes on by itself as soon "
            f"as they can be read; after {self.longest_s / 3600:g} h the run ends"
        )


class DataBack(RunEvent, event="data_back"):
    """The data can be read again."""

    seconds: float

    def describe(self) -> str:
        return f"the data can be read again, after {self.seconds:.0f} s"


class KeepersRepaired(RunEvent, event="keepers_repaired"):
    """Keepers are replaced once more since the last commit."""

    repairs: int
    why: str

    def describe(self) -> str:
        return f"the keepers were repaired for the {self.repairs}. time without a commit{_because(self.why)}"


class SnapshotsFailed(RunEvent, event="snapshots_failed"):
    """Repairs of the keepers do not help: the run ends."""

    repairs: int
    why: str

    def describe(self) -> str:
        return f"the keepers cannot take the state{_because(self.why)}; the workers' own goes to disk"


class CheckpointWritten(RunEvent, event="checkpoint"):
    """A checkpoint is whole on disk."""

    step: int
    folder: str

    def describe(self) -> str:
        return f"checkpoint after {counted(self.step + 1, 'step')}"


class SamplesMade(RunEvent, event="samples"):
    """The clips of a checkpoint are there, made while the run went on."""

    step: int
    samples: tuple[str, ...]  # their files
    seconds: float  # since the checkpoint was whole; of the first weights, since workers could begin

    def describe(self) -> str:
        return f"samples after {counted(self.step + 1, 'step')}: {self.samples[-1]} ({self.seconds:.0f} s)"


class SamplesFailed(RunEvent, event="samples_failed"):
    """Clips of a checkpoint were not made by the run's workers."""

    step: int
    why: str

    def describe(self) -> str:
        return f"no samples after {counted(self.step + 1, 'step')}{_because(self.why)}"


class LoraFilesMade(RunEvent, event="lora_files"):
    """The factors of a checkpoint are there as files for other programs, made while the run went on."""

    step: int
    files: tuple[str, ...]  # in the run's folder
    seconds: float  # since the checkpoint was whole

    def describe(self) -> str:
        return f"LoRA files after {counted(self.step + 1, 'step')}: {', '.join(self.files)} ({self.seconds:.0f} s)"


class LoraFilesFailed(RunEvent, event="lora_files_failed"):
    """The factors of checkpoints were not written as files. A resume tries again while a checkpoint is there."""

    step: int  # -1: of none, as they cannot be written at all
    others: tuple[int, ...] = ()  # later ones, for the same reason
    why: str

    def describe(self) -> str:
        after = f" after {counted(self.step + 1, 'step')}" if self.step >= 0 else ""
        if self.others:
            *first, last = [f"{step + 1:,}" for step in (self.step, *self.others)]
            after = f" after {', '.join(first)} and {last} steps"
        return f"no LoRA files{after}{_because(self.why)}"


class HeldOutMeasured(RunEvent, event="held_out"):
    """The loss of held-out clips at a checkpoint, measured while the run went on: the mean over all noise levels of all
    clips, of the clips of each bucket, and of the levels in each range. Two losses are of the same clips where both
    leave out the same buckets; those of a bucket always are."""

    step: int  # -1: of the weights that the run began with, or of a folder's, whose step nobody knows
    loss: float
    clips: int
    unread: int  # clips that could not be decoded, which count nowhere
    no_room: Mapping[str, int] = field(default_factory=dict)  # clips of each bucket that a worker has no memory for
    by_bucket: Mapping[str, float]
    by_noise: Mapping[str, float]
    seconds: float  # since the checkpoint was whole; of the first weights, since workers could begin

    def describe(self) -> str:
        return self.told(f" after {counted(self.step + 1, 'step')}")

    def told(self, when: str) -> str:
        """One line for a person, with words for `when`."""
        unread = f", {self.unread} could not be read" if self.unread else ""
        left_out = f", {self.left_out} left out for want of memory" if self.no_room else ""
        about = f"{counted(self.clips, 'clip')}{unread}{left_out}, {self.seconds:.0f} s"
        return f"held-out loss{when}: {loss_in_words(self.loss)} ({about})"

    @property
    def left_out(self) -> str:
        """The clips that a worker has no memory for, such as "3 of 81x720x1280"."""
        return " and ".join(f"{clips} of {bucket}" for bucket, clips in self.no_room.items())

    def line(self) -> dict[str, object]:
        """The event's object in events.jsonl; a loss that is not finite is null there."""
        line = super().line()
        return line | {name: finite(line[name]) for name in ("loss", "by_bucket", "by_noise")}


class TrackerQuiet(RunEvent, event="tracker_quiet"):
    """A tracker of `track` is not seen where people look for it: it did not open, or lacks a key."""

    tracker: str
    why: str

    def describe(self) -> str:
        return f"warning: track {self.tracker}: {self.why}"


class HeldOutFailed(RunEvent, event="held_out_failed"):
    """The loss of held-out clips at a checkpoint, or before the first step (-1), was not measured. `ever`: it will not
    be at any."""

    step: int
    why: str
    ever: bool = False

    def describe(self) -> str:
        if self.ever:
            return f"no held-out loss in this run{_because(self.why)}"
        return f"no held-out loss after {counted(self.step + 1, 'step')}{_because(self.why)}"


class AsidesAwaited(RunEvent, event="asides_awaited"):
    """All steps are done, and the run goes on for what its workers make of its checkpoints."""

    asides: tuple[str, ...]  # their names
    limit_s: float

    def describe(self) -> str:
        return (
            f"all steps are done; still being made, for up to {self.limit_s:.0f} s: {_parts(self.asides)}. Ending the "
            f"run now loses nothing else"
        )


class AsidesLeft(RunEvent, event="asides_left"):
    """The run ends without the last of what its workers make of its checkpoints."""

    asides: tuple[str, ...]
    why: str

    def describe(self) -> str:
        return (
            f"the run ends without {_parts(self.asides)}{_because(self.why)}; `heddle sample` and `heddle validate` "
            f"make them from its checkpoints"
        )


class CheckpointFailed(RunEvent, event="checkpoint_failed"):
    """A checkpoint was not written."""

    step: int
    why: str

    def describe(self) -> str:
        return f"the checkpoint after {counted(self.step + 1, 'step')} was not written{_because(self.why)}"


class CheckpointDamaged(RunEvent, event="checkpoint_damaged"):
    """A whole checkpoint has other bytes than those that were written."""

    folder: str
    why: str

    def describe(self) -> str:
        return f"checkpoint {self.folder} is passed over{_because(self.why)}"


class CheckpointPassedOver(RunEvent, event="checkpoint_passed_over"):
    """A newer checkpoint is not complete, not given by storage, or of steps that the run computes anew: it continues
    from another one."""

    folder: str
    why: str

    def describe(self) -> str:
        return f"checkpoint {self.folder} is passed over{_because(self.why)}"


# -- reading -----------------------------------------------------------------------------------------------------------


class UnknownEvent(RunEvent, event=""):
    """An event that another version has written. It is kept, not shown."""

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


def events_so_far(run_dir: Path, kind: type[E]) -> Iterator[E]:
    """Events of a kind in the run's events.jsonl, for a controller that goes on with it; none without the file. Lines
    that are damaged, as a host leaves them that lost its power, say nothing. Raises OSError."""
    path = run_dir / "events.jsonl"
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if f'"{kind.event}"' not in line:
                continue
            try:
                event = event_of(json.loads(line))
            except (ValueError, AttributeError):  # no JSON, no object, or a value of the wrong type
                continue
            if isinstance(event, kind):
                yield event
