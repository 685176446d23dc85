"""The run's keepers as the controller sees them. They are on the nodes with workers and, where those are few, also on
others; they outlive the controller."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import TypeVar

import ray

from actors.config import SnapshotConfig
from actors.names import NAMESPACE, keeper_name
from actors.outcome import Tell, silent
from actors.ray_calls import FOR_GOOD, get, kill, nodes, wait
from actors.records.events import KeeperLost, KeeperSlow
from actors.refs import Ref
from actors.state.keeper import HeldShard, KeeperHandle, Standing, attach, place, spawn
from actors.state.recovery import KeeperInventory
from actors.step import Position

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_S = 10.0  # an idle keeper answers at once; one that copies a large shard, or whose node swaps, takes longer
_AGAIN_S = 1.0  # before one that was out of reach is asked again


class Keepers:
    """Starts, finds and places keepers. Without snapshots there are none and every list is empty.

    Only a keeper that Ray calls gone holds nothing. One that lives and does not answer is waited for, as long as
    `snapshot.patience_s`; after a question `silent` names those that have not answered it.
    """

    def __init__(self, run: str, config: SnapshotConfig, tell: Tell = silent) -> None:
        """`tell` is given an event for each keeper that is given up, and one per question for each that is awaited."""
        self._run, self._config, self._tell = run, config, tell
        self._unfit: set[str] = set()  # nodes without workers that had no room for the state
        self._handles: dict[str, KeeperHandle] = {}  # actor name -> handle
        self._nodes: dict[str, str] = {}  # actor name -> node
        self._placed: dict[int, tuple[str, ...]] = {}
        self._silent_since: dict[str, float] = {}  # monotonic seconds
        self.silent: tuple[str, ...] = ()

    def prepare(self, worker_nodes: Sequence[str], needs_bytes: int = 0) -> None:
        """Have keepers on the nodes that suit these workers and choose those of each worker (by rank).

        A node without workers gets a keeper only where it offers `needs_bytes` of memory; a small head node does not.
        """
        if not self._config.enabled:
            return
        alive = {node: memory for node, memory in alive_nodes().items() if memory >= needs_bytes}
        fit = {node: memory for node, memory in alive.items() if node not in self._unfit}
        homes = keeper_nodes(worker_nodes, fit, set(self._nodes.values()), self._config.copies)
        for node in homes:
            name = keeper_name(self._run, node)
            if name not in self._handles:
                self._handles[name] = spawn(name, node, namespace=NAMESPACE)
            self._nodes[name] = node
        here = {name: node for name, node in self._nodes.items() if node in homes}
        self._placed = place(dict(enumerate(worker_nodes)), here, self._config.copies)

    def of(self, rank: int) -> tuple[KeeperHandle, ...]:
        """Keepers that hold this worker's shards."""
        return tuple(self._handles[name] for name in self._placed.get(rank, ()))

    def in_use(self) -> dict[str, KeeperHandle]:
        """Those that are given shards now."""
        return {name: self._handles[name] for names in self._placed.values() for name in names if name in self._handles}

    def repair(
        self, worker_nodes: Sequence[str], give_up_s: float, needs_bytes: int = 0, timeout_s: float = 5.0
    ) -> None:
        """Remove keepers that are gone and those that have been silent for `give_up_s`; start others in their place."""
        for name, (host, room) in self._ask(lambda keeper: keeper.room.remote(), timeout_s).items():
            if room < needs_bytes and self._nodes.get(name) not in {None, *worker_nodes}:
                log.warning("%s has no room for the state: its keeper is used no more", host)
                self._unfit.add(self._nodes[name])
        for name in self.silent:
            silent_s = time.monotonic() - self._silent_since[name]
            if silent_s >= give_up_s:
                log.error("keeper %s has not answered for %.0f s and is given up", name, silent_s)
                kill(self._remove(name))
        self.prepare(worker_nodes, needs_bytes)

    def find(self) -> dict[str, KeeperHandle]:
        """Live keepers of this run, also those of an earlier controller."""
        if not self._config.enabled:
            return {}
        prefix = keeper_name(self._run, "")
        names = [
            entry["name"]
            for entry in ray.util.list_named_actors(all_namespaces=True)
            if entry["namespace"] == NAMESPACE and entry["name"].startswith(prefix)
        ]
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

    def standing(self, patience_s: float) -> Standing:
        """How far the run is by what its keepers were told."""
        told = list(self._ask(lambda keeper: keeper.standing.remote(), patience_s).values())
        return Standing(
            committed=max((s.committed for s in told), default=-1),
            generation=max((s.generation for s in told), default=0),
            position=max((s.position for s in told if s.position), key=itemgetter(0), default=None),
        )

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
        handles = self.find()
        waiting = {question(handle): name for name, handle in handles.items()}
        found: dict[str, T] = {}
        told: set[str] = set()
        while waiting:
            left_s = started + patience_s - time.monotonic()
            done, _ = wait(list(waiting), num_returns=len(waiting), timeout=max(0.0, min(_LOOK_S, left_s)))
            again = [name for reference in done if not self._took(name := waiting.pop(reference), reference, found)]
            if again:
                time.sleep(_AGAIN_S)
            waiting |= {question(handles[name]): name for name in again}
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
        """Take in an answer, or that there will be none. False: ask again."""
        try:
            found[name] = get(reference, timeout=_LOOK_S)
        except FOR_GOOD as error:  # `prepare` starts another
            log.warning("keeper %s is gone: %s", name, type(error).__name__)
            self._remove(name)
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
        return self._handles.pop(name)

    def commit(self, step: int, position: Position | None = None) -> None:
        """The step is held whole, older ones may go; `position` is that of the data after it."""
        for handle in self._handles.values():
            handle.commit.remote(step, position)

    def rollback(self, step: int, generation: int) -> None:
        """Training goes on after `step` in `generation`: later shards and late messages are refused."""
        for handle in self._handles.values():
            handle.rollback.remote(step, generation)

    def close(self) -> None:
        for handle in self._handles.values():
            kill(handle)
        self._handles.clear()


def alive_nodes() -> dict[str, float]:
    """Nodes of the cluster that live, and the memory that each offers to Ray."""
    return {node["NodeID"]: node["Resources"].get("memory", 0.0) for node in nodes() if node["Alive"]}


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
