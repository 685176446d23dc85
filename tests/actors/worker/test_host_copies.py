"""Published results leave the device after the next cascade: not early, not twice, not from another generation."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from actors.run.dispatch import Holdings, calls_of
from actors.worker.executor import Executor
from actors.worker.handoff import CopyInFlight, EncodeResult, HostCopies
from actors.worker.worker import Worker
from app.bench.lab import Lab, LabRun
from ops.update.shard_export import CopyWait
from tests.actors.exactness import execute, items_of, make_hosts, one_worker, train_config
from tests.actors.fakes import step_items


class SlowCopy:
    """A device whose copies end when told so."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def __call__(self, rows: torch.Tensor) -> CopyInFlight:
        host = torch.full_like(rows, float("nan"))

        def wait() -> None:
            assert self.end.wait(120)
            host.copy_(rows)

        return CopyInFlight(host=host, wait=wait)


def result(value: float) -> EncodeResult:
    return EncodeResult(id=(0, "a", 0), rows=torch.full((2, 3), float(value)), ok=False)


def test_a_result_is_handed_out_when_its_copy_has_ended() -> None:
    copy, taken = SlowCopy(), []
    copies = HostCopies(copy)
    copies.start((1, "a/vae/0"), [result(7)])
    thread = threading.Thread(target=lambda: taken.append(copies.take((1, "a/vae/0"), 0.0)))
    thread.start()
    time.sleep(0.05)
    assert not taken, "the copy was still running"
    copy.end.set()
    thread.join(120)
    (found,) = taken[0]
    assert torch.equal(found.rows, torch.full((2, 3), 7.0)) and found.id == (0, "a", 0) and not found.ok
    assert len(copies) == 0 and copies.take((1, "a/vae/0"), 0.0) is None


def test_who_asks_first_waits_for_the_cascade() -> None:
    copy, taken = SlowCopy(), []
    copy.end.set()
    copies = HostCopies(copy)
    thread = threading.Thread(target=lambda: taken.append(copies.take((1, "a/vae/0"), 120.0)))
    thread.start()
    copies.start((2, "a/vae/0"), [result(1)])  # of another generation
    copies.start((1, "a/vae/0"), [result(2)])
    thread.join(120)
    assert float(taken[0][0].rows[0, 0]) == 2.0


def test_an_executor_starts_copies_of_what_it_publishes_and_forgets_them_with_its_generation() -> None:
    copy = SlowCopy()
    copies = HostCopies(copy)
    (host,) = make_hosts(1, torch.float32, train_config(), copies=copies)
    executor, encoding = host.executor, host.encoding
    items = items_of(np.random.default_rng(0), 1)
    shapes = [(i.id, (i.frames, i.height, i.width), ["0/0/0"] * i.batch) for i in items]
    samples = step_items(0, shapes, executor.modules.geometry, "sample")
    text, vae = calls_of([c for c in one_worker(items) if c.module != "dit"], {0: samples}, 1, 0, Holdings())
    assert text.task.publish and vae.task.publish
    assert execute(encoding, text, {}, frozenset()) == [] and execute(encoding, vae, {}, frozenset()) == []
    assert len(copies) == 2, "nothing waited for the copies"
    copy.end.set()
    (first, *_) = copies.take((1, vae.task.cascade), 0.0) or []
    assert torch.equal(first.rows, executor.store.take("vae", first.id).rows)
    executor.leave()
    assert len(copies) == 0


def _slow(rows: torch.Tensor) -> CopyInFlight:
    """As long as a copy of some hundred MB takes, so that it overlaps with the cascade after it."""
    host = torch.empty_like(rows)

    def wait() -> None:
        time.sleep(0.02)
        host.copy_(rows)

    return CopyInFlight(host=host, wait=wait)


class SlowSnapshots:
    """Copies of a state that last into the next step, and read their source at the end."""

    def __call__(self, arrays: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> CopyWait:
        ended, once = threading.Event(), threading.Lock()

        def wait() -> None:
            with once:
                if not ended.is_set():
                    time.sleep(0.05)
                    for name, array in arrays.items():
                        into[name].copy_(array)
                    ended.set()

        return wait

    def release(self) -> None: ...


class LaterWorker(Worker):
    """A CPU worker that hands out its results and its state as one with a GPU does."""

    def _device(self) -> torch.device:
        return torch.device("cpu")

    def _load(self) -> Executor:
        executor = super()._load()
        executor.sync.state.copy_arrays = SlowSnapshots()  # type: ignore[attr-defined]
        return executor

    def _host_copies(self) -> HostCopies:
        return HostCopies(_slow)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Lab(tmp_path) as one:
        yield one


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_run_whose_results_are_published_later_trains_the_same(lab: Lab) -> None:
    lab.add_node(workers=2, gpus=2)  # with a GPU, workers get the thread

    def run_of(name: str, worker_class: Any, device: str) -> LabRun:
        workers = {"min": 2, "max": 2, "device": device}
        planner = {"strategy": "cascade", "degrees": [1]}  # no bags: all that moves goes through the object store
        run = lab.start(
            lab.config(name, workers=workers, planner=planner, train={"steps": 6}), worker_class=worker_class
        )
        assert run.join(400).code == 0, run.outcome
        return run

    assert ray.cluster_resources()["GPU"] == 2
    later, plain = run_of("later", LaterWorker, "auto"), run_of("plain", Worker, "cpu")
    assert later.losses() == pytest.approx(plain.losses(), rel=1e-5)
    for run in (later, plain):
        moved = [m for m in run.metrics if m.handoff_bytes]
        assert moved and all(m.handoff_s > 0 for m in moved)
