"""What the controller and the workers say to each other. Plain data; no torch, no Ray.

The controller turns every cascade of a plan into one `CascadeTask` per worker of its bag and ends each step with one
`FinishTask` per worker. Every task carries its generation: a worker refuses tasks of another one.

Heartbeats are in actors.progress, asides in actors.aside_turns, and what keepers say too in actors.held_state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Concatenate, Protocol

import numpy as np

from actors.aside_turns import TurnReport, TurnTask
from actors.config import TrainConfig, WorkersConfig
from actors.held_state import NodeKeeper, Origin, Snapshot
from actors.plan.types import UNKNOWN_PLACE, GpuPlace, Module
from actors.refs import Method, Ref
from data.config import CacheConfig
from ops.comm.reach import DoorAddress
from ops.counted import first_of
from ops.models.config import ModelConfig
from ops.sending import sent_often
from ops.spatial_temporal.choice import SliceRates
from ops.waiting import Patience


class SumStart(StrEnum):
    """When a worker starts its part of the step's gradient sum, seen from one of its cascades.

    From then on it adds no gradient and joins no bag in this step.
    """

    NEVER = "never"  # not in this cascade
    BEFORE = "before"
    DURING = "during"  # bucket by bucket, in its backward
    AFTER = "after"


IO = "io"  # the concurrency group in which a CUDA worker hands out results while its task thread goes on
SNAPSHOTS = "snapshots"  # another one, in which it says that a copy of its state has ended


class StaleGeneration(RuntimeError):
    """The task belongs to a generation that has ended, or an earlier task of this generation failed on this worker."""


STORE = -1  # the object store, where the rank of a producer is asked for

SampleId = tuple[int, str, int]  # step, item, index
CascadeShape = tuple[str, tuple[int, int, int], int, int]  # module, bucket, samples (of the VAE), degree


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class StepSample:
    """One clip inside a cascade: where it stands in its item, and the key of its random draws."""

    step: int
    item: str
    index: int
    key: str  # source/epoch/row: the same on every run, worker and plan
    grid: tuple[int, int, int]  # token (t, h, w)
    weight: float  # share of the step's samples if the clip decodes
    loss_weight: float = 1.0  # its loss counts times this, by its source
    expert: int = 0  # of several transformers, the number of the one that is trained on it
    frame_rate: float = 0.0  # of the clip (1/s), where the transformer takes it; 0: that of `model.dit.frame_rate`
    latent_key: str = ""  # names in the cache; empty without one
    text_key: str = ""

    @property
    def id(self) -> tuple[int, str, int]:
        return self.step, self.item, self.index


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The samples of one item inside a cascade; a packed cascade has several."""

    item: str
    bucket: tuple[int, int, int]
    batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryExceeded:
    """A cascade that ran out of memory on a worker, with what the planner needs to avoid it."""

    worker: str
    step: int  # of its samples
    name: str
    module: Module
    degree: int
    pieces: tuple[Piece, ...]
    peak_gib: float  # that it had taken when more was refused
    room_gib: float  # that the worker had for it; 0: unknown

    @property
    def missing_gib(self) -> float:
        """GiB that were missing at least."""
        return max(0.0, self.peak_gib - self.room_gib) if self.room_gib else 0.0

    def describe(self) -> str:
        """One line for a person."""
        room = f", {self.room_gib:.2f} GiB were free for it" if self.room_gib else ""
        return f"{self.name} ran out of memory on {self.worker} with {self.peak_gib:.2f} GiB taken{room}"


class OutOfMemory(RuntimeError):
    """A cascade ran out of memory: its generation ends, and the step is planned again without it."""

    def __init__(self, found: MemoryExceeded) -> None:
        super().__init__(found)  # its only argument, so that it is pickled
        self.found = found

    def __str__(self) -> str:
        return self.found.describe()


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeTask:
    """One cascade as one worker of its bag sees it.

    `sources[module][i]` says which rank holds the encode result of sample i: ranks inside the bag, or -1 for the object
    store, in which case the results arrive as further arguments of the call. `publish` lists the samples (positions)
    whose result the worker returns for consumers outside, `keep` those that stay here for a later cascade.
    """

    generation: int
    step: int  # step of the samples
    cascade: str
    name: str
    module: Module
    bag: tuple[int, ...]  # worker ranks, in rank order of the bag
    samples: tuple[StepSample, ...]
    pieces: tuple[Piece, ...]  # the same samples by item, in order
    planned_start_s: float
    planned_end_s: float
    sources: dict[str, tuple[int, ...]] = field(default_factory=dict)
    publish: tuple[int, ...] = ()
    keep: tuple[int, ...] = ()
    start_sum: SumStart = SumStart.NEVER
    leave: bool = False  # the bag is closed as the cascade ends, to make room for others
    outlasts: bool = False  # an early encode that the step it runs in does not wait for
    patience: Patience | None = None  # with the others of the bag; None: as the generation began
    rates: SliceRates | None = None  # by which a bag of spatial-temporal layers chooses its slices: one for all ranks


def shapes_of(module: str, pieces: Sequence[Piece], degree: int) -> set[CascadeShape]:
    """What of a cascade may have to be compiled, tuned or allocated when a process does it for the first time. Kernels
    of the DiT and of text see one long sequence, those of a VAE a batch of clips. Compiled blocks have code for one
    clip and for several."""
    several = min(2, sum(piece.batch for piece in pieces)) if module == "dit" else 0
    return {(module, piece.bucket, piece.batch if module == "vae" else several, degree) for piece in pieces}


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedResult:
    """One sample's encode result on its way to another worker. Made by the producer (or read from the cache)."""

    module: str
    id: tuple[int, str, int]
    rows: np.ndarray  # [rows, width]: travels through the object store without a copy, which a tensor would not
    ok: bool
    at: float = 0.0  # unix seconds when it was there; 0: long ago


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class FinishTask:
    """End of a step: gradient sum, update, snapshot. A worker that has not run what is named here raises instead of
    joining the sum: the step would be applied without some of its samples."""

    generation: int
    step: int
    export: bool  # copy this worker's shard of the training state, for keepers and checkpoints
    # All that this worker was given since the end of the step before and that ends by now, early encodes included.
    cascades: tuple[str, ...]
    weight: float  # of the samples, good or bad, in the step's DiT cascades that this worker leads
    patience: Patience | None = None  # with all other workers


@dataclass(frozen=True, kw_only=True, slots=True)
class HostGpu:
    """Where a worker runs. What nobody knows, and the GPU of a worker that needs none, is ""."""

    node: str = ""
    host: str = ""
    gpu: str = ""  # as Ray counts those of the node

    def __str__(self) -> str:
        """As people read it: `GPU 3 of gpu-node-7`."""
        return f"GPU {self.gpu} of {self.host}" if self.gpu else self.host


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedStart:
    """A worker that did not become ready."""

    worker: str
    why: str
    where: HostGpu = HostGpu()
    passes: bool = False  # storage did not answer: another start may come up, also where several did not


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """What a worker says of itself, its node and its GPU; sent once when it is ready."""

    worker: str
    node: str
    host: str
    pid: int
    born: str = ""  # with the pid the process itself: see actors.process
    device: str
    room_gib: float | None = None  # memory for cascades when all modules are loaded; None: without a limit
    publishes_later: bool = False  # results for other workers are asked for by Worker.published, in thread group IO
    frozen: tuple[tuple[str, str], ...] = ()  # (setting of a folder, digest of its weights that are not trained)
    first: tuple[tuple[str, int], ...] = ()  # (name, checksum) of each trained parameter before any update
    gradients: str = "own"  # where it would have them, "own", "node" or "host"
    state_on_host: bool = False  # optimizer state will lie in host memory
    lends: int = 0  # the number by which it lends the memory of its node, once it has that
    parameters: str = "replicated"  # where it would have them, "replicated" or "node"
    host_weights_gib: float = 0.0  # that its parameters will take of its node's memory, beside all GPUs
    host_encoders_gib: float = 0.0  # that encoders which are not made yet will take of it, for all of its workers
    uploads_gib: float = 0.0  # of its node's memory that what it sends to its device may hold
    pinned_gib: float = 0.0  # and gradients and updates on their way between both
    host_room_gib: float | None = None  # that its node could spare when all modules were loaded; None: unknown
    store_gib: float | None = None  # size of its node's object store; None: unknown
    shared_gib: float | None = None  # size of /dev/shm there; None: there is none
    place: GpuPlace = UNKNOWN_PLACE  # of its GPU
    gpu: str = ""  # which Ray gave it of its node, as Ray counts them
    nccl: tuple[tuple[str, str], ...] = ()  # what its environment sets of NCCL: (NCCL_IB_HCA, mlx5) and the like
    environment: tuple[tuple[str, str], ...] = ()  # what it computes with (`ops.environment`), by name
    door: DoorAddress | None = None  # where others find out whether they reach its node


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A measured stretch of work on one worker (unix seconds)."""

    name: str
    module: str  # text | vae | dit | finish
    cascade: str
    step: int
    start: float
    end: float
    batch: int = 0
    degree: int = 1
    pieces: tuple[Piece, ...] = ()
    planned_start_s: float = 0.0
    planned_end_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)  # seconds inside: handoff, forward, backward, reduce, ...
    handoff_bytes: int = 0  # encode results that came from other workers, by the bag's group or the object store
    handoff_s: float = 0.0  # gathering them inside the cascade, and waiting idle for the object store before it
    fetched_bytes: int = 0  # of `handoff_bytes`: by the object store
    fetch_s: float | None = None  # from the producer's end to the start here, if idle all the while (else it is hidden)
    need_gib: float | None = None  # memory that it took beside what was there before; None where memory is not counted
    exceeded_gib: float | None = None  # taken when memory ran out, after which it was done in smaller parts
    bag: tuple[int, ...] = ()  # ranks that ran it together
    work_s: float | None = None  # from the moment when all of the bag were there to the end, without the gradient sum
    wait_s: float = 0.0  # for the others of the bag to come
    exposed_s: float = 0.0  # of its work: nothing was computed because the result of a collective was awaited
    first_here: bool = False  # the process had not run its shape before, or compiled: that and tuning are in it
    kept_attention: bool = False  # its attention was not computed again for the backward

    @property
    def item(self) -> str:
        return "+".join(piece.item for piece in self.pieces)

    @property
    def bucket(self) -> tuple[int, int, int] | None:
        """The one bucket of all samples; None when they are of several."""
        buckets = {piece.bucket for piece in self.pieces}
        return buckets.pop() if len(buckets) == 1 else None


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one worker says about a finished step."""

    worker: str
    step: int
    loss: float
    weight: float  # share of the step's samples that were good
    grad_norm: float
    lr: float
    applied: bool
    spans: tuple[Span, ...]
    peak_memory_gib: float
    rss_gib: float
    room_gib: float | None = None  # memory that a cascade of the next step may take; None: without a limit
    bad_weight: float = 0.0  # share of the step's samples that did not decode: with `weight` it is the whole step
    snapshot_s: float = 0.0  # for snapshots: copying the shard, or waiting until the last copy had ended
    bad_samples: tuple[str, ...] = ()
    # (item, its share of the loss here without its sources' loss_weight, weight of its good samples)
    item_losses: tuple[tuple[str, float, float], ...] = ()
    peak_tflops: float = 0.0  # of the worker's device in the run's precision; 0: not known
    d: float | None = None  # of Prodigy alone (`StepResult.d`)


NOT_FINITE = "non-finite loss: "  # before a sample of `StepReport.bad_samples`


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """All a worker needs to come up; the same for every worker of a run."""

    model: ModelConfig
    train: TrainConfig
    workers: WorkersConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    cached: tuple[Module, ...] = ()  # the cache has some of their results: encoders are made when one is missing
    spared: tuple[Module, ...] = ()  # of `cached`: modules whose encoders are never made
    # GiB that a GPU needs for training, in each of `train.places`; (): not known, take the first
    least_gib: tuple[float, ...] = ()
    # GiB that it needs for training and for CUDA graphs of small passes, in each of them; (): there are none to count
    graphs_least_gib: tuple[float, ...] = ()
    largest_upload: int = 0  # bytes of the pixels that a VAE takes to its device at once; 0: not known


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDoor:
    """Where the workers of other nodes find out whether they reach this one."""

    node: str
    host: str  # its name
    address: DoorAddress | None  # None: nobody knows


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesApart:
    """A node that does not reach others, or hardly, although all of them answer the controller."""

    node: str
    host: str
    others: tuple[NodeDoor, ...]
    losing: str = ""  # how it was seen that packets are lost on the way; "": nothing comes through

    def describe(self) -> str:
        """The words for a person, as a sentence without its full stop."""
        named = [f"{door.host} ({door.address[0]})" if door.address else door.host for door in self.others]
        if self.losing:
            return f"packets are lost between {self.host} and {first_of(named)}: {self.losing}"
        return f"{self.host} does not reach {first_of(named)} over the network, although all of them answer this run"


class OutOfReach(RuntimeError):
    """A worker could not form its generation: its node does not reach that of another."""

    def __init__(self, found: NodesApart) -> None:
        super().__init__(found)  # its only argument, so that it is pickled
        self.found = found

    def __str__(self) -> str:
        return self.found.describe()


@dataclass(frozen=True, kw_only=True, slots=True)
class FormTask:
    """Enter a generation as `rank` of `world` workers. Without `origin` training starts from the model's weights."""

    generation: int
    rank: int
    world: int
    store: tuple[str, int]  # host and port of the controller's TCPStore
    origin: Origin | None
    home: NodeKeeper  # of the worker's node, in whose memory its state is handed out
    nodes: tuple[int, ...] = ()  # number of each rank's node; workers of one node share memory
    doors: tuple[NodeDoor, ...] = ()  # one of each node, by its number


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """A worker's answer when its generation has ended: its shard of the step that it was asked for, if it has it."""

    worker: str
    snapshot: Snapshot | None = None


class WorkerHandle(Protocol):
    """A worker as the controller knows it (`actors.worker.worker`). Its calls run one at a time and in order."""

    @property
    def info(self) -> Method[[], WorkerInfo | FailedStart]: ...
    @property
    def form(self) -> Method[[FormTask], None]: ...
    @property
    def hand_over(self) -> Method[[int | None], Handover]: ...
    @property
    def prepare(self) -> Method[[int, tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]], None]: ...
    @property
    def encode_text(self) -> Method[Concatenate[CascadeTask, ...], list[PublishedResult]]: ...
    @property
    def encode_vae(self) -> Method[Concatenate[CascadeTask, ...], list[PublishedResult]]: ...
    @property
    def published(self) -> Method[[CascadeTask, list[Ref[list[PublishedResult]]]], list[PublishedResult]]: ...
    @property
    def outlasted(self) -> Method[[CascadeTask], list[PublishedResult]]: ...
    @property
    def dit(self) -> Method[Concatenate[CascadeTask, ...], None]: ...
    @property
    def finish_step(self) -> Method[[FinishTask], tuple[StepReport, Snapshot | None]]: ...
    @property
    def turn(self) -> Method[[TurnTask], TurnReport]: ...
