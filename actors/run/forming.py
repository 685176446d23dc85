"""The start of a generation: who sits where, what each worker is told, and where training goes on."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from actors.config import RuntimeConfig
from actors.feed.step_source import StepSource
from actors.messages import FormTask, NodeKeeper, Origin, WorkerHandle, WorkerInfo
from actors.outcome import Exit, StopRun
from actors.plan.types import Cluster
from actors.planning.client import PlannerClient
from actors.pool.membership_types import Form
from actors.pool.monitor import MonitorHandle
from actors.pool.workers import Pool
from actors.run.asides import AsideTurns
from actors.run.committer import Committer
from actors.run.frozen import disagreement, first_disagreement
from actors.run.steps import StepRunner, room_of
from actors.run.waits import StepWaits
from actors.state.hosts import needs_of_hosts, refuse_short_hosts, refuse_short_stores
from actors.step import Seat
from ops.shards import bytes_per_weight

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
    state_gib: float = 0.0  # of the training state that the workers of a generation share
    _stores: deque[Rendezvous] = field(default_factory=lambda: deque(maxlen=2))  # the last workers may still be leaving

    def form(self, decision: Form, holders: Sequence[Seat]) -> StepRunner:
        """Seat the workers, hand out the state, begin. A worker lost meanwhile breaks the generation like any other.

        `holders` are the workers of a generation that ends cleanly here; each holds the last finished step. Raises
        StopRun when the workers' weights differ, PlanError when a node has too little memory for the first generation.
        """
        if decision.clean and holders:
            self.committer.settle_all(holders, self.config.workers.collective_timeout_s)
        infos = decision.infos
        self._refuse(disagreement(infos))
        self.monitor.announce.remote(decision.generation)
        recovery = self.committer.state.recover(holders, self.committer.log)
        if recovery.origin is None:
            self._refuse(first_disagreement(infos))
        self.committer.go_on_from(recovery)
        if not self._stores and (recovery.origin is None or recovery.origin.checkpoint is not None):
            weight = bytes_per_weight(self.config.train.optimizer.ema_decay > 0)
            refuse_short_hosts(needs_of_hosts(infos, self.state_gib, weight, self.config.snapshot))
            refuse_short_stores(infos, self.state_gib, weight, self.config.snapshot)
        world = seats_of(infos, self.pool.handle, self.state_gib)
        self.committer.state.open(recovery.origin, decision.generation, infos)
        return self._runner(decision.generation, world, recovery.origin)

    def _runner(self, generation: int, world: tuple[Seat, ...], origin: Origin | None) -> StepRunner:
        self._stores.append(self.new_store())
        address = (self._stores[-1].host, self._stores[-1].port)
        state, planning = self.committer.state, self.config.planner
        self.waits.begin()
        tasks = form_tasks(generation, world, address, origin, state.keepers.home)
        return StepRunner(
            generation=generation,
            world=world,
            cluster=cluster_of(world),
            source=self.source,
            planner=self.planner,
            budget_s=planning.budget_s,
            first_budget_s=min(_FIRST_PLAN_S, planning.budget_s),
            lookahead=planning.lookahead,
            waits=self.waits,
            asides=self.asides,
            bag_peers=planning.bag_peers,
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
    infos: Sequence[WorkerInfo], handle_of: Callable[[str], WorkerHandle], state_gib: float = 0.0
) -> tuple[Seat, ...]:
    """The world of a generation, in order of ranks. Each worker will hold its part of a state of `state_gib`."""
    return tuple(
        Seat(
            name=info.worker,
            node=info.node,
            handle=handle_of(info.worker),
            publishes_later=info.publishes_later,
            room_gib=None if info.room_gib is None else info.room_gib - _own_state_gib(info, state_gib / len(infos)),
        )
        for info in infos
    )


def _own_state_gib(info: WorkerInfo, part_gib: float) -> float:
    """GiB of its device that its part of the state will take; beside a GPU it may lie in host memory."""
    return 0.0 if info.state_on_host and info.device != "cpu" else part_gib


def cluster_of(world: Sequence[Seat]) -> Cluster:
    """The workers by node, as the planner sees them."""
    counts = Counter(seat.node for seat in world)  # in order of their first workers
    return Cluster(nodes=tuple(counts.values()), room_gib=room_of([seat.room_gib for seat in world]))


def form_tasks(
    generation: int,
    world: Sequence[Seat],
    store: tuple[str, int],
    origin: Origin | None,
    home_of: Callable[[int], NodeKeeper],
) -> list[FormTask]:
    """What each worker is told, in order of ranks. `store` is where they meet, `home_of` gives the keeper of a rank's
    node."""
    number = {home: n for n, home in enumerate(dict.fromkeys(seat.node for seat in world))}
    nodes = tuple(number[seat.node] for seat in world)
    return [
        FormTask(
            generation=generation,
            rank=rank,
            world=len(world),
            store=store,
            origin=origin,
            home=home_of(rank),
            nodes=nodes,
        )
        for rank in range(len(world))
    ]
