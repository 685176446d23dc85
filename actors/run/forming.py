"""The start of a generation: who sits where, and what each worker is told. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from actors.messages import FormTask, Origin, ShardKeeper, WorkerHandle, WorkerInfo
from actors.plan.types import Cluster
from actors.step import Seat


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
            room_gib=None if info.room_gib is None else info.room_gib - state_gib / len(infos),
        )
        for info in infos
    )


def cluster_of(world: Sequence[Seat]) -> Cluster:
    """The workers by node, as the planner sees them."""
    nodes = [seat.node for seat in world]
    counts = tuple(nodes.count(node) for node in dict.fromkeys(nodes))
    return Cluster(nodes=counts, room_gib=room_of([seat.room_gib for seat in world]))


def room_of(rooms: Sequence[float | None]) -> tuple[float, ...]:
    """Memory for cascades of each worker, or nothing where one of them has no limit. Rounded down to MiB."""
    known = [room for room in rooms if room is not None]
    return tuple(math.floor(room * 1024) / 1024 for room in known) if len(known) == len(rooms) else ()


def form_tasks(
    generation: int,
    world: Sequence[Seat],
    store: tuple[str, int],
    origin: Origin | None,
    keepers_of: Callable[[int], tuple[ShardKeeper, ...]],
) -> list[FormTask]:
    """What each worker is told, in order of ranks. `store` is where they meet, `keepers_of` a rank holds its shards."""
    return [
        FormTask(
            generation=generation,
            rank=rank,
            world=len(world),
            store=store,
            origin=origin,
            snapshot_to=keepers_of(rank),
        )
        for rank in range(len(world))
    ]
