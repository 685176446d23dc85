"""Types of the worker pool: events in, decisions out, and the view between them. Plain data; no torch, no Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actors.config import WorkersConfig
from actors.messages import FailedStart, HostGpu, NodesApart, WorkerInfo

MemberPhase = Literal["ready", "active", "recovering"]
State = Literal["waiting", "running", "recovering", "failed"]
NOTICE_S = 60.0  # until Ray has noticed a lost node, and a worker that has ended its cascade has left its groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Sizes and patience of the pool, in workers and seconds."""

    min: int
    max: int
    wait_s: float = 300.0  # below min for longer: stop, resumable
    gather_s: float = 15.0  # before the first generation, wait this long for further workers that were requested
    # A survivor must leave its broken groups and answer within this. Calls whose arguments lie on a lost node may
    # hold it up until Ray has noticed the loss, in some 30 s; to replace it sooner loses the state that it holds.
    recover_s: float = 60.0
    # The same in a generation that has not finished a step yet. Its first step may compile or tune kernels for
    # minutes; a worker that replaces this one would start that again.
    first_step_s: float = 900.0
    confirm_s: float = 5.0  # a suspected worker that stays silent this long is replaced
    request_s: float = 60.0  # a request that brought no worker is made again after this
    # Nodes that do not reach each other are not tried together for so long, each time twice as long: a try takes the
    # run workers.suspect_s, and the first time they may just have been late.
    apart_s: float = 60.0
    apart_longest_s: float = 600.0
    apart_waiting_s: float = 30.0  # at most, while the run waits anyway: for workers, or for CPUs that decode
    # A node on which workers end before their first step gets no new one for so long, each time twice as long.
    rest_s: float = 60.0
    rest_longest_s: float = 3600.0
    distrust_s: float = 21600.0  # that a node rests where a GPU seems to compute wrongly: each try may cost some steps
    max_breaks: int = 3  # generations in a row without a finished step that break without a death
    max_losses: int = 12  # the same for those that end by the loss of a worker

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise ValueError(f"workers.min {self.min} and workers.max {self.max} must satisfy 1 <= min <= max.")

    @staticmethod
    def of(config: WorkersConfig) -> Limits:
        """A survivor may still wait as long in its cascade as the one that gave up waiting for it has waited."""
        recover_s = config.collective_timeout_s + NOTICE_S
        return Limits(
            min=config.min,
            max=config.max,
            wait_s=config.wait_s,
            recover_s=recover_s,
            first_step_s=max(recover_s, config.first_step_s),
        )


# Events -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A requested worker has loaded its modules: it can join a generation. Processes that still load theirs are no
    members yet (`Loading`). Numbers are never used twice."""

    worker: int
    info: WorkerInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveredWorker:
    """A recovering worker has left its old groups and said what it holds: it can join a generation again."""

    worker: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LifeSign:
    """A suspected worker was heard of again."""

    worker: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveNotice:
    """A preemption notice, its node is drained, or a drain command: the worker goes at the next step boundary."""

    worker: int
    reason: str = "leaving"


@dataclass(frozen=True, kw_only=True, slots=True)
class Distrust:
    """A worker's GPU seems to compute wrongly."""

    worker: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """A worker sends no heartbeats."""

    worker: int
    reason: str = "silent"


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """The process is gone."""

    worker: int
    reason: str = "died"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """The cluster could start this many further workers right now, on nodes that are not shunned."""

    available: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortfall:
    """This many requested workers will not come; they may be asked for again. `failed`: the one that came, and did not
    become ready."""

    count: int
    failed: FailedStart | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """A step has ended on all workers and the next has not begun: the generation may change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Break:
    """A collective or a formation of this generation failed, with or without a known death.

    `learned`: the next one goes on without what broke it, so it does not count among the breaks that end a run; nor
    does one by nodes that are `apart`, as the next generation has not all of them.
    """

    generation: int
    reason: str
    learned: bool = False
    apart: tuple[NodesApart, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDispatch:
    """A step was dispatched in which workers may wait for each other for so long: should the generation end, a survivor
    may be in a cascade that long before it answers."""

    limit_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """The processes of `count` requested workers are up and load their modules; how long they may is not decided
    here."""

    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstStep:
    """The running generation has finished its first step: what ended the ones before it is forgiven."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Starvation:
    """The run waits for clips that cannot be decoded, as no CPU is free on the nodes within reach; or no more so."""

    starves: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Resize:
    """The user changed the size of the pool."""

    min: int
    max: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time passed; send one every second or so."""


Event = (
    Arrival
    | RecoveredWorker
    | LifeSign
    | LeaveNotice
    | Distrust
    | Suspect
    | Death
    | Resources
    | Shortfall
    | Boundary
    | Break
    | StepDispatch
    | Loading
    | Starvation
    | FirstStep
    | Resize
    | Tick
)


# Decisions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Build the process groups of this generation on these workers (node by node) and go on from the last commit.

    `clean`: the previous generation ended at a step boundary and its workers hold the state of that step.
    """

    generation: int
    workers: tuple[int, ...]
    infos: tuple[WorkerInfo, ...]  # theirs, in the same order
    reason: str
    clean: bool
    apart: tuple[str, ...] = ()  # nodes that some of these did not reach and have not trained with since, in order


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The generation is over: cancel what waits in it. If not clean, survivors hand over before they can join again."""

    generation: int
    reason: str
    clean: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """End this worker. It is in no generation any more."""

    worker: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """Kill this worker: it does not answer. It is forgotten here; a Request for another follows."""

    worker: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Start this many workers, on no node of `View.shunned`. More than the cluster has free right now only as far as
    `min` needs them."""

    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Too few workers to go on. Said once per change; `until` is when patience ends. `why` says of those that are ready
    what keeps them from training together: memory, or the network."""

    have: int
    need: int
    until: float
    why: str = ""

    def __str__(self) -> str:
        told = f"waiting for workers: {self.have} of at least {self.need} are ready"
        return f"{told}, which cannot train together: {self.why}" if self.why else told


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """These workers are ready and wait beside the generation: with them it would have too little memory, or nodes that
    do not reach each other. Others that come, or time, may change that."""

    workers: tuple[int, ...]
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRest:
    """No worker is started on the node of `where` for so long, but for those that `min` needs and no other node has
    room for; on none where nobody knows which node it is."""

    where: HostGpu
    seconds: float
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Write what there is to a checkpoint and end with this exit code."""

    code: int
    reason: str


Decision = Form | End | Drain | Replacement | Request | Wait | Exclusion | NodeRest | Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A live worker as the state machine sees it."""

    worker: int
    info: WorkerInfo
    phase: MemberPhase
    since: float  # when the phase began
    leaving: str = ""  # why it leaves
    suspected_at: float | None = None
    suspicion: str = ""
    left_out: bool = False  # of the running generation, until others come or go
    proven: bool = False  # has finished a step

    @property
    def node(self) -> str:
        """Id of its node."""
        return self.info.node


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The pool after an event."""

    state: State
    generation: int  # of the running one, or the last that ran; 0 before the first
    workers: tuple[int, ...]  # of the running generation, node by node; empty when none runs
    members: tuple[Member, ...]
    requested: int
    limits: Limits
    changed: bool  # state, generation or workers differ from the view before
    anew: bool = False  # the generation is to be formed again, of the same workers
    shunned: tuple[str, ...] = ()  # nodes for which no worker is asked: out of reach, or at rest; in order
    at_rest: tuple[str, ...] = ()  # nodes that come last for workers that `min` needs; in order

    @property
    def change_pending(self) -> bool:
        """Whether another generation than the running one is wanted: steps make room for a boundary."""
        return self.anew or any(
            (member.leaving and member.phase == "active")
            or (member.phase == "ready" and not member.leaving and not member.left_out)
            for member in self.members
        )
