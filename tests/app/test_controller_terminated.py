"""SIGTERM to the controller's process, as `kill` sends it, while calls that it has made wait for something."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import process
from app.run.controller_process import CONTROLLER, ControllerStart, controller_loop
from app.run.lock import FolderLock, lock_path
from app.settings.config import RunConfig
from tests.rays import local_ray

DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.yaml"


class Patient:
    """An actor that has calls without end, as monitor and keepers have."""

    def wait(self) -> None:
        threading.Event().wait()


class TrainProcess:
    """Runs the controller in a thread, as Ray Train's worker does, and has made a call that has not ended."""

    def begin(self, settings: ControllerStart, patient: Any) -> int:
        self.call = patient.wait.remote()
        threading.Thread(target=controller_loop, args=(settings,), daemon=True).start()
        until = time.monotonic() + 10.0
        while _catches(signal.SIGTERM) and time.monotonic() < until:
            time.sleep(0.05)
        return os.getpid()


def _catches(number: signal.Signals) -> bool:
    """Whether this process has a handler for a signal."""
    caught = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.fixture
def cluster() -> Iterator[None]:
    with local_ray(num_cpus=2, object_store_memory=200 << 20):
        yield


@pytest.mark.long
def test_a_terminated_controller_is_gone_while_its_calls_wait(cluster: None, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    settings = ControllerStart(
        yaml=RunConfig.load(DEMO).to_yaml(), run_dir=str(folder), token="", changes=[], cluster=None
    )
    with FolderLock(lock_path(folder, CONTROLLER)) as other:  # it waits for the controller before it
        other.take(0.0, print)
        train: Any = ray.remote(TrainProcess).options(num_cpus=0.1).remote()
        patient: Any = ray.remote(Patient).options(num_cpus=0.1).remote()
        pid = ray.get(train.begin.remote(settings, patient), timeout=120)
        born = process.birth(pid)
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + 20.0
        while process.lives(pid, born) and time.monotonic() < until:
            time.sleep(0.1)
        assert not process.lives(pid, born)
