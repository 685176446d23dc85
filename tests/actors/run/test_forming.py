"""What the workers of a generation get."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from actors.messages import WorkerHandle, WorkerInfo
from actors.plan.places import Places, gpu_places
from actors.plan.types import USABLE
from actors.planning.memory import BARE_CONTEXT_GIB, CONTEXT_GIB, PEER_GIB, MemoryForecast, communicators_gib
from actors.planning.room import GenerationRoom, left_gib
from actors.run.forming import cluster_of, form_tasks, seats_of
from actors.step import Seat
from ops.shards import STAGE


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


# Wan2.1-14B in bf16 with an average: 40 blocks of 350 M weights, 288 M outside of them.
SIZES = MemoryForecast(
    parameters=14_288_491_584, trained=14_288_491_584, parameter_bytes=2, state_bytes=16, in_blocks=14_000_000_000,
    largest_block=350_000_000,
)  # fmt: skip
DEGREES, BAG_PEERS, DEVICE_GIB = (1, 2, 4, 8), 11, 160.0  # so large that all of it loads anywhere


def ready(rank: int, node: str, sizes: MemoryForecast, device: str = "cuda:0") -> WorkerInfo:
    """What a worker says that has loaded, on a device that nobody else uses."""
    bare = BARE_CONTEXT_GIB if device != "cpu" else 0.0
    return WorkerInfo(
        worker=f"w{rank}",
        node=node,
        host="h",
        pid=1,
        device=device,
        room_gib=USABLE * (DEVICE_GIB - bare) - sizes.loaded_gib,
        gradients=sizes.places.gradients,
        state_on_host=sizes.places.state == "host" or device == "cpu",
        parameters=sizes.places.parameters,
    )


def rooms(infos: list[WorkerInfo], sizes: MemoryForecast) -> list[float]:
    room = GenerationRoom(sizes=sizes, degrees=DEGREES, bag_peers=BAG_PEERS)
    seats = seats_of(infos, lambda name: cast(WorkerHandle, None), room)
    return [seat.room_gib for seat in seats if seat.room_gib is not None]


EVERY = [*gpu_places("auto", "auto", ("replicated", "node")), *gpu_places("host", "auto", ("replicated", "node"))]


@pytest.mark.parametrize("places", EVERY, ids=str)
@pytest.mark.parametrize(("workers", "per_node"), [(8, 8), (4, 4), (4, 8), (16, 8), (64, 8)])
def test_the_first_plans_of_a_generation_have_the_room_of_a_preview(
    places: Places, workers: int, per_node: int
) -> None:
    sizes = replace(SIZES, places=places, per_node=per_node)
    preview = sizes.room_gib(DEVICE_GIB, workers, communicators_gib(DEGREES, workers, BAG_PEERS))
    found = rooms([ready(rank, f"n{rank // per_node}", sizes) for rank in range(workers)], sizes)
    assert found == pytest.approx([preview] * workers, abs=1e-9)


def test_a_node_s_gradient_and_every_communicator_are_taken_off_before_they_are_there() -> None:
    """Held parts of 53.2 GiB of gradient and two buffers of 64 MiB; eleven peers of bags; what a step brings."""
    sizes = replace(SIZES, places=Places("node", "host"))
    fixed = USABLE * (CONTEXT_GIB - BARE_CONTEXT_GIB) + 2 * STAGE * 2 / 2**30
    for workers, part, bag_peers in ((8, 53.23 / 8, 11), (4, 53.23 / 4, 3 * 1 + 3)):
        infos = [ready(rank, "n", sizes) for rank in range(workers)]
        assert infos[0].room_gib is not None
        lost = infos[0].room_gib - rooms(infos, sizes)[0]
        assert lost == pytest.approx(part + fixed + USABLE * PEER_GIB * bag_peers, abs=0.01)


def test_gpus_of_several_nodes_keep_room_for_their_peers_of_the_other_nodes() -> None:
    sizes = replace(SIZES, places=Places("node", "host"))
    on_one, on_eight = (
        rooms([ready(rank, f"n{rank // 8}", sizes) for rank in range(workers)], sizes)[0] for workers in (8, 64)
    )
    assert on_one - on_eight == pytest.approx(USABLE * PEER_GIB * 7, abs=0.01)
    own = replace(SIZES, places=Places("own", "host"))
    assert rooms([ready(rank, f"n{rank // 8}", own) for rank in range(64)], own)[0] == pytest.approx(
        rooms([ready(rank, "n", own) for rank in range(8)], own)[0]
    ), "collectives alone"


def test_a_small_node_s_workers_hold_more_of_its_gradient() -> None:
    sizes = replace(SIZES, places=Places("node", "host"))
    found = rooms([ready(rank, "large" if rank < 6 else "small", sizes) for rank in range(8)], sizes)
    assert len(set(found[:6])) == len(set(found[6:])) == 1
    parts = [4 * SIZES.trained / 2**30 * share for share in (2 / 8, 4 / 8)]
    more_peers = USABLE * PEER_GIB * (3 - 1)  # each of the two exchanges with three of the six
    assert found[0] - found[-1] == pytest.approx(parts[1] - parts[0] + more_peers, abs=0.01)


def test_where_one_worker_has_no_room_for_a_gradient_all_share_one() -> None:
    """The other has it when it is ready, and gives it back."""
    own, node = (replace(SIZES, places=Places(place, "device")) for place in ("own", "node"))
    mixed = rooms([ready(0, "n", own), ready(1, "n", node)], SIZES)
    assert mixed == pytest.approx(rooms([ready(0, "n", node), ready(1, "n", node)], SIZES))


def test_state_that_lies_beside_a_gpu_takes_nothing_of_it() -> None:
    sizes = replace(SIZES, trained=3 * 2**30 // 16 * 30, parameters=3 * 2**30 // 16 * 30, in_blocks=0)
    found = [
        ready(rank, "left", replace(sizes, places=Places("own", state)), device)
        for rank, (device, state) in enumerate((("cuda:0", "device"), ("cuda:0", "host"), ("cpu", "device")))
    ]
    lost = [one.room_gib - left for one, left in zip(found, rooms(found, sizes)) if one.room_gib is not None]
    brings = lost[1]
    assert lost == pytest.approx([brings + 30.0, brings, 30.0], abs=1e-6)
    assert brings == pytest.approx(USABLE * (1.5 + communicators_gib(DEGREES, 3, BAG_PEERS)))


def test_without_sizes_a_worker_s_own_word_counts() -> None:
    seats = seats_of([ready(0, "n", SIZES)], lambda name: cast(WorkerHandle, None))
    assert seats[0].room_gib == ready(0, "n", SIZES).room_gib


def test_room_stays_while_bags_connect() -> None:
    """What connects is taken off what is measured, and was taken off before."""
    bags_gib = communicators_gib(DEGREES, 8, BAG_PEERS)
    measured = [40.0 - USABLE * PEER_GIB * peers for peers in range(12)]
    left = [left_gib(room, bags_gib, peers) for peers, room in enumerate(measured)]
    assert left == pytest.approx([measured[-1]] * 12)
    assert left_gib(30.0, bags_gib, 20) == 30.0, "a bag that is larger than the limit is open alone"
