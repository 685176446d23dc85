"""Whoever computes on a GPU of its own sees that one alone, and has the allocator of the run's workers.

On clusters of frameworks that choose GPUs themselves every process sees all, and would compute on the first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.config import WorkersConfig
from actors.pool import device
from actors.pool.own_gpu import own_gpu
from actors.pool.room import Need
from actors.pool.workers import worker_environment
from app.caching import fill
from app.caching.fill import plans_of
from app.check import looks
from app.device import over_nodes
from app.kept.wanted import KindAccount, WantedEntry
from app.sampling import crew
from app.sampling.clip_worker import ClipWorker
from app.sampling.crew import ClipCrew
from app.sampling.live import LiveSamples
from tests.app.test_live_samples import samples

VARIABLES = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
NODE: Any = {"NodeID": "a" * 56}
FOUND: Any = SimpleNamespace(
    kinds={"text": KindAccount(missing=[WantedEntry(kind="text", key="00", num_bytes=1, caption="a circle")])}
)


class AskedError(Exception):
    """What Ray would have been asked for."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options


class Asked:
    """Stands for an actor or a task that Ray is asked for, and is not started."""

    def options(self, **options: Any) -> SimpleNamespace:
        def remote(*arguments: object) -> None:
            raise AskedError(options)

        return SimpleNamespace(remote=remote)


def look_at_a_gpu(gpus: int, folder: Path) -> None:
    list(device._looks("H100", gpus, 1.0))


def check_a_node(gpus: int, folder: Path) -> None:
    looks._started(NODE, ExitStack(), gpus=gpus)


def profile_over_nodes(gpus: int, folder: Path) -> None:
    over_nodes._actor_on(over_nodes.HandoffEnd, NODE["NodeID"], 1.0, "cuda" if gpus else "cpu")


def fill_a_cache(gpus: int, folder: Path) -> None:
    job: Any = SimpleNamespace(workers=WorkersConfig())
    list(fill.fill(job, FOUND, len(plans_of(FOUND)), threads=1, need=Need(1.0, float(gpus)), tell=print))


def make_samples(gpus: int, folder: Path) -> None:
    live: LiveSamples = samples(folder, 40, f"workers.device={'cuda' if gpus else 'cpu'}")
    live._start_task()


@dataclass
class Job:
    device: str


def spread_samples(gpus: int, folder: Path) -> None:
    job: Any = Job("cuda" if gpus else "cpu")
    ClipCrew(job, ClipWorker, 1)


@pytest.mark.parametrize(
    ("start", "gpus"),
    [
        (look_at_a_gpu, 1),
        *[
            (start, gpus)
            for start in (check_a_node, profile_over_nodes, fill_a_cache, make_samples, spread_samples)
            for gpus in (0, 1)
        ],
    ],
)
def test_each_that_computes_on_a_gpu_sees_its_own_alone(
    start: Callable[[int, Path], None], gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (device, looks, over_nodes, fill, crew):
        monkeypatch.setattr(module, "remote_of", lambda plain: Asked())
    monkeypatch.setattr(ray, "remote", lambda plain: Asked())
    monkeypatch.setattr(crew, "resources", lambda free: {"GPU": 1.0, "CPU": 1.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"GPU": 1.0})
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(AskedError) as asked:
        start(gpus, tmp_path)
    options = asked.value.options
    assert options["num_gpus"] == gpus
    assert options.get("runtime_env") == ({"env_vars": VARIABLES} if gpus else None)


def test_what_the_user_has_set_of_the_allocator_is_inherited() -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert "PYTORCH_ALLOC_CONF" not in own_gpu(1, {name: "x"})["runtime_env"]["env_vars"]
    assert worker_environment(1, {}, cuda=True).items() >= VARIABLES.items(), "as the run's workers"
