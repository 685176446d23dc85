"""The start of a generation: which worker has which rank, what each worker gets, and where training goes on.

Weights that every worker reads or makes for itself must be equal on all: no later check would notice (`disagreement`).
Workers that come to a run whose workers have finished a step are compared before (`actors.pool.lookout`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Protocol

from actors.config import RuntimeConfig
from actors.feed.step_source import StepSource
from actors.held_state import NodeKeeper, Origin
from actors.messages import FormTask, NodeDoor, WorkerHandle, WorkerInfo
from actors.outcome import Exit, StopRun, Tell
from actors.plan.types import Cluster
from actors.planning.client import PlannerClient
from actors.planning.room import GenerationRoom
from actors.pool.membership_types import Form
from actors.pool.monitor import MonitorHandle
from actors.pool.workers import Pool
from actors.records.events import ClusterRefused
from actors.run.asides import AsideTurns
from actors.run.committer import Committer
from actors.run.given_cluster import ClusterMismatch, GivenCluster
from actors.run.relay_book import Relays
from actors.run.shortage import Shortage
from actors.run.speeds import Speeds
from actors.run.steps import StepRunner, room_of
from actors.run.waits import StepWaits
from actors.state.checkpoint_files import GONE
from actors.step import Seat

_FIRST_PLAN_S = 0.05  # after a change of the cluster a plan must come at once; better ones follow


class Rendezvous(Protocol):
    """Where the workers of a generation meet: torch.distributed's TCPStore."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...


@dataclass(kw_only=True)
class Forming:
    """Forms generations out of workers that are ready."""

    config: RuntimeConfig
    pool: Pool
    monitor: MonitorHandle
    source: StepSource
    planner: PlannerClient
    committer: Committer
    new_store: Callable[[], Rendezvous]  # one for each generation: what torch leaves in it must not reach the next
    waits: StepWaits
    asides: AsideTurns
    relays: Relays
    given: GivenCluster
    speeds: Speeds
    tell: Tell
    shortage: Shortage | None = None  # None: nobody asks whether there is memory for what is trained
    # the newest two: workers of the last generation may still be leaving theirs
    _stores: deque[Rendezvous] = field(default_factory=lambda: deque(maxlen=2), init=False)

    def form(self, decision: Form) -> StepRunner:
        """Seat the workers, hand out the state, begin. A worker lost meanwhile breaks the generation like any other.

        Raises StopRun when the workers' weights differ or, at the start, the cluster file does not match; PlanError
        when a node has too little memory for the first generation.
        """
        infos = decision.infos
        self._refuse(disagreement(infos))
        self.monitor.announce.remote(decision.generation)
        recovery = self.committer.state.recover(self.committer.log)
        if recovery.origin is None:
            self._refuse(first_disagreement(infos, self.config.train.init_from))
        recovery = self.committer.go_on_from(recovery, decision.apart)
        if recovery.origin is None:  # also where the state after the first steps could not be recorded
            self._refuse(first_disagreement(infos, self.config.train.init_from))
        fresh = recovery.origin is None or recovery.origin.checkpoint is not None  # no worker has any of the state yet
        if self.shortage is not None:
            self.shortage.begin(infos, fresh)
            self.asides.limit(self.shortage.asides_at_once(infos))
        self.planner.begin(fetched=any(info.parameters == "node" for info in infos))  # if one does, all do
        world = seats_of(infos, self.pool.handle, self.shortage.room if self.shortage is not None else None)
        cluster = self._cluster(world, starts=fresh and not self._stores)
        known = self.speeds.factors([seat.name for seat in world], cluster.speed)  # as learned, of workers that stayed
        self.committer.state.open(recovery.origin, decision.generation, infos)
        return self._runner(decision.generation, world, replace(cluster, speed=known), recovery.origin)

    def _cluster(self, world: tuple[Seat, ...], starts: bool) -> Cluster:
        """What plans count on. A file that does not match ends a run that `starts`; a later one goes on without it."""
        found = cluster_of(world)
        try:
            return self.given.over(found, list(dict.fromkeys(seat.node for seat in world)))
        except ClusterMismatch as error:
            if starts:
                raise StopRun(self.committer.outcome(Exit.USAGE, str(error))) from None
            self.tell(ClusterRefused(why=str(error)))
            return found

    def _runner(self, generation: int, world: tuple[Seat, ...], cluster: Cluster, origin: Origin | None) -> StepRunner:
        self._stores.append(self.new_store())
        address = (self._stores[-1].host, self._stores[-1].port)
        state, planning = self.committer.state, self.config.planner
        self.waits.begin()
        tasks = form_tasks(generation, world, address, origin, state.keepers.home)
        return StepRunner(
            generation=generation,
            world=world,
            cluster=cluster,
            source=self.source,
            planner=self.planner,
            budget_s=planning.budget_s,
            first_budget_s=min(_FIRST_PLAN_S, planning.budget_s),
            lookahead=planning.lookahead,
            waits=self.waits,
            asides=self.asides,
            relays=self.relays,
            bag_peers=planning.bag_peers,
            bags_gib=self.shortage.room.bags_gib(len(world)) if self.shortage is not None else 0.0,
            exports=state.is_exported,
            next_step=self.committer.committed + 1,
            last_step=self.config.train.steps,
            forming=[
                seat.handle.form.options(name=f"form g{task.generation}").remote(task)
                for seat, task in zip(world, tasks, strict=True)
            ],
        )

    def _refuse(self, why: str) -> None:
        if why:
            raise StopRun(self.committer.outcome(Exit.FAILURE, why))


def seats_of(
    infos: Sequence[WorkerInfo], handle_of: Callable[[str], WorkerHandle], room: GenerationRoom | None = None
) -> tuple[Seat, ...]:
    """The world of a generation, in order of ranks, with what each will have for cascades when `room` says what the
    generation takes."""
    rooms = room.of(infos) if room is not None else [info.room_gib for info in infos]
    return tuple(
        Seat(
            name=info.worker,
            node=info.node,
            handle=handle_of(info.worker),
            publishes_later=info.publishes_later,
            host=info.host,
            place=info.place,
            door=info.door,
            room_gib=left,
        )
        for info, left in zip(infos, rooms, strict=True)
    )


def cluster_of(world: Sequence[Seat]) -> Cluster:
    """The workers by node, as the planner sees them."""
    counts = Counter(seat.node for seat in world)  # in order of their first workers
    hosts = {seat.node: seat.host for seat in world}
    places = tuple(seat.place for seat in world)
    return Cluster(
        nodes=tuple(counts.values()),
        hosts=tuple(hosts[node] for node in counts) if all(hosts.values()) else (),
        places=places if any(place.known for place in places) else (),
        room_gib=room_of([seat.room_gib for seat in world]),
    )


def form_tasks(
    generation: int,
    world: Sequence[Seat],
    store: tuple[str, int],
    origin: Origin | None,
    home_of: Callable[[int], NodeKeeper],
) -> list[FormTask]:
    """The task of each worker, in order of ranks. `store` is where they meet, `home_of` gives the keeper of a rank's
    node."""
    number = {home: n for n, home in enumerate(dict.fromkeys(seat.node for seat in world))}
    nodes = tuple(number[seat.node] for seat in world)
    firsts = {seat.node: seat for seat in reversed(world)}
    doors = tuple(NodeDoor(node=home, host=firsts[home].host or home[:8], address=firsts[home].door) for home in number)
    return [
        FormTask(
            generation=generation,
            rank=rank,
            world=len(world),
            store=store,
            origin=origin,
            home=home_of(rank),
            nodes=nodes,
            doors=doors,
        )
        for rank in range(len(world))
    ]


def disagreement(infos: Sequence[WorkerInfo]) -> str:
    """Which frozen weights differ and on which workers; "" when all that hold them hold the same. A worker that has not
    loaded an encoder compares it when it does."""
    held = {info.worker: dict(info.frozen) for info in infos}
    for part in sorted({part for digests in held.values() for part in digests}):
        counts = Counter(digests[part] for digests in held.values() if part in digests)
        if len(counts) == 1:
            continue
        usual = counts.most_common(1)[0][0]
        others = [f"{i.worker} on {i.host}" for i in infos if held[i.worker].get(part, usual) != usual]
        like = [info.worker for info in infos if held[info.worker].get(part) == usual]
        return (
            f"the weights of {part} on {', '.join(others)} are not those on {', '.join(like)}. Give all nodes the same "
            f"files there, and --resume."
        )
    return ""


def first_disagreement(infos: Sequence[WorkerInfo], init_from: str | None = None) -> str:
    """Which parameter differs before the first update, and on which workers, or where the checkpoint of `init_from` is
    not; "" when all begin with the same.

    Each worker contributes its range of the vector, so a run would begin with a mixture of two models.
    """
    if lack := [info for info in infos if ("train.init_from", GONE) in info.first]:
        where = ", ".join(f"{info.worker} on {info.host}" for info in lack)
        return (
            f"train.init_from {init_from} is no complete checkpoint for {where}, and the run has no state of its own "
            f"to go on from: steps that it has taken are lost. Put it where all nodes read it and --resume, or begin "
            f"anew with another one (--overwrite)."
        )
    usual = Counter(info.first for info in infos).most_common(1)[0][0] if infos else ()
    others = [info for info in infos if info.first != usual]
    if not others:
        return ""
    pairs = zip_longest(others[0].first, usual, fillvalue=("a parameter that only one has", 0))
    name = next(mine[0] for mine, theirs in pairs if mine != theirs)
    where = ", ".join(f"{info.worker} on {info.host}" for info in others)
    return (
        f"the first weights on {where} are not those of the other workers (first in {name}). Give all nodes the same "
        f"model.dit.path and train.init_from, and the same torch, and start again."
    )
