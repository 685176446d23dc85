"""Objects that die with their owner: pixels that a call should have read, shards that a checkpoint should have held."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors.config import CheckpointConfig
from actors.messages import Origin, Snapshot
from actors.outcome import Events
from actors.records.events import CheckpointFailed
from actors.run.steps import has_lost_argument
from actors.state.checkpoint_writer import Writer, latest
from ops.shards import ARRAYS, ShardState
from tests.actors.fakes import Listening
from tests.rays import local_ray

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
TOTAL = 64


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(num_cpus=2, log_to_driver=False, object_store_memory=100 << 20):
        yield


class Owner:
    """Stands for a worker: owns what it puts, fails when asked to."""

    def shard(self, step: int) -> list[Any]:
        return [ray.put(state(step))]

    def pixels(self) -> list[Any]:
        return [ray.put(np.zeros(1 << 20))]

    def encode(self, fails: bool, pixels: Any) -> int:
        if fails:
            raise ValueError("the encoder's own fault")
        return len(pixels)


def state(step: int) -> ShardState:
    arrays = {name: np.full(TOTAL, step, np.float32) for name in ARRAYS}
    return ShardState(updates=step, lo=0, hi=TOTAL, total=TOTAL, arrays=arrays)


def snapshot(step: int, shard: Any) -> Snapshot:
    return Snapshot(step=step, generation=1, lo=0, hi=TOTAL, total=TOTAL, shard=shard)


def owner() -> Any:
    return ray.remote(Owner).options(num_cpus=0).remote()


def orphan(method: str, *args: Any) -> Any:
    """What a worker that is gone has put. Ray notices the death in its own time; until then the object can be read."""
    worker = owner()
    (reference,) = ray.get(getattr(worker, method).remote(*args))
    ray.kill(worker)
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        try:
            ray.get(reference, timeout=10)
        except ray.exceptions.ObjectLostError:
            return reference
        except ray.exceptions.GetTimeoutError:
            continue
        time.sleep(0.05)
    raise AssertionError("the object outlives its owner")


def writer_of(folder: Path, listener: Listening) -> Writer:
    """Takes a checkpoint every ten steps of a run that has a hundred."""
    return Writer(folder, CheckpointConfig(every=10, keep_last=2), last_step=99, events=Events(listener))


def meta(step: int) -> dict[str, Any]:
    return {"step": step, "parameters": []}


def test_only_a_call_without_its_pixels_counts_as_such() -> None:
    @ray.remote
    def cannot_decode() -> None:
        raise OSError("the gate is gone")

    @ray.remote(max_retries=0)
    def dies() -> None:
        import os

        os._exit(1)

    worker = owner()
    assert not has_lost_argument(worker.encode.remote(False, [1, 2]))
    assert not has_lost_argument(worker.encode.remote(True, [1, 2]))
    assert has_lost_argument(worker.encode.remote(False, orphan("pixels")))
    assert has_lost_argument(worker.encode.remote(False, cannot_decode.remote()))
    assert has_lost_argument(worker.encode.remote(False, dies.remote()))
    ray.kill(worker)
    assert not has_lost_argument(worker.encode.remote(False, [1, 2]))


def test_a_checkpoint_that_was_lost_with_its_worker_is_taken_again_soon(tmp_path: Path) -> None:
    listener = Listening()
    writer = writer_of(tmp_path, listener)
    assert writer.due(9) and not writer.due(10)
    writer.save([snapshot(9, orphan("shard", 9))], meta(9))
    writer.wait()
    assert [(type(e), e.step) for e in listener.told] == [(CheckpointFailed, 9)] and latest(tmp_path) is None
    assert writer.due(10), "the next step is taken instead"
    writer.save([snapshot(10, ray.put(state(10)))], meta(10))
    writer.wait()
    assert latest(tmp_path) == (10, tmp_path / "checkpoints" / "step-10")
    assert not writer.due(11)


def test_the_last_state_is_written_although_an_attempt_at_it_is_failing(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, Listening())
    writer.save([snapshot(9, orphan("shard", 9))], meta(9))
    assert writer.save_origin(Origin(step=9, exports=(ray.put(state(9)),)), meta(9))
    assert latest(tmp_path) is None, "its steps are counted first"
    writer.seal_last()
    assert latest(tmp_path) == (9, tmp_path / "checkpoints" / "step-9")
