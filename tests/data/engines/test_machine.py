"""What of decoding is left to the machine: decoders by cores and memory, waiting pixels by the object store."""

from __future__ import annotations

import pytest

from actors.config import WorkersConfig
from actors.feed.step_source import decode_nodes
from actors.refs import RayNode
from data.config import EngineConfig
from data.engines.machine import DecodeNode, settled

GIB = 2**30


def ray_node(cpus: float, gib: float, gpus: int, alive: bool = True) -> RayNode:
    """As Ray lists one by default: 30 % of its memory are its object store."""
    return {
        "NodeID": "a",
        "Alive": alive,
        "NodeManagerAddress": "127.0.0.1",
        "NodeManagerHostname": "a",
        "NodeManagerPort": 0,
        "RayletSocketName": "",
        "Resources": {
            "CPU": cpus,
            "GPU": float(gpus),
            "memory": 0.7 * gib * GIB,
            "object_store_memory": 0.3 * gib * GIB,
        },
    }


DESKTOPS = {  # (CPUs as a run starts Ray there, GiB) -> decoders, MiB of pixels
    "8 cores, 32 GiB": (10, 32, 2, 2457),
    "16 cores, 32 GiB": (16, 32, 5, 2457),
    "16 cores, 64 GiB": (16, 64, 8, 4915),
    "64 cores, 256 GiB": (64, 256, 16, 16384),
    "8 cores that others have, 32 GiB": (8, 32, 1, 2457),
}


@pytest.mark.parametrize("name", DESKTOPS)
def test_a_machine_with_one_gpu_decodes_with_what_its_worker_leaves(name: str) -> None:
    cpus, gib, decoders, megabytes = DESKTOPS[name]
    workers = WorkersConfig(min=1, max=1, device="cuda", cpus_per_worker=8)
    found = settled(EngineConfig(), decode_nodes([ray_node(cpus, gib, 1)], workers, gpu=True))
    assert (found.decode_workers, found.object_store_mb) == (decoders, megabytes)


def test_every_node_adds_its_decoders_and_the_smallest_store_counts() -> None:
    workers = WorkersConfig(min=1, max=10, device="cuda", cpus_per_worker=2)
    nodes = [ray_node(40, 512, 8), ray_node(8, 64, 8), ray_node(64, 16, 0), ray_node(64, 512, 8, alive=False)]
    # 40 - 8 * 2 are more than the most of a node; 8 - 2 * 2; 11 GiB of memory without a worker
    assert settled(EngineConfig(), decode_nodes(nodes, workers, gpu=True)).decode_workers == 16 + 4 + 2
    assert settled(EngineConfig(), decode_nodes(nodes, workers, gpu=True)).object_store_mb == 1228


def test_what_is_set_stays_and_fractions_of_a_core_add_up() -> None:
    node = DecodeNode(cpus=0.6)
    assert settled(EngineConfig(decode_workers=3, object_store_mb=7), [node]) == EngineConfig(
        decode_workers=3, object_store_mb=7
    )
    found = settled(EngineConfig(decode_cpus=0.2), [node])
    assert (found.decode_workers, found.object_store_mb) == (3, 512), "nobody knows a store"
