"""A run's committer, its state and the keepers of its nodes, under any order of steps, messages, losses, checkpoints.

Keepers are real, with real memory; so are the controller's decisions. Messages to a keeper wait until they are
delivered, in their order, and copies between nodes in any. The state after a step is the number of the step, in all of
its elements, so that a mixture of two versions is seen wherever somebody reads.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from actors import process
from actors.messages import Origin, Snapshot
from actors.outcome import Events, NotRecorded, Tell
from actors.run.committer import Committer
from actors.state import keeper as keeper_module
from actors.state import pulling
from actors.state.checkpoints_on_disk import CheckpointsOnDisk
from actors.state.keeper import Keeper, Standing, place
from actors.state.keeper_fleet import Base
from actors.state.recovery import KeeperInventory
from actors.state.run_state import RunState
from ops.shards import ARRAYS, missing, shard_bounds
from tests.actors.fakes import Handle, Listening, NoPositions, collected, config_of

TOTAL = 240
HERE = (os.getpid(), process.birth(os.getpid()))
MOST_NODES, MOST_WORKERS = 4, 5
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking a failure takes minutes


@dataclass(eq=False)
class Answer:
    """A reference to what a call gives, once it has run."""

    value: bool | None = None


@dataclass(eq=False)
class Node:
    """A node with its keeper and what is on its way to it."""

    name: str
    keeper: Keeper = field(default_factory=Keeper)
    inbox: deque[Callable[[], None]] = field(default_factory=deque)

    @property
    def handle(self) -> Any:
        """The keeper as others know it."""
        return Handle(read=self.keeper.read, held=self.keeper.held)


@dataclass(kw_only=True, eq=False)
class Working:
    """A worker in a generation. `step`: after which its state is, None before it has entered."""

    rank: int
    node: Node
    lo: int
    hi: int
    step: int | None = None
    finished: dict[int, Snapshot] = field(default_factory=dict)  # by step, until the controller has them


class Fleet:
    """The keepers of a run, as `actors.state.keeper_fleet.Keepers`, with one copy on another node."""

    silent: tuple[str, ...] = ()

    def __init__(self, nodes: dict[str, Node]) -> None:
        self.nodes = nodes
        self.copies: list[tuple[Node, Node, Snapshot, Answer]] = []  # target, source, what, the answer to come
        self._homes: Sequence[str] = ()
        self._generation = 0

    def inventories(self, patience_s: float, is_enough: Any) -> list[KeeperInventory]:
        return [KeeperInventory(keeper=one, shards=one.keeper.inventory()) for one in self.nodes.values()]  # type: ignore[arg-type]

    def take_over(self) -> Standing:
        told = [one.keeper.take_over() for one in self.nodes.values()]
        return Standing(
            committed=max((one.committed for one in told), default=-1),
            generation=max((one.generation for one in told), default=0),
        )

    def prepare(self, nodes: Sequence[str], needs_bytes: int = 0, lenders: Any = None) -> list[str]:
        self._homes = nodes
        return []

    def begin(self, base: Base) -> None:
        self._generation = base.generation
        for node in self.nodes.values():
            args = (base.generation, base.step, base.made_in, base.total, (HERE,) * (node.name in self._homes))
            node.inbox.append(lambda keeper=node.keeper, args=args: keeper.begin(*args))  # type: ignore[misc]

    def hold(self, snapshots: Sequence[Snapshot], relays: object = None) -> list[Answer]:
        homes = {name: name for name in self.nodes}
        placed = place(dict(enumerate(self._homes)), homes)
        answers = []
        for one in snapshots:
            home = self.nodes.get(self._homes[one.rank])
            answers.append(Answer())
            if home is None:
                continue  # its node is gone: no answer comes
            home.inbox.append(lambda node=home, one=one, answer=answers[-1]: put(node, one, answer))  # type: ignore[misc]
            for name in placed[one.rank]:
                answers.append(Answer())
                self.copies.append((self.nodes[name], home, one, answers[-1]))
        return answers

    def commit(self, step: int, position: Any, pinned: Sequence[int] = (), relays: Any = None) -> None:
        for node in self.nodes.values():
            args = (self._generation, step, None, tuple(pinned))
            node.inbox.append(lambda keeper=node.keeper, args=args: keeper.commit(*args))  # type: ignore[misc]

    def in_use(self) -> Mapping[str, Node]:
        return {}

    def gone(self) -> list[str]:
        return []

    def rested(self) -> list[str]:
        return []


def put(node: Node, snapshot: Snapshot, answer: Answer) -> None:
    answer.value = node.keeper.put([snapshot])


def copied(target: Node, source: Node, snapshot: Snapshot) -> bool | None:
    """Whether a keeper has copied a shard; None: it would wait now."""
    keeper, book = target.keeper, target.keeper._book
    if keeper._memory is None or book.generation < snapshot.generation:
        return None
    if not keeper._is_over(snapshot):
        waits = book.bank_for(snapshot.step, snapshot.generation) is None
        if waits or source.keeper.read(snapshot.step, snapshot.generation, snapshot.lo, snapshot.hi) is None:
            return None
    return keeper.hold([(snapshot, source.handle)])


class Checkpoints:
    """The writer of checkpoints: of the next step that is committed where one is wanted, a part after the other."""

    def __init__(self) -> None:
        self.wanted = False
        self.writing: Origin | None = None
        self.left: list[tuple[int, int]] = []
        self.disk: tuple[int, Path] | None = None

    @property
    def steps(self) -> list[int]:
        return [] if self.writing is None else [self.writing.step]

    def due(self, step: int) -> bool:
        return self.wanted

    def puts_off(self, step: int) -> bool:
        return self.writing is not None

    def save(self, version: Origin, meta: object) -> None:
        self.wanted, self.writing, self.left = False, version, shard_bounds(TOTAL, 3)

    def go_back(self, step: int) -> None: ...
    def poll(self) -> None: ...

    def go_on(self, nodes: Mapping[str, Node]) -> None:
        """Write a part of what is being written, or give it up as nobody has it."""
        assert self.writing is not None
        version, (lo, hi) = self.writing, self.left.pop()
        found = pieces(nodes.values(), version.step, version.generation, lo, hi)
        if found is None:
            self.writing = None
            return
        assert found == {float(version.step)}, f"a checkpoint of step {version.step} would hold {found}"
        if not self.left:
            self.writing, self.disk = None, (version.step, Path(f"step-{version.step}"))


def pieces(nodes: Any, step: int, generation: int, lo: int, hi: int) -> set[float] | None:
    """What stands in [lo, hi) of a version, with keepers that have it; None where some of it has nobody."""
    values, have = set[float](), list[tuple[int, int]]()
    for node in nodes:
        for held in node.keeper.held(step, generation):
            a, b = max(lo, held.lo), min(hi, held.hi)
            if a < b and (shard := node.keeper.read(step, generation, a, b)) is not None:
                values |= {float(value) for array in shard.arrays.values() for value in np.unique(array)}
                have.append((a, b))
    return values if not missing(have, lo, hi) else None


class Disk(CheckpointsOnDisk):
    """One that is a variable."""

    def __init__(self, checkpoints: Checkpoints, tell: Tell) -> None:
        super().__init__(Path("nowhere"), tell)
        self._checkpoints = checkpoints

    def newest(self, until: float = math.inf) -> tuple[int, Path] | None:
        disk = self._checkpoints.disk
        return disk if disk is not None and disk[0] <= until else None

    def is_damaged(self, folder: Path) -> bool:
        return False


class State(RunState):
    """The real state of a run, of a model of TOTAL weights."""

    _total, _parameters = TOTAL, ()  # type: ignore[assignment]

    def _meta(self, step: int) -> dict[str, Any]:
        return {}

    def data_token(self, committed: int) -> None:
        return None


class Lines(Listening):
    """metrics.jsonl, as steps of its lines and their generations."""

    def __init__(self) -> None:
        super().__init__()
        self.generations: list[int] = []
        self.disk_is_full = False

    def newest_line(self) -> tuple[int, int] | None:
        return (self.steps[-1], self.generations[-1]) if self.steps else None

    def on_step(self, metrics: Any, timeline: Any, plan: Any) -> None:
        if self.disk_is_full:
            raise NotRecorded("full") from OSError("full")
        self.steps = self.steps[: metrics.step]
        self.generations[metrics.step :] = [metrics.generation]
        assert len(self.steps) == metrics.step, f"step {metrics.step} is written after {self.steps[-1:]}"
        self.steps.append(metrics.step)


class Storm(RuleBasedStateMachine):
    """One run, from its first controller on."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[str, Node] = {}
        self.serial = self.generation = 0
        self.seats: list[str] = []  # the node of each worker that lives
        self.world: list[Working] = []  # of the running generation
        self.lines, self.checkpoints = Lines(), Checkpoints()
        self.protected = False  # the newest committed step lies on two nodes
        self.may_lose = False
        self.fleet = Fleet(self.nodes)
        self.begin()
        for _ in range(2):
            self.add_node()
        self.form()

    def begin(self, before: int = -1) -> None:
        """A controller takes over. The one before it has committed `before`, of which keepers may not have heard."""
        self.fleet = Fleet(self.nodes)
        listener = Events(self.lines)
        self.state = State(
            config_of(),
            config_of().model,
            keepers=self.fleet,  # type: ignore[arg-type]
            standing=(standing := self.fleet.take_over()),
            writer=self.checkpoints,  # type: ignore[arg-type]
            disk=Disk(self.checkpoints, listener.tell),
            positions=NoPositions(),
            tell=listener.tell,
        )
        self.committer = Committer(
            state=self.state,
            account=SimpleNamespace(records=lambda done: (done.running, [])),  # type: ignore[arg-type]
            listener=self.lines,
            events=listener,
            source=SimpleNamespace(avoid=(), open=lambda *given: None, release=lambda step: None),  # type: ignore[arg-type]
        )
        self.generation = max(self.generation, standing.generation)
        origin = self.state.first(self.lines.newest_line())
        found = origin.step if origin is not None else -1
        assert self.may_lose or found >= before, f"step {before} counted, and a controller goes on at {found}"
        self.committer.restart(found)

    # -- what happens to nodes, workers and controller -----------------------------------------------------------------

    @precondition(lambda self: len(self.nodes) < MOST_NODES and len(self.seats) < MOST_WORKERS)
    @rule()
    def add_node(self) -> None:
        self.serial += 1
        node = self.nodes[f"n{self.serial}"] = Node(f"n{self.serial}")
        self.seats.append(node.name)
        self.world = []

    @precondition(lambda self: self.nodes and len(self.seats) < MOST_WORKERS)
    @rule(which=st.integers(0, 99))
    def add_worker(self, which: int) -> None:
        self.seats.append(list(self.nodes)[which % len(self.nodes)])
        self.world = []

    @precondition(lambda self: len(self.seats) > 1)
    @rule(which=st.integers(0, 99))
    def lose_worker(self, which: int) -> None:
        del self.seats[which % len(self.seats)]
        self.world = []

    @precondition(lambda self: len(self.nodes) > 1)
    @rule(which=st.integers(0, 99))
    def lose_node(self, which: int) -> None:
        name = list(self.nodes)[which % len(self.nodes)]
        self.nodes.pop(name).keeper.close()
        self.seats = [node for node in self.seats if node != name]
        self.world, self.fleet.copies = [], [one for one in self.fleet.copies if name not in (one[0].name, one[1].name)]
        self.may_lose |= not self.protected
        self.protected = False

    @rule(drops=st.booleans())
    def lose_controller(self, drops: bool) -> None:
        """What it has sent may be lost with it, or come later."""
        for node in self.nodes.values() if drops else ():
            node.inbox.clear()
        late = [] if drops else self.fleet.copies
        self.world = []
        self.begin(self.committer.committed)
        self.fleet.copies += late

    @rule()
    def fill_the_disk(self) -> None:
        self.lines.disk_is_full = True

    @precondition(lambda self: self.lines.disk_is_full)
    @rule()
    def make_room(self) -> None:
        self.lines.disk_is_full = False
        if self.committer._storage is not None:
            self.committer._storage.tried = 0.0  # a second is over

    # -- what a run does -----------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.world and self.seats)
    @rule()
    def form(self) -> None:
        self.generation += 1
        recovery = self.state.recover(self.committer.log)
        assert self.may_lose or not recovery.lost_steps, f"{recovery.lost_steps} steps are lost"
        recovery = self.committer.go_on_from(recovery)
        assert self.may_lose or not recovery.lost_steps, f"{recovery.lost_steps} steps are lost, as none was recorded"
        nodes = sorted(self.seats)
        infos: Any = [SimpleNamespace(node=node, lends=0, pid=HERE[0], born=HERE[1]) for node in nodes]
        self.state.open(recovery.origin, self.generation, infos)
        bounds = shard_bounds(TOTAL, len(nodes))
        self.world = [
            Working(rank=rank, node=self.nodes[node], lo=lo, hi=hi)
            for rank, (node, (lo, hi)) in enumerate(zip(nodes, bounds, strict=True))
        ]
        self.origin = recovery.origin

    @precondition(lambda self: self.world)
    @rule(which=st.integers(0, 99))
    def compute(self, which: int) -> None:
        """A worker enters the generation, or updates its range, if its keeper lets it."""
        worker = self.world[which % len(self.world)]
        keeper = worker.node.keeper
        memory = keeper._memory
        if memory is None or keeper._book.generation != self.generation:
            return
        if worker.step is None:
            self.enter(worker)
            return
        order, done = memory.order, worker.step
        behind = min(other.step if other.step is not None else -2 for other in self.world)
        if order.step != done or behind < done:  # the version before it may still be needed; gradients are summed
            return
        self.check(worker, order.held, done)
        fill(memory, order.next, worker, done + 1)
        worker.step = done + 1
        worker.finished[done + 1] = self.snapshot(worker, done + 1, self.generation, order.next)

    def enter(self, worker: Working) -> None:
        keeper, origin = worker.node.keeper, self.origin
        joined = keeper.join(self.generation, HERE[0], worker.lo, worker.hi)
        memory = keeper._memory
        assert joined is not None and memory is not None
        base = origin.step if origin is not None else -1
        held = memory.order.held
        for lo, hi in missing(joined.ranges, worker.lo, worker.hi):
            if origin is not None and origin.checkpoint is None:
                nodes = [one for one in origin.keepers if one.name in self.nodes]  # type: ignore[attr-defined]
                if pieces(nodes, base, origin.generation, lo, hi) != {float(base)}:
                    self.world = []  # it is held by nobody any more: the generation begins again
                    return
            for array in memory.arrays(held, lo, hi).values():
                array[:] = base
        self.check(worker, held, base)
        worker.step = base
        keeper.put([self.snapshot(worker, base, joined.made_in, held)])

    def check(self, worker: Working, bank: int, step: int) -> None:
        memory = worker.node.keeper._memory
        assert memory is not None
        for name, array in memory.arrays(bank, worker.lo, worker.hi).items():
            assert set(array) <= {float(step)}, f"{name} of rank {worker.rank} after step {step} is {set(array)}"

    def snapshot(self, worker: Working, step: int, generation: int, bank: int) -> Snapshot:
        return Snapshot(
            step=step,
            generation=generation,
            rank=worker.rank,
            lo=worker.lo,
            hi=worker.hi,
            total=TOTAL,
            bank=bank,
            names=ARRAYS,
            updates=step + 1,
        )

    @precondition(lambda self: self.world)
    @rule()
    def collect(self) -> None:
        """The controller hears of a step that all workers have finished, and commits what is held."""
        step = self.committer.committed + self.committer.num_open + 1
        if all(step in worker.finished for worker in self.world):
            shards = [worker.finished.pop(step) for worker in self.world]
            self.committer.add(collected(step, self.generation, *shards))
        before = self.committer.committed
        self.committer.settle((), quiet=False)
        if self.committer.committed > before:
            self.protected, self.may_lose = len(self.nodes) > 1, False

    @precondition(lambda self: any(node.inbox for node in self.nodes.values()))
    @rule(which=st.integers(0, 99))
    def deliver(self, which: int) -> None:
        waiting = [node for node in self.nodes.values() if node.inbox]
        waiting[which % len(waiting)].inbox.popleft()()

    @precondition(lambda self: self.fleet.copies)
    @rule(which=st.integers(0, 99))
    def copy(self, which: int) -> None:
        one = self.fleet.copies[which % len(self.fleet.copies)]
        target, source, snapshot, answer = one
        if (done := copied(target, source, snapshot)) is not None:
            answer.value = done
            self.fleet.copies.remove(one)

    @rule(rounds=st.integers(1, 8))
    def go_on(self, rounds: int) -> None:
        """Everybody does what he can, in turn."""
        for _ in range(rounds):
            if not self.world and self.seats:
                self.form()
            for which in range(len(self.world)):
                if self.world:
                    self.compute(which)
            while any(node.inbox for node in self.nodes.values()):
                self.deliver(0)
            for which in reversed(range(len(self.fleet.copies))):
                self.copy(which)
            if self.world:
                self.collect()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @rule()
    def want_checkpoint(self) -> None:
        self.checkpoints.wanted = True

    @precondition(lambda self: self.checkpoints.writing is not None)
    @rule()
    def write_checkpoint(self) -> None:
        self.checkpoints.go_on(self.nodes)

    # -- promises ------------------------------------------------------------------------------------------------------

    @invariant()
    def no_step_counts_twice_and_none_is_left_out(self) -> None:
        assert self.lines.steps == list(range(len(self.lines.steps)))

    @invariant()
    def what_counts_is_somewhere(self) -> None:
        """The newest committed step, whole, or the one before it while that is what keepers know of."""
        committed = self.committer.committed
        if self.may_lose or committed < 0 or (self.checkpoints.disk or (-1,))[0] >= committed:
            return
        found = self.state._find(self.committer.log)
        assert found.step >= committed, f"step {committed} counts, and {found.step} is the newest that is there"
        origin = found.origin
        assert origin is not None
        assert pieces(self.nodes.values(), origin.step, origin.generation, 0, TOTAL) == {float(origin.step)}

    @invariant()
    def keepers_hold_no_more_than_their_banks(self) -> None:
        for node in self.nodes.values():
            assert len(node.keeper._book.versions) <= 3 and len(node.keeper._book.to_json()["versions"]) <= 3  # type: ignore[arg-type]

    def teardown(self) -> None:
        for node in self.nodes.values():
            node.keeper.close()


def fill(memory: Any, bank: int, worker: Working, step: int) -> None:
    for array in memory.arrays(bank, worker.lo, worker.hi).values():
        array[:] = step


@pytest.mark.timeout(300)
def test_in_any_storm_no_committed_step_is_lost_and_none_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(references: list[Answer], num_returns: int, timeout: float) -> tuple[list[Answer], list[Answer]]:
        done = [one for one in references if one.value is not None]
        return done, [one for one in references if one.value is None]

    def get(answers: Answer | list[Answer], timeout: float | None = None) -> Any:
        return [one.value for one in answers] if isinstance(answers, list) else answers.value

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(pulling, "get", lambda reference: reference)
    monkeypatch.setattr(pulling, "wait", lambda references, timeout: (references, []))
    monkeypatch.setattr(keeper_module, "end_all", lambda processes: "")  # who has not left is as good as ended
    run_state_machine_as_test(Storm, settings=settings(max_examples=100, stateful_step_count=40, phases=_PHASES))
