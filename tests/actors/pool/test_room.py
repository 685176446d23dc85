"""Workers fill a node before they begin the next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.cluster_utils import Cluster

from actors.pool.room import Need, nodes_with_room, where
from actors.pool.workers import start_monitor
from actors.ray_calls import free_outside
from actors.refs import RayNode
from app.bench.lab import patiently

GPU_WORKER = Need(cpus=2, gpus=1)


def node(name: str, gpus: int, cpus: int = 64, alive: bool = True) -> RayNode:
    resources = {"CPU": cpus, "GPU": gpus, "memory": 1e9}
    return RayNode(
        NodeID=name,
        Alive=alive,
        Resources=resources,
        NodeManagerAddress="10.0.0.1",
        NodeManagerHostname=name,
        NodeManagerPort=1,
    )


def requested(nodes: list[RayNode], count: int, need: Need = GPU_WORKER) -> list[str | None]:
    return nodes_with_room(nodes, [], need, count)


def one_by_one(nodes: list[RayNode], count: int) -> list[str | None]:
    taken: list[str] = []
    asked = []
    for _ in range(count):
        asked += nodes_with_room(nodes, taken, GPU_WORKER, 1)
        taken += [asked[-1]] if asked[-1] else []
    return asked


def test_eight_workers_share_a_node_of_eight_gpus() -> None:
    two = [node("a", 8), node("b", 8)]
    assert requested(two, 8) == ["a"] * 8
    assert requested(two, 17) == ["a"] * 8 + ["b"] * 8 + [None], "the last one waits for the autoscaler"


def test_the_roomiest_node_is_begun_first() -> None:
    assert requested([node("small", 2), node("large", 8)], 10) == ["large"] * 8 + ["small"] * 2


def test_nodes_at_rest_come_last() -> None:
    """The free GPU of a full node is the one that has failed: three starts there would end the run."""
    two = [node("full", 8), node("empty", 8)]
    asked = nodes_with_room(two, ["full"] * 7, GPU_WORKER, 9, last=["full"])
    assert asked == ["empty"] * 8 + ["full"]


def test_nodes_that_are_gone_or_have_no_gpu_are_not_asked() -> None:
    assert requested([node("dead", 8, alive=False), node("head", 0), node("few-cpus", 8, cpus=1)], 1) == [None]


def test_shares_of_a_core_fill_it() -> None:
    assert requested([node("a", 0, cpus=1)], 11, Need(cpus=0.1, gpus=0)).count("a") == 10


@given(st.lists(st.integers(0, 8), max_size=6), st.integers(0, 40))
def test_no_node_gets_more_than_it_holds_and_at_most_one_is_half_full(sizes: list[int], count: int) -> None:
    nodes = [node(str(i), gpus) for i, gpus in enumerate(sizes)]
    asked = requested(nodes, count)
    assert asked == one_by_one(nodes, count)
    held = [asked.count(str(i)) for i in range(len(sizes))]
    assert sum(held) == min(count, sum(sizes))
    assert all(h <= s for h, s in zip(held, sizes, strict=True))
    assert sum(0 < h < s for h, s in zip(held, sizes, strict=True)) <= 1


@contextmanager
def two_nodes() -> Iterator[Cluster]:
    ray.shutdown()  # what a failed test left
    made = patiently(lambda: Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}))
    patiently(lambda: made.add_node(num_cpus=2))
    patiently(lambda: made.add_node(num_cpus=2, resources={"taken": 1}))
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    with two_nodes() as made:
        yield made


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """That of all tests here, once actors of the one before, to which nobody refers any more, have ended."""
    deadline = time.monotonic() + 60
    while free_outside([]).get("CPU") != 4:
        assert time.monotonic() < deadline, free_outside([])
        time.sleep(0.1)
    return shared_cluster


@pytest.fixture
def mortal_cluster() -> Iterator[Cluster]:
    with two_nodes() as made:
        yield made


@ray.remote(num_cpus=1)
class Somebody:
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.long
def test_ray_follows_the_wish_and_passes_it_over_where_others_are(cluster: Cluster) -> None:
    made: Any = Somebody
    full = next(n["NodeID"] for n in ray.nodes() if "taken" in n["Resources"])
    other = next(n["NodeID"] for n in ray.nodes() if n["Resources"].get("CPU") and n["NodeID"] != full)
    strangers = [made.options(resources={"taken": 0.1}).remote() for _ in range(2)]
    assert ray.get([s.node.remote() for s in strangers]) == [full, full]
    ours = [made.options(**where(full)).remote(), made.options(**where(other)).remote()]
    assert ray.get([one.node.remote() for one in ours], timeout=120) == [other, other]


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.long
def test_ray_places_nobody_on_a_node_that_is_shunned(cluster: Cluster) -> None:
    made: Any = Somebody
    shunned = next(n["NodeID"] for n in ray.nodes() if "taken" in n["Resources"])
    other = next(n["NodeID"] for n in ray.nodes() if n["Resources"].get("CPU") and n["NodeID"] != shunned)
    assert free_outside([])["CPU"] == 4 and free_outside([shunned])["CPU"] == 2
    ours = [made.options(**where(wish, [shunned])).remote() for wish in (None, other)]
    assert ray.get([one.node.remote() for one in ours], timeout=120) == [other, other]
    more = [made.options(**where(wish, [shunned])).remote() for wish in (None, other)]
    assert ray.wait([one.node.remote() for one in more], timeout=5)[0] == [], "they wait for room"


@ray.remote(num_cpus=1, max_concurrency=2)
class Controlling:
    def begin(self) -> tuple[str, str]:
        """Its node, and the life of its run's monitor."""
        self._monitor = start_monitor("run")
        return ray.get_runtime_context().get_node_id(), ray.get(self._monitor.report.remote()).life

    def life(self) -> str:
        return ray.get(self._monitor.report.remote()).life


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.faults
def test_a_monitor_begins_beside_its_controller_and_outlives_its_node_with_the_next_one(
    mortal_cluster: Cluster,
) -> None:
    """The workers know no other."""
    kind: Any = Controlling
    first = kind.options(resources={"taken": 0.1}).remote()
    node, life = ray.get(first.begin.remote(), timeout=120)
    ray.kill(first)
    second = kind.options(**where(None, [node])).remote()
    elsewhere, same = ray.get(second.begin.remote(), timeout=120)
    assert elsewhere != node and same == life
    mortal_cluster.remove_node(next(one for one in mortal_cluster.worker_nodes if one.node_id == node))
    assert ray.get(second.life.remote(), timeout=120) != life, "it was on that node, and is on another one now"


def test_a_thousand_workers_are_placed_by_one_look_at_every_node() -> None:
    looks: list[str] = []

    class Watched(Need):
        def capacity(self, resources: Any) -> int:
            looks.append("")
            return super().capacity(resources)

    found = nodes_with_room([node(f"n{n:03}", 8) for n in range(128)], ["n007"], Watched(cpus=2, gpus=1), 1024)
    assert len(looks) == 128 and found[:7] == ["n007"] * 7 and found[-1] is None and None not in found[:-1]
