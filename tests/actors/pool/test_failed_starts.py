"""A worker that does not start says why, and where that was."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from actors.config import WorkersConfig
from actors.messages import FailedStart, HostGpu, WorkerSettings
from actors.pool.workers import RayPool, start_monitor
from actors.progress import Orders
from actors.ray_calls import node_id, resources
from actors.worker.loading import GpuUnusable, device_of
from actors.worker.worker import Worker
from tests.actors.exactness import MODEL, train_config
from tests.rays import local_ray

HANGS_S = 120.0


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_no_worker_takes_a_cpu_in_the_place_of_a_gpu_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr("actors.worker.loading.why_unusable", lambda: "PyTorch cannot use it: CUDA error")
    workers = WorkersConfig(device=device)  # type: ignore[arg-type]
    with pytest.raises(GpuUnusable, match="GPU 2 of gpu-node-7: PyTorch cannot use it: CUDA error"):
        device_of(workers, HostGpu(node="n", host="gpu-node-7", gpu="2"))
    assert device_of(WorkersConfig(device="cpu"), HostGpu(gpu="2")).type == "cpu"


def test_auto_without_a_gpu_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_of(WorkersConfig(device="auto"), HostGpu(host="h")).type == "cpu"


def test_a_worker_whose_gpu_does_not_answer_is_heard_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is given up in time: one that was never heard waits for resources."""
    answers, heard, made = threading.Event(), threading.Event(), list[Worker]()

    def hangs() -> str:
        assert answers.wait(HANGS_S)
        return "CUDA error"

    def beat(progress: object) -> None:
        heard.set()
        if answers.is_set():
            threading.Event().wait()  # no more of them

    monkeypatch.setattr("actors.worker.worker.node_id", lambda: "n")
    monkeypatch.setattr("actors.worker.worker.given_gpu", lambda: "2")
    monkeypatch.setattr("actors.worker.worker.Worker._on_sigterm", lambda self: None)  # of the main thread alone
    monkeypatch.setattr("actors.worker.heartbeat.get", lambda reference, timeout: Orders(generation=-1))
    monkeypatch.setattr("actors.worker.loading.why_unusable", hangs)
    settings = WorkerSettings(model=MODEL, train=train_config(), workers=WorkersConfig(device="cuda"))
    monitor: Any = SimpleNamespace(beat=SimpleNamespace(options=lambda **options: SimpleNamespace(remote=beat)))
    starting = threading.Thread(target=lambda: made.append(Worker("w0", settings, monitor)), daemon=True)
    starting.start()
    assert heard.wait(HANGS_S) and not made
    answers.set()
    starting.join(HANGS_S)
    failed = made[0].info()
    assert isinstance(failed, FailedStart) and failed.where == HostGpu(node="n", host=socket.gethostname(), gpu="2")


@pytest.mark.parametrize(
    ("error", "may_pass"), [(OSError(errno.ESTALE, "Stale file handle"), True), (RuntimeError("CUDA error"), False)]
)
def test_a_worker_says_whether_what_kept_it_from_starting_passes(
    monkeypatch: pytest.MonkeyPatch, error: Exception, may_pass: bool
) -> None:
    def start(worker: Worker, monitor: object) -> None:
        raise error

    monkeypatch.setattr("actors.worker.worker.node_id", lambda: "n")
    monkeypatch.setattr("actors.worker.worker.given_gpu", lambda: "")
    monkeypatch.setattr(Worker, "_start", start)
    settings: Any = SimpleNamespace()
    failed = Worker("w0", settings, settings).info()
    assert isinstance(failed, FailedStart) and failed.passes == may_pass


class Raises(Worker):
    def __init__(self, name: str, settings: WorkerSettings, monitor: Any) -> None:
        raise ImportError("no module named av")


class Dies(Worker):
    def __init__(self, name: str, settings: WorkerSettings, monitor: Any) -> None:
        os._exit(1)


class Hangs(Worker):
    def __init__(self, name: str, settings: WorkerSettings, monitor: Any) -> None:
        time.sleep(HANGS_S)


@pytest.mark.cluster
@pytest.mark.faults
def test_a_worker_that_hangs_has_a_process_and_one_that_waits_for_its_gpu_has_none() -> None:
    settings = WorkerSettings(
        model=MODEL, train=train_config(), workers=WorkersConfig(device="auto", cpus_per_worker=0.5)
    )
    until = time.monotonic() + HANGS_S
    with local_ray(num_cpus=2, num_gpus=1, log_to_driver=False):
        pool, here = (
            RayPool("hangs", settings, start_monitor("run"), Hangs),
            HostGpu(node=node_id(), host=socket.gethostname()),
        )
        for name in pool.start(2):
            while (found := pool.hosting(name)) is None:
                assert time.monotonic() < until
                time.sleep(0.1)
            assert found == here and {pool.hosting(other) for other in pool.pending if other != name} <= {None}
            pool.remove(name)  # the other one gets its GPU


@pytest.mark.cluster
@pytest.mark.faults
def test_the_pool_learns_where_it_was_and_gives_the_gpu_back() -> None:
    """Ray has a GPU that PyTorch does not see; the constructor fails or the process dies before it could say that."""
    host = socket.gethostname()
    with local_ray(num_cpus=2, num_gpus=1, log_to_driver=False):
        for kind, gpu, why in (
            (Worker, "0", f"GPU 0 of {host}: PyTorch "),
            (Raises, "", "ImportError: no module named av"),
            (Dies, "", "The actor died unexpectedly"),
        ):
            failed = failed_start(kind)
            assert failed.worker == "w0" and failed.where == HostGpu(node=node_id(), host=host, gpu=gpu)
            assert failed.why.startswith(why)


def failed_start(kind: type[Worker]) -> FailedStart:
    settings = WorkerSettings(
        model=MODEL, train=train_config(), workers=WorkersConfig(device="auto", cpus_per_worker=0.5)
    )
    pool = RayPool(kind.__name__, settings, start_monitor("run"), kind)
    pool.start(1)
    until = time.monotonic() + HANGS_S
    while not (news := pool.poll()).failed:
        assert time.monotonic() < until and not news.ready
        time.sleep(0.1)
    assert pool.names == []
    while resources(free=True).get("GPU", 0) < 1:
        assert time.monotonic() < until, "the next worker has no GPU"
        time.sleep(0.1)
    (failed,) = news.failed
    return failed
