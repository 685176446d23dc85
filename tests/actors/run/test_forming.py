"""What the workers of a generation are told."""

from __future__ import annotations

from typing import cast

from actors.messages import WorkerHandle
from actors.run.forming import cluster_of, form_tasks
from actors.step import Seat


def test_every_worker_is_told_who_shares_its_node() -> None:
    handle = cast(WorkerHandle, None)
    world = [
        Seat(name=f"w{rank}", node=node, handle=handle, publishes_later=False)
        for rank, node in enumerate(("left", "left", "right", "left"))
    ]
    tasks = form_tasks(3, world, ("127.0.0.1", 1), None, lambda rank: ())
    assert [task.rank for task in tasks] == [0, 1, 2, 3]
    assert {task.nodes for task in tasks} == {(0, 0, 1, 0)}
    assert cluster_of(world).nodes == (3, 1)
