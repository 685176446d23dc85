"""A process of virtual workers (`app.bench.cluster.worker`), their meetings and their heartbeats. One event loop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from ray.exceptions import ActorDiedError

from actors.held_state import HeldShard, Snapshot
from actors.letters import RelayHandle
from actors.messages import WorkerInfo
from actors.plan.costs.profile import Profile
from actors.pool.monitor import MonitorHandle
from actors.run.relay import Relay
from app.bench.cluster.handles import HostHandle, NodeHandle, host_of
from app.bench.cluster.physics import Physics
from app.bench.cluster.worker import MeetingKey, VirtualWorker, resolve

log = logging.getLogger(__name__)


@dataclass
class _Meeting:
    """The members that have come to one place, and what they brought."""

    came: int = 0
    brought: float = 0.0
    open: asyncio.Event = field(default_factory=asyncio.Event)
    failed: str = ""


class Meetings:
    """Places where a known number of coroutines wait for each other."""

    def __init__(self) -> None:
        self._places: dict[MeetingKey, _Meeting] = {}
        self._over = -1  # the newest generation that has ended

    async def meet(
        self,
        key: MeetingKey,
        count: int,
        total: int,
        brought: float,
        further: Callable[[float], Awaitable[float]] | None = None,
    ) -> float:
        """`count` more have come to `key`. Returns when all `total` are there what they brought together, or what
        `further`, asked once with that sum, answers. Raises RuntimeError when the generation ends meanwhile."""
        if key[0] <= self._over:
            raise RuntimeError(f"generation {key[0]} has ended")
        place = self._places.setdefault(key, _Meeting())
        place.came += count
        place.brought += brought
        if place.came >= total:
            if further is not None:
                await self._ask(place, further)
            self._places.pop(key, None)
            place.open.set()
        await place.open.wait()
        if place.failed:
            raise RuntimeError(place.failed)
        return place.brought

    def end(self, generation: int, why: str) -> None:
        """Whatever waits in this generation or an older one waits in vain."""
        self._over = max(self._over, generation)
        for key in [key for key in self._places if key[0] <= generation]:
            place = self._places.pop(key)
            place.failed = why
            place.open.set()

    async def _ask(self, place: _Meeting, further: Callable[[float], Awaitable[float]]) -> None:
        try:
            place.brought = await further(place.brought)
        except Exception as error:
            place.failed = place.failed or str(error).strip().rpartition("\n")[2] or type(error).__name__


class VirtualKeeper:
    """The keeper of a node, which has a shard at once."""

    def __init__(self) -> None:
        self.held: list[HeldShard] = []

    def put(self, shards: Sequence[Snapshot]) -> bool:
        self.held += [
            HeldShard(step=one.step, generation=one.generation, lo=one.lo, hi=one.hi, total=one.total, num_bytes=0)
            for one in shards
        ]
        return True

    def hold(self, shards: Sequence[tuple[Snapshot, object]]) -> bool:
        """Copy shards from others."""
        return self.put([shard for shard, _ in shards])

    def commit(self, generation: int, step: int, position: object, pinned: object) -> None:
        """Let go of what is older than this step."""
        self.held = [held for held in self.held if held.step >= step]


class Host:
    """Plain class; `app.bench.cluster.parts` makes the actor of it."""

    def __init__(self, number: int, profile: Profile, physics: Physics, monitor: MonitorHandle) -> None:
        """`profile` is the truth about cascades, in real seconds; `monitor` takes the heartbeats."""
        self.number, self.profile, self.physics = number, profile, physics
        self._monitor = monitor
        self._workers: dict[str, VirtualWorker] = {}
        self._hosts: Sequence[HostHandle] = ()
        self._meetings = Meetings()
        self._relays: dict[str, Relay] = {}  # by node
        self._relays_gone: dict[str, asyncio.Event] = {}
        self._keepers: dict[str, VirtualKeeper] = {}  # by node
        self._local: dict[int, set[int]] = {}  # ranks that are here, by generation

    async def know(self, hosts: Sequence[HostHandle]) -> None:
        """All hosts of the cluster, this one too: on the first, members of a bag on several hosts meet."""
        self._hosts = hosts

    async def add(self, name: str, node: str) -> WorkerInfo:
        """Start a worker. Answers when its modules are loaded."""
        self._workers[name] = worker = VirtualWorker(name, node, self)
        worker.beats = asyncio.create_task(self._beat_for_ever(worker))
        await asyncio.sleep(self.physics.real_s(self.physics.load_s))
        worker.idle()
        return WorkerInfo(worker=name, node=node, host=node, pid=os.getpid(), device="virtual")

    async def call(self, name: str, caller: str, number: int, method: str, arguments: Sequence[object]) -> object:
        """The `number`th call of a caller to a worker, from 0; it begins when those before it have ended."""
        worker = self._workers.get(name)
        if worker is None:
            raise ActorDiedError()
        return await worker.take(caller, number, method, arguments)

    async def end(self, names: Sequence[str]) -> None:
        """These workers die."""
        for name in names:
            if (worker := self._workers.pop(name, None)) is not None:
                worker.die()

    async def relay(self, node: str, method: str, arguments: Sequence[object]) -> object:
        """Call the relay of a node, which dies with it."""
        gone = self._relays_gone.setdefault(node, asyncio.Event())
        if gone.is_set():
            raise ActorDiedError()
        if node not in self._relays:
            self._relays[node] = Relay(self._relay_of)
        working = asyncio.ensure_future(getattr(self._relays[node], method)(*arguments))
        lost = asyncio.ensure_future(gone.wait())
        await asyncio.wait({working, lost}, return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if not working.done():
            working.cancel()
            raise ActorDiedError()
        return working.result()

    async def end_relay(self, node: str) -> None:
        """The process of a node's relay is gone."""
        self._relays.pop(node, None)
        self._relays_gone.setdefault(node, asyncio.Event()).set()

    def _relay_of(self, node: str) -> RelayHandle:
        """The relay of another node, whose address is its name."""
        return cast(RelayHandle, NodeHandle("relay", node, host_of(node, self._hosts)))

    async def closed(self, generation: int) -> None:
        """A member of this generation is gone: its connections to the others are closed."""
        self._meetings.end(generation, "Connection closed by peer")

    async def together(self, key: MeetingKey, count: int, total: int, brought: float) -> float:
        """`count` members on another host have come to a meeting."""
        return await self._meetings.meet(key, count, total, brought)

    async def inventory(self) -> dict[str, list[HeldShard]]:
        """What the keepers of this host's nodes hold, by node."""
        return {node: list(keeper.held) for node, keeper in self._keepers.items()}

    async def keeper(self, node: str, method: str, arguments: Sequence[object]) -> object:
        """Call the keeper of a node."""
        answer: object = getattr(self._keepers.setdefault(node, VirtualKeeper()), method)(*arguments)
        return answer

    async def begin(self, step: int) -> None:
        """Training goes on after this step: others are let go."""
        for keeper in self._keepers.values():
            keeper.held = [held for held in keeper.held if held.step == step]

    # -- for its workers -----------------------------------------------------------------------------------------------

    def seat(self, generation: int, rank: int) -> None:
        """A worker of this host has this rank."""
        self._local.setdefault(generation, set()).add(rank)
        for old in [known for known in self._local if known < generation - 1]:
            del self._local[old]

    async def meet_first(self, key: MeetingKey, total: int) -> None:
        """One of all workers of a generation has come; they do not know yet which of them is on which host."""
        await resolve(self._hosts[0].together.remote(key, 1, total, 0.0))

    async def meet(self, key: MeetingKey, bag: Sequence[int] | None, total: int, brought: float = 0.0) -> float:
        """One of the `total` ranks of a bag, or of all, has come; returns when all have, with what they brought."""
        local = self._local[key[0]]
        here = len(local) if bag is None else len(local.intersection(bag))
        if here == total:
            return await self._meetings.meet(key, 1, here, brought)

        async def others(own: float) -> float:
            return await resolve(self._hosts[0].together.remote((key[0], "all", *key[1:]), here, total, own))

        return await self._meetings.meet(key, 1, here, brought, others)

    async def _beat_for_ever(self, worker: VirtualWorker) -> None:
        while not worker.dead:
            try:
                orders = await resolve(self._monitor.beat.remote(worker.progress))
                if orders.generation > worker.progress.generation >= 0:
                    self._meetings.end(orders.generation - 1, f"generation {orders.generation} has begun")
            except Exception as error:  # the monitor is being started again
                log.debug("heartbeat of %s not delivered: %r", worker.name, error)
            await asyncio.sleep(self.physics.heartbeat_s)
