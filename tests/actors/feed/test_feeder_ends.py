"""A feeder that is asked to end does so, also in the middle of a window that waits for it."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import process
from actors.config import TrainConfig, WorkersConfig
from actors.feed.feeder import Feeder
from actors.feed.step_source import StepSource, actor_factory, item_facts
from actors.step import DataLost
from data.config import BatchConfig, BucketsConfig, DataConfig, EngineConfig, SourceConfig
from data.engines.engine import make_engine
from data.tools.synthetic import SynthConfig, synthesize
from ops.geometry import Geometry
from ops.models.config import ModelConfig
from tests.rays import local_ray

pytestmark = [pytest.mark.cluster, pytest.mark.faults, pytest.mark.timeout(300)]


class KnownFeeder(Feeder):
    def pid(self) -> int:
        return os.getpid()

    def busy(self, seconds: float = 5.0) -> None:
        """A call that takes its time: Ray takes a signal in a call otherwise than between two."""
        (Path(self._run_dir) / "busy").touch()
        time.sleep(seconds)


@pytest.fixture
def cluster() -> Iterator[None]:
    with local_ray(num_cpus=2, object_store_memory=200 << 20):
        yield


def settings(tmp_path: Path) -> dict[str, Any]:
    synthesize(tmp_path, SynthConfig(clips=12, images=4, shards=1, koala=False))
    config = DataConfig(
        sources=(SourceConfig(path=str(tmp_path / "shards")),),
        items_per_step=2,
        buckets=BucketsConfig(table=("1x64x96", "9x64x96")),
        batch=BatchConfig(memory_tokens=400, text_tokens=48),
        engine=EngineConfig(decode_workers=1, decode_cpus=0.2, lookahead=1),
    )
    return {
        "config": config,
        "facts": item_facts(config, TrainConfig(), WorkersConfig(device="cpu"), ModelConfig(), Geometry()),
        "seed": 0,
        "run_dir": str(tmp_path),
        "engine_of": make_engine,
    }


def test_threads_of_a_feeder_and_of_what_it_starts_share_one_heap(cluster: None, tmp_path: Path) -> None:
    """Ray Data's actor of statistics is one of these; what each of them frees lies scattered otherwise, and grows."""
    feeder: Any = actor_factory(KnownFeeder, **settings(tmp_path))()
    ray.get(feeder.start.remote(0), timeout=120)
    ray.get(feeder.batches.remote(0), timeout=120)
    statistics: Any = ray.get_actor("datasets_stats_actor", namespace="_dataset_stats_actor")
    for actor in (feeder, statistics):
        assert ray.get(actor.__ray_call__.remote(heaps), timeout=60) == 1


def heaps(actor: object) -> int:
    """Heaps of glibc in this process."""
    library = ctypes.CDLL(None)
    library.fopen.restype = ctypes.c_void_p
    with tempfile.NamedTemporaryFile() as told:
        stream = ctypes.c_void_p(library.fopen(told.name.encode(), b"w"))
        library.malloc_info(0, stream)
        library.fclose(stream)
        return Path(told.name).read_text().count("<heap ")


def test_a_terminated_feeder_is_gone_while_decoding_waits_for_it(cluster: None, tmp_path: Path) -> None:
    feeder: Any = actor_factory(KnownFeeder, **settings(tmp_path))()
    ray.get(feeder.start.remote(0), timeout=120)
    ray.get(feeder.batches.remote(0), timeout=120)  # what comes after it is decoded ahead, then decoding waits
    pid = ray.get(feeder.pid.remote(), timeout=60)
    feeder.busy.remote()
    while not (tmp_path / "busy").exists():
        time.sleep(0.05)
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(feeder.items.remote(1), timeout=60)


def test_a_stopped_feeder_is_replaced_and_a_busy_one_is_waited_for(
    cluster: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = actor_factory(KnownFeeder, **settings(tmp_path))
    source = StepSource(make, Geometry(), "sample", 100, stall_s=120.0, silent_s=8.0)
    source.open(0)
    first = source.data(0)
    feeder: Any = source._feeder
    pid = ray.get(feeder.pid.remote(), timeout=60)
    busy = feeder.busy.remote(15.0)
    assert source._get(busy) is None, "a call of 15 s, and the feeder's process answers meanwhile"
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DataLost, match="the feeder has answered nothing for"):
        source.token(90)
    assert "has answered nothing for" in caplog.text, "a warning comes first"
    source.open(1)
    assert source.data(1).items.step == 1
    assert first.items.step == 0
    while process.birth(pid):  # Ray reaps its children
        time.sleep(0.1)
    source.close()
