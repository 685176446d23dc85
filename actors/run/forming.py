"""The start of a generation: who sits where, and what each worker is told. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.messages import FormTask, Origin, ShardKeeper, WorkerHandle, WorkerInfo
from actors.plan.types import Cluster
from actors.step import Seat


def seats_of(infos: Sequence[WorkerInfo], handle_of: Callable[[str], WorkerHandle]) -> tuple[Seat, ...]:
    """The world of a generation, in order of ranks."""
    return tuple(
        Seat(
            name=info.worker,
            node=info.node,
            handle=handle_of(info.worker),
            publishes_later=info.publishes_later,
        )
        for info in infos
    )


def cluster_of(world: Sequence[Seat]) -> Cluster:
    """The workers by node, as the planner sees them."""
    nodes = [seat.node for seat in world]
    return Cluster(nodes=tuple(nodes.count(node) for node in dict.fromkeys(nodes)))


def form_tasks(
    generation: int,
    world: Sequence[Seat],
    store: tuple[str, int],
    origin: Origin | None,
    keepers_of: Callable[[int], tuple[ShardKeeper, ...]],
) -> list[FormTask]:
    """What each worker is told, in order of ranks. `store` is where they meet, `keepers_of` a rank holds its shards."""
    homes = list(dict.fromkeys(seat.node for seat in world))
    return [
        FormTask(
            generation=generation,
            rank=rank,
            world=len(world),
            store=store,
            origin=origin,
            snapshot_to=keepers_of(rank),
            nodes=tuple(homes.index(seat.node) for seat in world),
        )
        for rank in range(len(world))
    ]
