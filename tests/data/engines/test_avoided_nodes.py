"""Nodes that the workers do not reach decode nothing: a cluster of two nodes beside the head."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from app.bench.lab import patiently
from data.config import BatchConfig, BucketsConfig, DataConfig, EngineConfig, LimitsConfig, SourceConfig
from data.dataset.dataset import Dataset
from data.engines.ray_data import RayEngine
from data.tools.synthetic import SynthConfig, synthesize
from ops.geometry import Geometry

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
HERE, ROOT = str(Path(__file__).parents[1]), str(Path(__file__).parents[3])
STEPS = 6


@pytest.fixture(scope="module")
def nodes() -> Iterator[set[str]]:
    """Ids of those that have CPUs."""
    os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, HERE])
    head = {"num_cpus": 0, "include_dashboard": False}
    made: Any = patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
    try:
        for _ in range(2):
            patiently(lambda: made.add_node(num_cpus=1, object_store_memory=100 << 20))
        ray.init(address=made.address, logging_level=logging.ERROR, log_to_driver=False)
        yield {node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU")}
    finally:
        ray.shutdown()
        made.shutdown()
        del os.environ["PYTHONPATH"]


def decoded_on(engine: RayEngine, folder: Path, avoid: tuple[str, ...]) -> set[str]:
    """Ids of nodes, told in the second half of the steps: tasks of a feeder that was ended outlive it for a moment."""
    engine.start(0, avoid)
    for step in range(2 * STEPS):
        if step == STEPS:
            for told in folder.iterdir():
                told.unlink()
        ray.get(engine.batches(step))
        engine.release(step)
    return {told.name for told in folder.iterdir()}


@pytest.mark.long
@pytest.mark.parametrize("feeders", [1, 2])
def test_nothing_is_decoded_on_a_node_that_is_to_be_avoided(nodes: set[str], tmp_path: Path, feeders: int) -> None:
    synthesize(tmp_path, SynthConfig(clips=16, images=4, shards=1, seed=1, frames=(9, 17)))
    source = SourceConfig(path=str(tmp_path / "shards"), caption="json:captions", index=str(tmp_path / "index"))
    settings = EngineConfig(
        decode_workers=2,
        decode_cpus=0.5,
        object_store_mb=32,
        decoder="telling_decoder:decode",
        feeders=feeders,
    )
    config = DataConfig(
        sources=(source,),
        buckets=BucketsConfig(table=("1x64x96", "9x64x96")),
        items_per_step=4,
        engine=settings,
        batch=BatchConfig(memory_tokens=400, text_tokens=48),
        limits=LimitsConfig(max_bad_fraction=1.0),
    )
    engine = RayEngine(Dataset.open(config, Geometry(), seed=0))
    told = tmp_path / "nodes"
    told.mkdir()
    one, other = sorted(nodes)
    try:
        assert decoded_on(engine, told, avoid=(one,)) == {other}
        assert decoded_on(engine, told, avoid=(other,)) == {one}
    finally:
        engine.stop()
