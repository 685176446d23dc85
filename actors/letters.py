"""What the controller and the relay of a node tell each other: a step's calls, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from actors.aside_turns import TurnReport
from actors.held_state import Snapshot
from actors.messages import IO, CascadeTask, MemoryExceeded, PublishedResult, StepReport, WorkerHandle
from actors.refs import Method, Ref
from ops.sending import sent_often

FINISH, TURN = "finish_step", "turn"  # methods of a worker: the end of a step, and some work on an aside before it

Answer = tuple[StepReport, Snapshot | None]


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class RelayedResult:
    """What an encode has published that another relay has sent; the relay of its consumer asks that one for it. So the
    controller holds no reference to it, which would cost as much as a call."""

    relay: str  # its address
    cascade: str


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class RelayedCall:
    """A call to a worker. `references` are its last arguments; in here they do not hold a letter up until they are
    there."""

    rank: int
    method: str  # of `WorkerHandle`
    name: str  # on Ray's timeline
    arguments: tuple[object, ...]
    references: tuple[Ref[object] | RelayedResult, ...] = ()
    reads_data: bool = False  # references come from the feeder
    publishes: bool = False  # its results may be asked for by `Relay.published`

    @property
    def cascade_task(self) -> CascadeTask:
        """The cascade, or the end of one, that the call asks for. Not for calls that ask for anything else."""
        task = self.arguments[0]
        assert isinstance(task, CascadeTask), f"{self.name} is no call for a cascade"
        return task


@dataclass(frozen=True, kw_only=True, slots=True)
class RelaySeat:
    """A worker of the relay's node."""

    name: str
    handle: WorkerHandle
    publishes_later: bool

    def published(self, task: CascadeTask, name: str, encode: Ref[list[PublishedResult]]) -> Ref[list[PublishedResult]]:
        """What an encode on this worker leaves for others: the answer of its call `encode` or, where results are copied
        after that, of another call. `name` is that of the encode's call."""
        if not self.publishes_later:
            return encode
        later = self.handle.published.options(name=f"handoff {name}", concurrency_group=IO)
        return later.remote(task, [encode])


@dataclass(frozen=True, kw_only=True, slots=True)
class Letter:
    """The calls of one step to the workers of a node, in their order."""

    node: str
    relay: str  # address of the relay of this node
    generation: int
    number: int  # from 0 in a generation
    step: int
    calls: tuple[RelayedCall, ...]
    seats: dict[int, RelaySeat] = field(default_factory=dict)  # by rank; of the first letter
    forming: tuple[Ref[None], ...] = ()  # of the first letter: resolve when these workers have formed the generation


@dataclass(frozen=True, kw_only=True, slots=True)
class KeeperCall:
    """A call to a keeper, whose answer says whether it holds what it is given."""

    keeper: object
    node: str  # of it
    method: str  # of `actors.state.keeper.KeeperHandle`
    shards: Sequence[object]
    group: str = ""  # of its threads

    def made(self) -> Ref[bool]:
        """The answer to come."""
        method = getattr(self.keeper, self.method)
        answer: Ref[bool] = (method.options(concurrency_group=self.group) if self.group else method).remote(self.shards)
        return answer


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitCall:
    """A commit that keepers hear of."""

    keepers: Mapping[str, object]  # by name; as `KeeperCall.keeper`
    generation: int
    step: int
    position: Mapping[str, object] | None  # of the data after it
    pinned: tuple[int, ...]

    def made(self, name: str) -> Ref[None]:
        """Tell one of them. The answer to come."""
        method = getattr(self.keepers[name], "commit")  # noqa: B009  # of any object, which has no type here
        answer: Ref[None] = method.remote(self.generation, self.step, self.position, self.pinned)
        return answer


@dataclass(kw_only=True, slots=True)
class Failures:
    """What is known to have failed in a step. It is false while nothing has; anything else ends the generation."""

    dead: list[str] = field(default_factory=list)  # workers that are gone
    failed: dict[str, str] = field(default_factory=dict)  # worker, or relay of a node -> why it did not do its part
    pixels_lost: bool = False  # batches are gone with the process or node that held them and must be decoded again
    exceeded: list[MemoryExceeded] = field(default_factory=list)  # cascades that ran out of memory

    def __bool__(self) -> bool:
        return bool(self.dead or self.failed)

    def add(self, other: Failures) -> None:
        """Add what is known elsewhere. Of two reasons why the same worker failed, that of `other` is kept."""
        self.dead += other.dead
        self.failed.update(other.failed)
        self.pixels_lost |= other.pixels_lost
        self.exceeded += other.exceeded


@dataclass(kw_only=True, slots=True)
class NodeAnswer:
    """What became of a letter, or of those of a group of nodes: the ends of the step by rank; or, when something has
    failed, what is known of it."""

    ends: dict[int, Answer] = field(default_factory=dict)
    turns: dict[int, TurnReport] = field(default_factory=dict)  # of asides, by rank
    failures: Failures = field(default_factory=Failures)  # of workers
    lost: dict[str, str] = field(default_factory=dict)  # nodes whose relay is gone or has failed -> why

    @property
    def has_failed(self) -> bool:
        return bool(self.failures or self.lost)

    def add(self, other: NodeAnswer) -> None:
        """Take in the answer of another node."""
        self.ends.update(other.ends)
        self.turns.update(other.turns)
        self.failures.add(other.failures)
        self.lost.update(other.lost)

    def by_now(self) -> NodeAnswer:
        """What is known now. Ray packs an answer beside the loop that may still add to this one: it would fail."""
        known = NodeAnswer()
        known.add(self)
        return known


class RelayHandle(Protocol):
    """A relay as the controller knows it."""

    @property
    def step(self) -> Method[[Letter], NodeAnswer]: ...
    @property
    def deliver(self) -> Method[[Sequence[Letter]], NodeAnswer]: ...
    @property
    def published(self) -> Method[[int, str], list[PublishedResult]]: ...
    @property
    def hold(self) -> Method[[Sequence[KeeperCall]], bool]: ...
    @property
    def commit(self) -> Method[[CommitCall], list[str]]: ...
    @property
    def here(self) -> Method[[], None]: ...


class RelayFinder(Protocol):
    """The relays of a generation as those know them who have calls for a node."""

    def relay_for(self, node: str) -> RelayHandle | None: ...


@dataclass(kw_only=True, slots=True)
class CommitAnswers:
    """The answers to come of a commit: of keepers that are called directly, by name, and of relays, with the names of
    the keepers that each calls."""

    call: CommitCall
    direct: dict[Ref[None], str] = field(default_factory=dict)
    relayed: dict[Ref[list[str]], tuple[str, ...]] = field(default_factory=dict)

    def tell(self, names: Sequence[str]) -> None:
        """Tell these keepers directly; a second time it changes nothing."""
        self.direct.update({self.call.made(name): name for name in names})


def told(call: CommitCall, nodes: Mapping[str, str], relays: RelayFinder | None = None) -> CommitAnswers:
    """Tell the keepers of a commit, by the relays of their nodes' groups where there are any. `nodes` are the keepers'
    by their names."""
    answers, groups = CommitAnswers(call=call), dict[int, tuple[RelayHandle, list[str]]]()
    for name in call.keepers:
        relay = relays.relay_for(nodes.get(name, "")) if relays is not None else None
        if relay is None:
            answers.tell([name])
        else:
            groups.setdefault(id(relay), (relay, []))[1].append(name)
    for relay, names in groups.values():
        own = replace(call, keepers={name: call.keepers[name] for name in names})
        answers.relayed[relay.commit.remote(own)] = tuple(names)
    return answers


def held(calls: Sequence[KeeperCall], relays: RelayFinder | None = None) -> list[Ref[bool]]:
    """Make these calls, by the relays of their nodes' groups where there are any. The answers to come: of calls that go
    to one relay a common one, which says whether all hold."""
    groups: dict[int, tuple[RelayHandle, list[KeeperCall]]] = {}
    answers: list[Ref[bool]] = []
    for call in calls:
        relay = relays.relay_for(call.node) if relays is not None else None
        if relay is None:
            answers.append(call.made())
        else:
            groups.setdefault(id(relay), (relay, []))[1].append(call)
    return answers + [relay.hold.remote(of) for relay, of in groups.values()]
