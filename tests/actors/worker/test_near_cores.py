"""A worker stays on the cores of its GPU's memory node: real threads of a process of its own, a made-up sysfs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.config import WorkersConfig
from actors.messages import FailedStart, WorkerSettings
from actors.plan.types import GpuPlace
from actors.progress import Orders
from actors.worker.near_cores import stay_near
from actors.worker.worker import Worker
from tests.actors.exactness import MODEL, train_config

ROOT = Path(__file__).parents[3]
ALL = sorted(os.sched_getaffinity(0))

_PROCESS = """
import os, sys, threading
from pathlib import Path
from actors.worker.near_cores import stay_near

before, end = threading.Thread(target=lambda: end.wait()), threading.Event()
before.start()
print(sorted(stay_near(int(sys.argv[1]), Path(sys.argv[2]))))
after = threading.Thread(target=lambda: end.wait())
after.start()
print(sorted({tuple(sorted(os.sched_getaffinity(int(one)))) for one in os.listdir("/proc/self/task")}))
end.set()
"""


def machine(root: Path, *nodes: str) -> Path:
    """A sysfs that has these lists of cores, one of each memory node."""
    for number, listed in enumerate(nodes):
        folder = root / "devices" / "system" / "node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{listed}\n")
    return root


def runs_on(numa: int, root: Path) -> list[str]:
    """What it returns, and the cores of all threads afterwards, of those that were there and of a new one."""
    command = [sys.executable, "-c", _PROCESS, str(numa), str(root)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(len(ALL) < 2, reason="needs two cores")
def test_all_threads_and_those_to_come_run_on_the_cores_of_the_node(tmp_path: Path) -> None:
    first, others = ALL[0], ALL[1:]
    listed = ",".join(map(str, others))
    root = machine(tmp_path, listed, f"{first}-{first},{max(ALL) + 7}-{max(ALL) + 9}")
    assert runs_on(1, root) == [f"[{first}]", f"[({first},)]"]
    assert runs_on(0, root)[0] == f"{others}"


@pytest.mark.parametrize(
    "numa, nodes",
    [
        (None, (f"{ALL[0]}", "900-907")),  # nobody knows the GPU's node
        (5, (f"{ALL[0]}", "900-907")),  # no such node
        (1, (f"{ALL[0]}", "900-907")),  # the process may use none of its cores
        (0, ("-".join(map(str, (ALL[0], ALL[-1]))),)),  # one memory node
        (0, ("0-x", "")),  # unreadable
    ],
)
def test_otherwise_nothing_changes(tmp_path: Path, numa: int | None, nodes: tuple[str, ...]) -> None:
    assert stay_near(numa, machine(tmp_path, *nodes)) == frozenset()
    assert sorted(os.sched_getaffinity(0)) == ALL


def test_a_container_with_few_cores_of_the_node_keeps_all_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {0, 1, 2, 3, 4, 5, 6, 8})
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: pytest.fail(f"{thread} on {cores}"))
    assert stay_near(1, machine(tmp_path, "0-7", "8-15")) == frozenset()


def test_a_refusal_of_the_system_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: int, cores: frozenset[int]) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", refused)
    assert stay_near(0, machine(tmp_path, "0-7", "8-15")) == frozenset()


@pytest.mark.parametrize("binding, called", [("auto", [1]), ("none", [])])
def test_a_worker_stays_near_its_gpu_before_it_loads_anything(
    monkeypatch: pytest.MonkeyPatch, binding: str, called: list[int]
) -> None:
    seen: list[int | None] = []

    def silent(progress: object) -> None:
        threading.Event().wait()

    def load(worker: Worker) -> None:
        assert seen == called
        raise RuntimeError("it got so far")

    monkeypatch.setattr("actors.worker.worker.node_id", lambda: "n")
    monkeypatch.setattr("actors.worker.worker.given_gpu", lambda: "")
    monkeypatch.setattr("actors.worker.worker.node_address", lambda: "127.0.0.1")
    monkeypatch.setattr("actors.worker.heartbeat.get", lambda reference, timeout: Orders(generation=-1))
    monkeypatch.setattr("actors.worker.worker.place_of", lambda device: GpuPlace(numa=1))
    monkeypatch.setattr("actors.worker.worker.stay_near", seen.append)
    monkeypatch.setattr(Worker, "_on_sigterm", lambda self: None)
    monkeypatch.setattr(Worker, "_load", load)
    workers = WorkersConfig(device="cpu", numa_binding=binding)  # type: ignore[arg-type]
    settings = WorkerSettings(model=MODEL, train=train_config(), workers=workers)
    monitor: Any = SimpleNamespace(beat=SimpleNamespace(options=lambda **options: SimpleNamespace(remote=silent)))
    failed = Worker("w0", settings, monitor).info()
    assert isinstance(failed, FailedStart) and failed.why == "RuntimeError: it got so far" and seen == called
