"""What the workers of a generation are told."""

from __future__ import annotations

from typing import cast

from actors.messages import WorkerHandle, WorkerInfo
from actors.run.forming import cluster_of, form_tasks, seats_of
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


def test_state_that_lies_beside_a_gpu_takes_nothing_of_it() -> None:
    found = [
        WorkerInfo(
            worker=f"w{rank}",
            node="left",
            host="h",
            pid=1,
            device=device,
            gpu_memory_gib=80.0,
            room_gib=50.0,
            state_on_host=on_host,
        )
        for rank, (device, on_host) in enumerate((("cuda:0", False), ("cuda:0", True), ("cpu", True)))
    ]
    seats = seats_of(found, lambda name: cast(WorkerHandle, None), state_gib=90.0)
    assert [seat.room_gib for seat in seats] == [20.0, 50.0, 20.0]
