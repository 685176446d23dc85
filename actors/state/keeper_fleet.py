"""The run's keepers as the controller sees them. They are on the nodes with workers and, where those are few, also on
others; they outlive the controller."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TypeVar

import ray

from actors.config import SnapshotConfig
from actors.held_state import COPIES, HeldShard, NodeKeeper, Snapshot
from actors.letters import CommitAnswers, CommitCall, KeeperCall, RelayFinder, held, told
from actors.names import NAMESPACE, keeper_name
from actors.outcome import Tell, silent
from actors.ray_calls import FOR_GOOD, draining_nodes, get, kill, nodes, wait
from actors.records.events import KeeperLost, KeeperSlow
from actors.refs import Ref
from actors.state.keeper import KeeperHandle, Process, Standing, attach, place, protocol, spawn
from actors.state.recovery import KeeperInventory
from actors.step import Position
from ops.counted import first_of

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_S = 10.0  # an idle keeper answers at once; one that copies a large shard, or whose node swaps, takes longer
_AGAIN_S = 1.0  # before one that was out of reach is asked again
_UNFIT_S = 600.0  # what filled a node's memory may have ended by then; longer than the repairs of one commit take
_ADOPTED_S = 30.0  # for a new keeper to start, and to take its node's memory over


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """What a generation goes on from: the version after `step` that generation `made_in` has computed, of a state of
    `total` elements; and its workers, by node."""

    generation: int
    step: int
    made_in: int
    total: int
    members: Mapping[str, tuple[Process, ...]]


class OtherKeepers(RuntimeError):
    """Keepers of the run were started by a version with which this one exchanges other messages. They may hold the
    newest state, and stay."""

    def __init__(self, names: Sequence[str], steps: int | None = None) -> None:
        """`steps`: how many have made the newest checkpoint, 0 where there is none; None where that is not known."""
        super().__init__(names, steps)
        self.names, self.steps = tuple(names), steps

    def __str__(self) -> str:
        back = f"go on from a checkpoint: heddle train --resume --back-to {self.steps or 'STEPS'}"
        return (
            f"{first_of(self.names)} of this run: started by another version of Heddle, with which this one cannot "
            f"speak, and may hold a newer state than its checkpoints. Resume with that version; or give up what is in "
            f"memory alone, and {'begin anew: heddle train --overwrite' if self.steps == 0 else back} ends them."
        )


class Keepers:
    """Starts, finds and places keepers: one on each node with workers, and others for copies.

    Only a keeper that Ray calls gone holds nothing, and not even that while workers of its node live: another one takes
    the node's memory over from them. One that lives and does not answer is waited for, as long as
    `snapshot.patience_s`; after a question `silent` names those that have not answered it.
    """

    def __init__(self, run: str, config: SnapshotConfig, tell: Tell = silent) -> None:
        """`tell` is given an event for each keeper that is given up, and one per question for each that is awaited."""
        self._run, self._tell = run, tell
        self._copies = config.copies if config.enabled else 0
        self._unfit: dict[str, float] = {}  # nodes without workers on which the state cannot be -> monotonic seconds
        self._handles: dict[str, KeeperHandle] = {}  # actor name -> handle
        self._lost: dict[str, KeeperHandle] = {}  # keepers that are gone, until there are others: calls to them fail
        self._nodes: dict[str, str] = {}  # actor name -> node
        self._homes: dict[int, str] = {}  # rank -> actor name of the keeper of its node
        self._placed: dict[int, tuple[str, ...]] = {}  # rank -> those that copy its shards
        self._lenders: dict[str, tuple[int, ...]] = {}  # node -> numbers by which its workers lend its memory
        self._base: Base | None = None  # what the running generation goes on from
        self._position: Position | None = None  # of the data after the newest committed step, where it is known
        self._pinned: tuple[int, ...] = ()  # steps whose checkpoints are being written
        self._told: CommitAnswers | None = None  # to the last commit
        self._unreached: set[str] = set()  # keepers that the last commit could not be sent to
        self._adopting: dict[str, Ref[bool]] = {}  # of keepers that were started in the place of others
        self._silent_since: dict[str, float] = {}  # monotonic seconds
        self.silent: tuple[str, ...] = ()

    def prepare(
        self,
        worker_nodes: Sequence[str],
        needs_bytes: int = 0,
        lenders: Mapping[str, tuple[int, ...]] | None = None,
    ) -> list[str]:
        """Have keepers on the nodes of these workers (by rank) and on those that suit their copies. `lenders`: by node,
        the numbers by which its workers lend its memory. Returns the nodes of keepers that are new, and hold nothing.

        A node without workers gets a keeper only where it offers `needs_bytes` of memory; a small head node does not.
        """
        self._lenders = self._lenders if lenders is None else dict(lenders)
        alive = {node: memory for node, memory in alive_nodes().items() if memory >= needs_bytes}
        now = time.monotonic()
        self._unfit = {node: since for node, since in self._unfit.items() if now - since <= _UNFIT_S}
        fit = {node: memory for node, memory in alive.items() if node not in self._unfit}
        chosen = keeper_nodes(worker_nodes, fit, set(self._nodes.values()), self._copies)
        fresh = [node for node in chosen if keeper_on(self._run, node) not in self._handles]
        for node in fresh:
            self._start(node)
        for node in chosen:
            self._nodes[keeper_on(self._run, node)] = node
        here = {name: node for name, node in self._nodes.items() if node in chosen}
        self._homes = {rank: keeper_on(self._run, node) for rank, node in enumerate(worker_nodes)}
        self._placed = place(dict(enumerate(worker_nodes)), here, self._copies)
        return fresh

    def begin(self, base: Base) -> None:
        """Training goes on from this: later states and late messages are refused from now on."""
        goes_on = self._base is not None and self._base.step == base.step
        self._base, self._adopting = base, {}
        if not goes_on:
            self._position = None
        for name in self._handles:
            self._begin(name)
        if goes_on and self._told is not None and self._told.relayed:
            # Late by a relay it is refused from now on, and with it where the data stands and what is pinned.
            self.commit(base.step, self._position, self._pinned)

    def home(self, rank: int) -> KeeperHandle:
        """The keeper of this worker's node."""
        return self._handle(self._homes[rank])

    def hold(self, snapshots: Sequence[Snapshot], relays: RelayFinder | None = None) -> list[Ref[bool]]:
        """Have these shards held, each by the keeper of its node and by those that copy it. Returns the answers, which
        come when they are: of each keeper one for its own shards and one for copies, or one of each group of keepers
        that a relay calls."""
        puts: dict[str, list[Snapshot]] = {}
        copies: dict[str, list[tuple[Snapshot, NodeKeeper]]] = {}
        for snapshot in snapshots:
            if snapshot.lo < snapshot.hi:
                shard = replace(snapshot, copied=None) if snapshot.copied is not None else snapshot
                home = self._homes[snapshot.rank]
                puts.setdefault(home, []).append(shard)
                for name in self._placed[snapshot.rank]:
                    copies.setdefault(name, []).append((shard, self._handle(home)))
        calls = [self._call(name, "put", tuple(shards)) for name, shards in puts.items()]
        calls += [self._call(name, "hold", shards, COPIES) for name, shards in copies.items()]
        return held(calls, relays)

    def _call(self, name: str, method: str, shards: Sequence[object], group: str = "") -> KeeperCall:
        node = self._nodes.get(name, "")
        return KeeperCall(keeper=self._handle(name), node=node, method=method, shards=shards, group=group)

    def in_use(self) -> dict[str, KeeperHandle]:
        """Keepers that are given shards now."""
        names = dict.fromkeys([*self._homes.values(), *(name for names in self._placed.values() for name in names)])
        return {name: self._handles[name] for name in names if name in self._handles}

    def leaving(self) -> list[KeeperHandle]:
        """Keepers on nodes that Ray drains: with them goes what they hold."""
        names = [keeper_on(self._run, node) for node in draining_nodes()] if self._handles else []
        return [self._handles[name] for name in sorted(names) if name in self._handles]

    def gone(self) -> list[str]:
        """Keepers that the last commit could not be sent to. Never waits."""
        if (told := self._told) is not None:
            for one in _done(told.direct):
                name = told.direct.pop(one)
                if _is_lost(one):
                    self._unreached.add(name)
            for another in _done(told.relayed):
                names = told.relayed.pop(another)
                try:
                    self._unreached.update(get(another, timeout=_LOOK_S))
                except ray.exceptions.RayError:  # the relay is gone, and which keepers it has told is not known
                    told.tell([name for name in names if name in self._handles])
        return sorted(self._unreached & self._handles.keys())

    def rested(self) -> list[str]:
        """Nodes on which the state could not be, for want of room as a rule, and may be by now, while shards lack
        copies: `repair` finds out. Never waits."""
        if not self._unfit or all(len(names) >= self._copies for names in self._placed.values()):
            return []
        now = time.monotonic()
        return sorted(node for node, since in self._unfit.items() if now - since > _UNFIT_S)

    def repair(
        self, worker_nodes: Sequence[str], give_up_s: float, needs_bytes: int = 0, timeout_s: float = 5.0
    ) -> list[str]:
        """Remove keepers that are gone and those that have been silent for `give_up_s`; start others in their place.
        Returns the nodes of workers whose memory no keeper has any more."""
        for name, (host, room) in self._ask(lambda keeper: keeper.room.remote(), timeout_s).items():
            if room < needs_bytes and self._nodes.get(name) not in {None, *worker_nodes}:
                log.warning("%s has no room for the state: its keeper is not used for %.0f s", host, _UNFIT_S)
                self._unfit[self._nodes[name]] = time.monotonic()
        for name in self.silent:
            silent_s = time.monotonic() - self._silent_since[name]
            if silent_s >= give_up_s:
                log.error("keeper %s has not answered for %.0f s and is given up", name, silent_s)
                node = self._nodes.get(name)
                kill(self._remove(name))
                self._revive(node)
        adopting, self._adopting = self._adopting, {}
        fresh = self.prepare(worker_nodes, needs_bytes)
        fresh += [self._nodes[name] for name, reference in adopting.items() if not _has_adopted(reference)]
        if self._base is not None:
            for node in fresh:
                self._begin(keeper_on(self._run, node))
            self.commit(self._base.step, self._position, self._pinned)  # a restarted one may not know it
        return [node for node in fresh if node in worker_nodes]

    def find(self) -> dict[str, KeeperHandle]:
        """Live keepers of this run, also those of an earlier controller. Raises OtherKeepers."""
        names = keepers_of_run(self._run)
        if other := [name for name in names if not is_of_this_version(name)]:
            raise OtherKeepers(other)
        self._handles.update(attach([n for n in names if n not in self._handles], namespace=NAMESPACE))
        return dict(self._handles)

    def inventories(
        self, patience_s: float, is_enough: Callable[[Sequence[KeeperInventory]], bool] = lambda found: False
    ) -> list[KeeperInventory]:
        """What each keeper that lives holds. `is_enough` says whether the answers so far suffice."""

        def named(found: Mapping[str, Sequence[HeldShard]]) -> list[KeeperInventory]:
            return [KeeperInventory(keeper=self._handles[name], shards=shards) for name, shards in found.items()]

        return named(
            self._ask(lambda keeper: keeper.inventory.remote(), patience_s, lambda found: is_enough(named(found)))
        )

    def take_over(self, patience_s: float) -> Standing:
        """How far the run is, by the commits that its keepers have heard of; they refuse what an earlier controller has
        sent and comes later."""
        return _together(self._ask(lambda keeper: keeper.take_over.remote(), patience_s).values())

    def standing(self, patience_s: float) -> Standing:
        """How far the run is."""
        return _together(self._ask(lambda keeper: keeper.standing.remote(), patience_s).values())

    def rooms(self, timeout_s: float) -> list[tuple[str, int]]:
        """(host, bytes that the state may take there) of the keepers that are given shards."""
        used = self.in_use()
        return [
            room for name, room in self._ask(lambda keeper: keeper.room.remote(), timeout_s).items() if name in used
        ]

    def _ask(
        self,
        question: Callable[[KeeperHandle], Ref[T]],
        patience_s: float,
        enough: Callable[[Mapping[str, T]], bool] = lambda found: False,
    ) -> dict[str, T]:
        """The answers of all keepers that live, by name."""
        started = time.monotonic()
        waiting = {question(handle): name for name, handle in self.find().items()}
        found: dict[str, T] = {}
        told: set[str] = set()
        while waiting:
            left_s = started + patience_s - time.monotonic()
            done, _ = wait(list(waiting), num_returns=len(waiting), timeout=max(0.0, min(_LOOK_S, left_s)))
            again = [name for reference in done if not self._took(name := waiting.pop(reference), reference, found)]
            if again:
                time.sleep(_AGAIN_S)
            waiting |= {question(self._handles[name]): name for name in again}
            if left_s <= 0 or enough(found):
                break
            if time.monotonic() - started >= _LOOK_S:
                self._tell_slow(set(waiting.values()) - told, started)
                told |= set(waiting.values())
        self.silent = tuple(sorted(waiting.values()))
        for name in self.silent:
            self._silent_since.setdefault(name, started)
        return found

    def _took(self, name: str, reference: Ref[T], found: dict[str, T]) -> bool:
        """Take in an answer, or that there will be none. False: ask this keeper again, or the one in its place."""
        try:
            found[name] = get(reference, timeout=_LOOK_S)
        except FOR_GOOD as error:
            log.warning("keeper %s is gone: %s", name, type(error).__name__)
            node = self._nodes.get(name)
            if isinstance(error, ray.exceptions.RuntimeEnvSetupError) and node and name not in self._homes.values():
                log.warning("no keeper starts on node %s, which is not used for %.0f s: %s", node, _UNFIT_S, error)
                self._unfit[node] = time.monotonic()
            self._remove(name)
            return not self._revive(node)  # else `prepare` starts another, which begins with nothing
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError) as error:
            log.warning("keeper %s is out of reach: %s", name, type(error).__name__)
            return False
        else:
            self._silent_since.pop(name, None)
        return True

    def _tell_slow(self, names: Collection[str], started: float) -> None:
        for name in sorted(names):
            waited = time.monotonic() - started
            log.warning("keeper %s lives and has not answered for %.0f s; waiting for it", name, waited)
            self._tell(KeeperSlow(keeper=name, seconds=round(waited, 1)))

    def _remove(self, name: str) -> KeeperHandle:
        self._tell(KeeperLost(keeper=name))
        self._nodes.pop(name, None)
        self._silent_since.pop(name, None)
        self._unreached.discard(name)
        if self._told is not None:
            self._told.direct = {one: other for one, other in self._told.direct.items() if other != name}
        self._lost[name] = self._handles.pop(name)
        return self._lost[name]

    def _revive(self, node: str | None) -> bool:
        """Start a keeper in the place of a lost one, if workers of its node may have the memory; once, until `repair`
        has asked whether they had it."""
        if node is None or not self._lenders.get(node) or keeper_on(self._run, node) in self._adopting:
            return False
        if node not in alive_nodes():
            return False
        name = self._start(node)
        self._nodes[name] = node
        self._adopting[name] = self._handles[name].adopt.remote(self._lenders[node])
        return True

    def _start(self, node: str) -> str:
        """A new keeper on this node. Returns its name."""
        name = keeper_on(self._run, node)
        self._handles[name] = spawn(name, node, namespace=NAMESPACE)
        return name

    def _handle(self, name: str) -> KeeperHandle:
        return self._handles[name] if name in self._handles else self._lost[name]

    def _begin(self, name: str) -> None:
        base = self._base
        assert base is not None
        members = base.members.get(self._nodes.get(name, ""), ())
        self._handles[name].begin.remote(base.generation, base.step, base.made_in, base.total, members)

    def commit(
        self,
        step: int,
        position: Position | None = None,
        pinned: Collection[int] = (),
        relays: RelayFinder | None = None,
    ) -> None:
        """The step is safe, older ones may go but those `pinned`, whose checkpoints are being written; `position` is
        that of the data after it. Keepers hear of it by `relays`, else directly, after all earlier calls."""
        if self._base is not None and step > self._base.step:
            self._base = replace(self._base, step=step, made_in=self._base.generation)
        self._position, self._pinned = position, tuple(pinned)
        call = CommitCall(
            keepers=dict(self._handles),
            generation=self._base.generation if self._base is not None else 0,
            step=step,
            position=position,
            pinned=self._pinned,
        )
        self._unreached, self._told = set(), told(call, self._nodes, relays)

    def pin(self, steps: Collection[int]) -> None:
        """No generation runs. Of these steps checkpoints are being written: their versions stay until another commit
        names others."""
        if self._base is not None:
            self.commit(self._base.step, self._position, steps)

    def close(self) -> None:
        for handle in self._handles.values():
            kill(handle)
        self._handles.clear()


def keeper_on(run: str, node: str) -> str:
    """The name of the run's keeper on this node, started by this version."""
    return f"{keeper_name(run, node)}-{protocol()}"


def is_of_this_version(keeper: str) -> bool:
    """Whether the keeper of this name exchanges the messages of this version."""
    return keeper.endswith(f"-{protocol()}")


def keepers_of_run(run: str) -> list[str]:
    """Names of a run's keepers that live, of any version."""
    return [
        entry["name"]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == NAMESPACE and entry["name"].startswith(keeper_name(run, ""))
    ]


def _together(told: Collection[Standing]) -> Standing:
    """What several keepers know."""
    return Standing(
        committed=max((s.committed for s in told), default=-1),
        generation=max((s.generation for s in told), default=0),
        position=max((s.position for s in told if s.position), key=itemgetter(0), default=None),
    )


def _done(references: Collection[Ref[T]]) -> list[Ref[T]]:
    """The references that have resolved."""
    return wait(list(references), num_returns=len(references), timeout=0)[0] if references else []


def _is_lost(reference: Ref[None]) -> bool:
    try:
        get(reference, timeout=_LOOK_S)
    except FOR_GOOD:
        return True
    except ray.exceptions.RayError:
        return False
    return False


def _has_adopted(reference: Ref[bool]) -> bool:
    try:
        return get(reference, timeout=_ADOPTED_S)
    except ray.exceptions.RayError as error:
        log.warning("a keeper could not take over its node's memory: %s", error)
        return False


def alive_nodes() -> dict[str, float]:
    """Nodes of the cluster that live and stay, and the memory that each offers to Ray, which starts nothing more on
    those that it drains."""
    there, leaving = nodes(), draining_nodes()
    return {
        node["NodeID"]: node["Resources"].get("memory", 0.0)
        for node in there
        if node["Alive"] and node["NodeID"] not in leaving
    }


def keeper_nodes(
    worker_nodes: Sequence[str], alive: Mapping[str, float], kept: Collection[str], copies: int
) -> list[str]:
    """Nodes that get a keeper: those with workers and, until the copies of a shard and its worker can all lie on
    different nodes, others that live: first those with a keeper, then those with the most memory.

    >>> keeper_nodes(["a", "a"], {"a": 8.0, "b": 2.0, "c": 4.0}, kept=(), copies=1)
    ['a', 'c']
    """
    chosen = list(dict.fromkeys(worker_nodes))
    others = sorted(set(alive) - set(chosen), key=lambda node: (node not in kept, -alive[node], node))
    return chosen + others[: max(0, copies + 1 - len(chosen))]
