"""The run's keepers as the controller sees them: one on every node with workers, outliving the controller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import ray

from actors.config import SnapshotConfig
from actors.gone import FOR_GOOD
from actors.keeper import Held, Standing, attach, place, spawn
from actors.names import NAMESPACE, keeper_name

log = logging.getLogger(__name__)



class Keepers:
    """Starts, finds and places keepers. Without snapshots there are none and every list is empty."""

    def __init__(self, run: str, config: SnapshotConfig, lost: Callable[[str], None]) -> None:
        """`lost` is told the name of every keeper that is found dead."""
        self._run, self._config, self._lost = run, config, lost
        self._handles: dict[str, Any] = {}  # actor name -> handle
        self._nodes: dict[str, str] = {}  # actor name -> node
        self._placed: dict[int, tuple[str, ...]] = {}

    def prepare(self, worker_nodes: Sequence[str]) -> None:
        """Have a keeper on each of these nodes and choose those of each worker (by rank)."""
        if not self._config.enabled:
            return
        for node in dict.fromkeys(worker_nodes):
            name = keeper_name(self._run, node)
            if name not in self._handles:
                self._handles[name] = spawn(name, node, namespace=NAMESPACE)
            self._nodes[name] = node
        here = {name: node for name, node in self._nodes.items() if node in set(worker_nodes)}
        self._placed = place(dict(enumerate(worker_nodes)), here, self._config.copies)

    def of(self, rank: int) -> tuple[Any, ...]:
        """Keepers that hold this worker's shards."""
        return tuple(self._handles[name] for name in self._placed.get(rank, ()))

    def repair(self, worker_nodes: Sequence[str], timeout_s: float = 5.0) -> None:
        """Forget keepers that do not answer, start others on the nodes that still have workers."""
        asked = {name: handle.used_bytes.remote() for name, handle in self._handles.items()}
        for name, reference in asked.items():
            try:
                ray.get(reference, timeout=timeout_s)
            except ray.exceptions.RayError:  # dead, silent, or its node was lost before it could start
                ray.kill(self._forget(name))
        self.prepare(worker_nodes)

    def find(self) -> dict[str, Any]:
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

    def inventories(self, timeout_s: float) -> dict[str, Sequence[Held]]:
        """What each keeper holds; one that does not answer holds nothing."""
        return self._answers({name: keeper.inventory.remote() for name, keeper in self.find().items()}, timeout_s)

    def standing(self, timeout_s: float) -> Standing:
        """How far the run is by what its keepers were told."""
        asked = {name: keeper.standing.remote() for name, keeper in self.find().items()}
        told: list[Standing] = list(self._answers(asked, timeout_s).values())
        return Standing(
            committed=max((s.committed for s in told), default=-1),
            generation=max((s.generation for s in told), default=0),
            position=max((s.position for s in told if s.position), key=itemgetter(0), default=None),
        )

    def _answers(self, asked: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, reference in asked.items():
            try:
                found[name] = ray.get(reference, timeout=timeout_s)
            except ray.exceptions.RayError as error:
                log.warning("keeper %s does not answer: %s", name, type(error).__name__)
                if isinstance(error, FOR_GOOD):  # not asked again; `prepare` starts another
                    self._forget(name)
        return found

    def _forget(self, name: str) -> Any:
        self._lost(name)
        self._nodes.pop(name, None)
        return self._handles.pop(name)

    def handles(self, names: Mapping[str, Any] | Sequence[str]) -> tuple[Any, ...]:
        return tuple(self._handles[name] for name in names if name in self._handles)

    def commit(self, step: int, position: Mapping[str, Any] | None = None) -> None:
        """The step is held whole, older ones may go; `position` is the data's behind it."""
        for handle in self._handles.values():
            handle.commit.remote(step, position)

    def rollback(self, step: int, generation: int) -> None:
        """Training goes on after `step` in `generation`: later shards and late messages are refused."""
        for handle in self._handles.values():
            handle.rollback.remote(step, generation)

    def close(self) -> None:
        for handle in self._handles.values():
            ray.kill(handle)
        self._handles.clear()
