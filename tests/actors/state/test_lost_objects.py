"""Objects that die with their owner: pixels that a call should have read, shards that a checkpoint should have held."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from actors.run.failures import has_lost_argument
from tests.rays import local_ray

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
TOTAL = 64


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(num_cpus=2, log_to_driver=False, object_store_memory=100 << 20):
        yield


class Owner:
    """Stands for a worker: owns what it puts, fails when asked to."""

    def pixels(self) -> list[Any]:
        return [ray.put(np.zeros(1 << 20))]

    def encode(self, fails: bool, pixels: Any) -> int:
        if fails:
            raise ValueError("the encoder's own fault")
        return len(pixels)


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


@pytest.mark.long
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
