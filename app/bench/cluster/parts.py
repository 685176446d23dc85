"""Parts of a run on a virtual cluster. They stand for the ones that start processes or move tensors; the rest is real.

Real: controller, generations, membership, lookout, monitor, dispatch, waits, committer, recovery, the planner and its
client, step source, metrics. With `--ray` every call to a worker, and every answer, goes through Ray, as in a run, to
an actor that hosts many of them; else to threads of this process, without copies.

Relays are the real ones, but those of many nodes share the process that hosts their workers.

Not real: what the workers compute; training state, of which only ranges are kept and sent; keepers, which take a shard
at once; checkpoints; the feeder's files and decoding.
"""

from __future__ import annotations

import itertools
import math
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from actors.config import RuntimeConfig, SnapshotConfig
from actors.held_state import HeldShard, Origin
from actors.letters import RelayHandle
from actors.messages import PublishedResult, WorkerHandle
from actors.outcome import Events, Tell, silent
from actors.plan.types import Item, Module
from actors.pool.lookout import Lookout
from actors.pool.monitor import MonitorHandle
from actors.pool.workers import Pool, PoolMember
from actors.ray_calls import get, put
from actors.refs import Ref
from actors.run.relay_book import NodeRelay, Relays
from actors.state.checkpoint_files import Meta
from actors.state.checkpoint_writer import Writer
from actors.state.checkpoints_on_disk import CheckpointsOnDisk
from actors.state.keeper import KeeperHandle, place
from actors.state.keeper_fleet import Base, Keepers
from actors.state.recovery import KeeperInventory
from actors.state.run_state import RunState
from actors.step import StepBatches
from app.bench.cluster.handles import HostHandle, NodeHandle, host_of
from app.bench.cluster.worker import ELEMENTS
from app.bench.workload import ItemFeeder


@dataclass
class Machines:
    """The nodes of a virtual cluster: which there are, and which workers are on them."""

    gpus: int  # of a node
    nodes: list[str] = field(default_factory=list)
    homes: dict[str, str] = field(default_factory=dict)  # worker -> node
    made: int = 0  # nodes so far

    def add(self, count: int = 1) -> list[str]:
        """More nodes. Returns their names, in whose order workers are seated."""
        names = [f"n{self.made + n:04d}" for n in range(count)]
        self.made += count
        self.nodes += names
        return names

    def lose(self, node: str) -> list[str]:
        """A node is gone. Returns its workers."""
        self.nodes.remove(node)
        return [worker for worker, home in self.homes.items() if home == node]

    def rooms(self) -> list[str]:
        """A node for every worker that has room now: the first is filled first."""
        used = Counter(self.homes.values())
        return [node for node in self.nodes for _ in range(self.gpus - used[node])]


class VirtualCall:
    """A method of a virtual worker, by the protocol of `actors.refs.Method`."""

    __slots__ = ("_handle", "_method", "_name")

    def __init__(self, handle: VirtualHandle, method: str, name: str = "") -> None:
        self._handle, self._method, self._name = handle, method, name

    def options(self, *, name: str = "", concurrency_group: str = "") -> VirtualCall:
        return VirtualCall(self._handle, self._method, name)

    def remote(self, *arguments: object) -> Ref[object]:
        """One call of Ray, as to a worker of its own process."""
        handle = self._handle
        number = next(handle.calls)
        call = handle.host.call.options(name=self._name) if self._name else handle.host.call
        return call.remote(handle.name, handle.caller, number, self._method, arguments)


class VirtualHandle:
    """Looks like `actors.messages.WorkerHandle`; counts its calls, which a host answers in this order. In another
    process it is another caller."""

    def __init__(self, name: str, host: HostHandle) -> None:
        self.name, self.host, self.calls, self.caller = name, host, itertools.count(), uuid.uuid4().hex[:8]

    def __reduce__(self) -> tuple[type[VirtualHandle], tuple[str, HostHandle]]:
        return VirtualHandle, (self.name, self.host)

    def __getattr__(self, method: str) -> VirtualCall:
        if method.startswith("_"):
            raise AttributeError(method)
        return VirtualCall(self, method)


class VirtualRelays(Relays):
    """The real book of relays."""

    def _end(self, relay: RelayHandle) -> None:
        """They end with their hosts."""


class VirtualPool(Pool):
    """The real pool's book of members, whose workers live in hosts."""

    def __init__(self, machines: Machines, hosts: Sequence[HostHandle]) -> None:
        super().__init__()
        self._machines, self._hosts = machines, hosts

    def relay_of(self, node: str) -> NodeRelay:
        """A relay on this node, in the process of its workers."""
        return NodeRelay(address=node, handle=cast(RelayHandle, NodeHandle("relay", node, host_of(node, self._hosts))))

    def _request(self, names: Sequence[str]) -> Iterator[PoolMember]:
        for name, node in zip(names, self._machines.rooms(), strict=False):  # who finds none is asked for again
            self._machines.homes[name] = node
            host = host_of(node, self._hosts)
            yield PoolMember(
                name=name,
                handle=cast(WorkerHandle, VirtualHandle(name, host)),
                info_ref=host.add.remote(name, node),
                wished=node,
            )

    def _end(self, member: PoolMember, frozen: bool) -> None:
        node = self._machines.homes.pop(member.name)
        host_of(node, self._hosts).end.remote([member.name])


class VirtualLookout(Lookout):
    """The real one, which finds room on virtual nodes; Ray drains none of them."""

    def __init__(self, config: RuntimeConfig, pool: Pool, monitor: MonitorHandle, tell: Tell, machines: Machines):
        super().__init__(config.workers, pool, monitor, tell)
        self._machines = machines

    def _leaving_nodes(self) -> frozenset[str]:
        return frozenset()

    def _room(self) -> int:
        return len(self._machines.rooms())


class VirtualKeepers(Keepers):
    """The real book of keepers: one on every node, in the host of its workers. They are called as often as real ones:
    those of a host are one actor, which says at once that they hold it."""

    def __init__(self, config: SnapshotConfig, machines: Machines, hosts: Sequence[HostHandle]) -> None:
        super().__init__("virtual", config)
        self._machines, self._hosts = machines, hosts

    def find(self) -> dict[str, KeeperHandle]:
        """None is asked: their hosts are."""
        return {}

    def inventories(
        self, patience_s: float, is_enough: Callable[[Sequence[KeeperInventory]], bool] = lambda found: False
    ) -> list[KeeperInventory]:
        """What the keepers on living nodes hold."""
        found: dict[str, list[HeldShard]] = {node: [] for node in self._machines.nodes}
        for asked in [host.inventory.remote() for host in self._hosts]:
            for node, kept in get(asked).items():
                if node in found:
                    found[node] += kept
        return [KeeperInventory(keeper=self._keeper(node), shards=held) for node, held in found.items()]

    def leaving(self) -> list[KeeperHandle]:
        """Those on nodes that Ray drains: it drains no virtual one."""
        return []

    def prepare(
        self, worker_nodes: Sequence[str], needs_bytes: int = 0, lenders: Mapping[str, tuple[int, ...]] | None = None
    ) -> list[str]:
        self._nodes = {node: node for node in worker_nodes}
        self._handles = {node: self._keeper(node) for node in self._nodes}
        self._homes = dict(enumerate(worker_nodes))
        self._placed = place(self._homes, self._nodes, self._copies)
        return []

    def begin(self, base: Base) -> None:
        self._base = base
        for host in self._hosts:
            host.begin.remote(base.step)

    def close(self) -> None:
        """They end with their hosts."""

    def _keeper(self, node: str) -> KeeperHandle:
        return cast(KeeperHandle, NodeHandle("keeper", node, host_of(node, self._hosts)))


class VirtualWriter(Writer):
    """The real one, of a run that writes no checkpoint but its last state, which is on disk at once."""

    def __init__(self, config: RuntimeConfig, events: Events) -> None:
        super().__init__(
            Path(config.run_dir), config.checkpoint, -1, events, weight_bytes=0, unmoved=set(), disown=lambda step: None
        )
        self.step = -1

    def save_origin(self, origin: Origin, meta: Meta) -> bool:
        self.step = origin.step
        return True


class VirtualDisk(CheckpointsOnDisk):
    """Has what the writer was given, a number."""

    def __init__(self, run_dir: Path, writer: VirtualWriter) -> None:
        super().__init__(run_dir, silent)
        self._writer = writer

    def newest(self, until: float = math.inf) -> tuple[int, Path] | None:
        """No checkpoint is ever read."""
        return None

    def newest_step(self, until: float = math.inf) -> int:
        return self._writer.step if self._writer.step <= until else -1


class VirtualState(RunState):
    """The real state of a run, of a model without weights."""

    @property
    def _total(self) -> int:
        """No weights are counted."""
        return ELEMENTS

    def _meta(self, step: int) -> Meta:
        return {"step": step}


def _cached(step: int, item: Item, module: Module) -> list[PublishedResult]:
    """What a cache holds of an item."""
    rows = np.zeros((1, 1), np.float32)
    return [PublishedResult(module=module, id=(step, item.id, n), rows=rows, ok=True) for n in range(item.batch)]


class VirtualFeeder(ItemFeeder):
    """Hands out the items of a workload; there are no pixels."""

    def batches(self, step: int) -> StepBatches:
        """Every item has a reference of its own, as in a run: whoever passes them on counts each."""
        items = self._steps[step]
        return StepBatches(
            references=tuple(put(b"") for _ in items),
            position=self.token(step + 1),
            cached={(module, item.id): put(_cached(step, item, module)) for item in items for module in item.cached},
        )
