"""Snapshots: the training state of committed steps in the host memory of other nodes.

Every worker sends its shard to a keeper after each step. A step is committed when the shards of one generation that the
keepers hold cover the whole vector; `actors.state.recovery` finds the newest such step from the keepers' own
inventories, so a restarted controller needs nothing else. A keeper copies what it is given: an object in Ray's store
dies with the worker that put it.

    place(workers={0: "a", 1: "b"}, keepers={"ka": "a", "kb": "b"}, copies=1)      # {0: ("kb",), 1: ("ka",)}
    worker:      keeper.put.remote(step, sync.export_shard(), generation)
    controller:  keeper.commit.remote(step)                                        # older steps may go
    recovery:    keeper.inventory.remote(); keeper.get.remote(step, lo, hi)
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from actors.messages import ShardKeeper
from actors.refs import Method
from actors.step import Position
from ops.node_room import node_room
from ops.shards import ShardState, bytes_per_weight, cut

log = logging.getLogger(__name__)


KEEP_STEPS = 2  # committed steps that stay; a third one is being filled meanwhile
_SMALL = 64 << 20  # bytes; a smaller shard is taken without a look at the node's memory


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldShard:
    """One shard a keeper holds."""

    step: int
    generation: int
    lo: int
    hi: int
    total: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How far a keeper has been told that the run is."""

    committed: int = -1  # newest committed step
    generation: int = 0  # older ones are refused
    position: tuple[int, Position] | None = None  # newest step whose data position it was told, and that


class KeeperHandle(ShardKeeper, Protocol):
    """A keeper as the controller knows it."""

    @property
    def commit(self) -> Method[[int, Position | None], None]: ...
    @property
    def rollback(self) -> Method[[int, int], None]: ...
    @property
    def inventory(self) -> Method[[], list[HeldShard]]: ...
    @property
    def standing(self) -> Method[[], Standing]: ...
    @property
    def room(self) -> Method[[], tuple[str, int]]: ...


@dataclass
class _Step:
    generation: int
    shards: dict[tuple[int, int], ShardState] = field(default_factory=dict)


class Keeper:
    """Shards of the last steps in this process's memory. Plain class; `spawn` runs it as a Ray actor.

    All shards of a step that it holds are of one generation: a step that is computed again after a failure replaces
    what is left of the first attempt, and late messages of a dead generation are refused.
    """

    def __init__(self, keep_steps: int = KEEP_STEPS, room: Callable[[], int] = node_room) -> None:
        """`room` gives the bytes that this node can still spare."""
        self._room = room
        self._keep_steps = keep_steps
        self._steps: dict[int, _Step] = {}
        self._committed: set[int] = set()
        self._generation = 0  # older ones are refused
        self._position: tuple[int, Position] | None = None
        self._free: list[dict[str, np.ndarray]] = []  # buffers of dropped shards, reused: no page faults per step

    def put(self, step: int, shard: ShardState, generation: int = 0) -> bool:
        """Hold a copy of `shard` as part of `step`. False when it comes from a generation that is over.

        Raises MemoryError when this node has no room for it: better a clear answer than a node that ends its processes.
        """
        if generation < self._generation:
            return False
        held = self._steps.get(step)
        if held is None or held.generation < generation:
            self._drop(step)
            held = self._steps[step] = _Step(generation)
        elif held.generation > generation:
            return False
        self._recycle(held.shards.pop((shard.lo, shard.hi), None))
        held.shards[shard.lo, shard.hi] = self._copy(shard)
        return True

    def commit(self, step: int, position: Position | None = None) -> None:
        """`step` is complete over all keepers: keep it and the one before it, let older ones go. `position` is where
        the data stands after it; the two are stored together."""
        if position is not None:
            self._position = (step, position)
        self._committed.add(step)
        kept = sorted(s for s in self._committed if s <= step)[-self._keep_steps :]
        self._committed = set(kept)
        for old in [s for s in self._steps if s < kept[0] or (s < step and s not in self._committed)]:
            self._drop(old)

    def rollback(self, step: int, generation: int) -> None:
        """Training goes on after `step` in `generation`: forget later steps and refuse what older generations send."""
        self._generation = max(self._generation, generation)
        self._committed = {s for s in self._committed if s <= step}
        if self._position is not None and self._position[0] > step:
            self._position = None
        for later in [s for s in self._steps if s > step]:
            self._drop(later)

    def held(self) -> dict[int, list[tuple[int, int]]]:
        """Ranges per step."""
        return {step: sorted(held.shards) for step, held in self._steps.items()}

    def inventory(self) -> list[HeldShard]:
        """Everything that is held, for `actors.state.recovery`."""
        return [
            HeldShard(
                step=step,
                generation=held.generation,
                lo=shard.lo,
                hi=shard.hi,
                total=shard.total,
                num_bytes=shard.num_bytes,
            )
            for step, held in self._steps.items()
            for shard in held.shards.values()
        ]

    def standing(self) -> Standing:
        """For a restarted controller: it goes on after the committed step, in a generation that is not refused."""
        committed = max(self._committed, default=-1)
        return Standing(committed=committed, generation=self._generation, position=self._position)

    def get(self, step: int, lo: int | None = None, hi: int | None = None) -> list[ShardState]:
        """The shards of `step`, whole, or only their parts inside [lo, hi). Empty when it holds none.

        Whole shards are the keeper's own buffers: as a Ray actor they are serialized before the next call, in one
        process copy them before it.
        """
        held = self._steps.get(step)
        if held is None:
            return []
        shards = list(held.shards.values())
        if lo is None or hi is None:
            return shards
        parts = [(shard, max(lo, shard.lo), min(hi, shard.hi)) for shard in shards]
        return [cut([shard], a, b) for shard, a, b in parts if a < b]

    def used_bytes(self) -> int:
        """Memory of shards and of buffers that wait for reuse."""
        held = sum(shard.num_bytes for step in self._steps.values() for shard in step.shards.values())
        return held + sum(array.nbytes for buffers in self._free for array in buffers.values())

    def room(self) -> tuple[str, int]:
        """This host, and the bytes that the state may take here, what is held already included."""
        return socket.gethostname(), self.used_bytes() + self._room()

    def _copy(self, shard: ShardState) -> ShardState:
        buffers = self._take_buffers(shard)
        for name, array in shard.arrays.items():
            np.copyto(buffers[name], array)
        return replace(shard, arrays=buffers)

    def _take_buffers(self, shard: ShardState) -> dict[str, np.ndarray]:
        want = {name: (array.shape, array.dtype) for name, array in shard.arrays.items()}
        for index, buffers in enumerate(self._free):
            if {name: (array.shape, array.dtype) for name, array in buffers.items()} == want:
                return self._free.pop(index)
        self._free.clear()  # cut for another number of workers: these sizes do not come back
        if shard.num_bytes > _SMALL and shard.num_bytes > (room := self._room()):
            raise MemoryError(
                f"the keeper on {socket.gethostname()} holds {self.used_bytes() / 2**20:.0f} MiB and is given "
                f"{shard.num_bytes / 2**20:.0f} MiB more, but the node can spare {room / 2**20:.0f} MiB. Add nodes or "
                f"memory, lower snapshot.copies, or set snapshot.enabled: false."
            )
        return {name: np.empty_like(array, subok=False) for name, array in shard.arrays.items()}

    def _drop(self, step: int) -> None:
        held = self._steps.pop(step, None)
        for shard in held.shards.values() if held else ():
            self._recycle(shard)

    def _recycle(self, shard: ShardState | None) -> None:
        if shard is not None:
            self._free.append(shard.arrays)


# Where shards go --------------------------------------------------------------------------------


def place(workers: Mapping[int, str], keepers: Mapping[str, str], copies: int = 1) -> dict[int, tuple[str, ...]]:
    """Keepers of each worker's shard: on other nodes than the worker and than each other where there are such nodes.

    `workers` and `keepers` map to their nodes. The load is spread evenly. At most one copy goes to a keeper.
    """
    if not keepers:
        raise ValueError("no keeper is alive; snapshots need at least one. Start one or set snapshot.enabled false.")
    nodes = {node: n for n, node in enumerate(sorted({*workers.values(), *keepers.values()}))}
    load: Counter[str] = Counter()
    chosen: dict[int, tuple[str, ...]] = {}
    for worker, home in sorted(workers.items()):
        mine: list[str] = []
        for _ in range(min(copies, len(keepers))):
            used = {keepers[name] for name in mine}
            free = [name for name in keepers if name not in mine]
            # Ties go to the next node in a circle: taking the first would leave the last worker with a full one.
            ahead = {name: (nodes[keepers[name]] - nodes[home]) % len(nodes) for name in free}
            best = min(
                free, key=lambda name: (keepers[name] == home, keepers[name] in used, load[name], ahead[name], name)
            )
            load[best] += 1
            mine.append(best)
        chosen[worker] = tuple(mine)
    return chosen


def forecast_bytes(total: int, *, ema: bool, copies: int, num_keepers: int) -> int:
    """Memory per keeper: committed steps plus the one being filled, spread evenly."""
    state = total * bytes_per_weight(ema)
    return (KEEP_STEPS + 1) * state * copies // max(1, num_keepers)


# Ray ----------------------------------------------------------------------------------------------------------------


def spawn(name: str, node_id: str, *, namespace: str) -> KeeperHandle:
    """A keeper as a detached actor on this node: it outlives the controller and is found again by `attach`."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from actors.ray_calls import remote_of

    actor = remote_of(Keeper).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    keeper: KeeperHandle = actor.remote()
    return keeper


def attach(names: Sequence[str], *, namespace: str) -> dict[str, KeeperHandle]:
    """Handles of those of these keepers that exist."""
    import ray

    found: dict[str, KeeperHandle] = {}
    for name in names:
        try:
            found[name] = ray.get_actor(name, namespace=namespace)
        except ValueError:
            log.info("keeper %s is gone", name)
    return found
