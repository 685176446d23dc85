"""What a cluster file says, laid over the workers that are there; what a run tells of it."""

from __future__ import annotations

from typing import cast

import pytest

from actors.messages import WorkerHandle, WorkerInfo
from actors.plan.costs.topology import CrossNode, Topology
from actors.plan.types import Cluster, GpuPlace, places_in
from actors.records.events import ClusterSeen
from actors.run.cluster_words import nccl_of, seen
from actors.run.forming import cluster_of, seats_of
from actors.run.given_cluster import ClusterMismatch, GivenCluster


def found(*nodes: tuple[str, int, tuple[int, ...]], rails: str = "") -> Cluster:
    """Workers as they tell of themselves: nodes as (host, GPUs, those with a worker)."""
    return Cluster(
        nodes=tuple(len(gpus) for _, _, gpus in nodes),
        hosts=tuple(host for host, _, _ in nodes),
        places=tuple(
            GpuPlace(index=gpu, count=count, numa=0, rail=rails[gpu] if rails else "", nic="mlx5_0", nic_hops=3)
            for _, count, gpus in nodes
            for gpu in gpus
        ),
        room_gib=(50.0,) * sum(len(gpus) for _, _, gpus in nodes),
    )


FILE = Cluster(nodes=(4, 4), places=places_in((4, 4), rails="ABCD", islands="AABB"), island_gbps=25.0)


def test_what_the_file_says_counts_and_the_rest_is_as_the_workers_tell() -> None:
    left = found(("a", 4, (1, 3)), ("b", 4, (0, 1, 2, 3)), rails="XXYY")
    over = GivenCluster(FILE).over(left, ["1", "2"])
    assert [place.rail for place in over.places] == list("BDABCD"), "by GPU, though only two of the node are left"
    assert [place.island for place in over.places] == list("ABAABB")
    assert {(place.numa, place.nic, place.nic_hops) for place in over.places} == {(0, "", 0)}
    assert (over.nodes, over.hosts, over.room_gib, over.island_gbps) == (left.nodes, left.hosts, left.room_gib, 25.0)
    only_islands = Cluster(nodes=(4, 4), places=places_in((4, 4), islands="AABB"))
    kept = GivenCluster(only_islands).over(left, ["1", "2"])
    assert [place.rail for place in kept.places] == list("XYXXYY") and {place.nic_hops for place in kept.places} == {3}
    assert GivenCluster(None).over(left, ["1", "2"]) is left


def test_a_node_keeps_its_place_in_the_file_as_long_as_it_has_workers() -> None:
    """The last node is slow; a node that comes for a lost one has its place."""
    given = GivenCluster(Cluster(nodes=(2, 2, 2), speed=(1.0, 1.0, 1.0, 1.0, 0.5, 0.5)))

    def slow(*hosts: str) -> list[str]:
        over = given.over(found(*((host, 2, (0, 1)) for host in hosts)), hosts)
        speed = over.speed or (1.0,) * 2 * len(hosts)
        return [host for node, host in enumerate(hosts) if speed[2 * node] < 1]

    assert slow("a", "b", "c") == ["c"]
    assert slow("b", "c") == ["c"] and slow("c") == ["c"]
    assert slow("a2", "c", "d") == ["c"] and slow("a2", "d") == []
    assert slow("a2", "d", "e") == ["e"]


def test_named_hosts_are_found_in_any_order() -> None:
    named = Cluster(
        nodes=(4, 2), hosts=("big", "small"), places=places_in((4, 2), rails="ABCD"), speed=(1.0,) * 5 + (0.5,)
    )
    over = GivenCluster(named).over(found(("small", 2, (0, 1)), ("big", 4, (2,))), ["1", "2"])
    assert [place.rail for place in over.places] == list("ABC") and over.speed == (1.0, 0.5, 1.0)


def test_nodes_of_other_sizes_take_those_that_are_theirs() -> None:
    sizes = Cluster(nodes=(2, 4), places=places_in((2, 4), rails="ABCD"))
    over = GivenCluster(sizes).over(found(("x", 4, (3,)), ("y", 2, (1,))), ["1", "2"])
    assert [place.rail for place in over.places] == list("DB")


def test_workers_without_a_gpu_are_counted() -> None:
    """On the CPU: the first of a node is the first of the file's."""
    plain = Cluster(nodes=(2, 1))
    over = GivenCluster(Cluster(nodes=(2, 2), speed=(1.0, 0.5, 1.0, 0.5))).over(plain, ["1", "2"])
    assert over.speed == (1.0, 0.5, 1.0) and over.places == ()
    with pytest.raises(ClusterMismatch, match="nodes of 1 and 1 GPUs, and a node has 2 workers"):
        GivenCluster(Cluster(nodes=(1, 1))).over(plain, ["1", "2"])


@pytest.mark.parametrize(
    ("given", "there", "sentence"),
    [
        (FILE, (("a", 8, (0,)),), "describes nodes of 4 and 4 GPUs, and a has 8 GPUs"),
        (FILE, (("a", 4, (0,)), ("b", 2, (0,))), "describes other nodes of 4 GPUs, and b has 2 GPUs"),
        (FILE, (("a", 4, (0,)), ("b", 4, (0,)), ("c", 4, (0,))), "describes 2 nodes, and workers are on 3"),
        (Cluster(nodes=(4,), hosts=("a",)), (("b", 4, (0,)),), "names the hosts a, and workers are on b"),
        (Cluster(nodes=(4,), hosts=("a",)), (("a", 8, (0,)),), "describes a node a of 4 GPUs, and a has 8 GPUs"),
        (Cluster(nodes=(4,)), (("a", 0, (5,)),), "describes a node of 4 GPUs, and a has a worker on its 6"),
    ],
)
def test_a_file_of_another_cluster_is_one_sentence(
    given: Cluster, there: tuple[tuple[str, int, tuple[int, ...]], ...], sentence: str
) -> None:
    with pytest.raises(ClusterMismatch) as caught:
        GivenCluster(given).over(found(*there), [host for host, _, _ in there])
    assert sentence in str(caught.value) and str(caught.value).endswith("a run then takes what its workers tell.")


def info(worker: str, node: str, gpu: int, rail: str, **nccl: str) -> WorkerInfo:
    return WorkerInfo(
        worker=worker,
        node=node,
        host=f"host-{node}",
        pid=1,
        device="cuda:0",
        place=GpuPlace(index=gpu, count=2, numa=gpu, island="A", rail=rail, nic=f"mlx5_{gpu}"),
        nccl=tuple(nccl.items()),
    )


def test_what_workers_tell_of_their_gpus_reaches_plans_and_events() -> None:
    infos = [
        info("w3", "left", 0, "A", NCCL_IB_HCA="mlx5"),
        info("w0", "left", 1, "B", NCCL_IB_HCA="mlx5"),
        info("w1", "right", 1, "B", NCCL_IB_HCA="mlx5", NCCL_DEBUG="INFO"),
    ]
    cluster = cluster_of(seats_of(infos, lambda name: cast(WorkerHandle, None)))
    assert (cluster.nodes, cluster.hosts) == ((2, 1), ("host-left", "host-right"))
    assert Topology(cluster, CrossNode(rails_per_node="XY")).rail == ["A", "B", "B"], "not those of the profile"
    event = seen(cluster, infos, from_file=False)
    assert event == ClusterSeen(
        nodes={
            "host-left": "2 GPUs, NVLink AA, numa 01, rails AB, cards mlx5_0 mlx5_1",
            "host-right": "1 GPU (1), NVLink A, numa 1, rails B, cards mlx5_1",
        },
        nccl={"NCCL_DEBUG": "INFO or unset", "NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": ""},
    )
    assert event.describe() == (
        "cluster: host-left: 2 GPUs, NVLink AA, numa 01, rails AB, cards mlx5_0 mlx5_1; host-right: 1 GPU (1), NVLink "
        "A, numa 1, rails B, cards mlx5_1; NCCL_DEBUG INFO or unset, NCCL_IB_HCA mlx5, NCCL_SOCKET_IFNAME not set"
    )


def test_nodes_that_are_alike_are_told_together() -> None:
    alike = {f"h{n}": "8 GPUs, NVLink AAAAAAAA, numa 00001111, rails ABCDEFGH" for n in range(6)}
    assert ClusterSeen(nodes=alike, nccl={}, from_file=True).describe() == (
        "cluster (workers.cluster): h0, h1, h2, h3 and 2 more: 8 GPUs, NVLink AAAAAAAA, numa 00001111, rails ABCDEFGH"
    )


def test_where_nothing_is_known_nothing_is_told() -> None:
    plain = WorkerInfo(worker="w0", node="n", host="h", pid=1, device="cpu")
    cluster = cluster_of(seats_of([plain], lambda name: cast(WorkerHandle, None)))
    assert cluster.places == () and seen(cluster, [plain], from_file=False) is None
    assert nccl_of([plain]) == {"NCCL_IB_HCA": "", "NCCL_SOCKET_IFNAME": ""}
