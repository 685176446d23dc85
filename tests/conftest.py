"""Defaults of every test: one thread per process, no dashboards, no network, quiet Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # or a late call joins the cluster of another test process
os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")

import hypothesis
import pytest

hypothesis.settings.register_profile("unhurried", deadline=None)  # machines are shared: a slow example is no fault
hypothesis.settings.load_profile("unhurried")


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    """More threads than cores make small matrices slower and timings wild."""
    import torch

    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is no CUDA device."""
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if not wanted:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def _closed_hosts() -> Iterator[None]:
    """Executors that a module's tests made are closed at its end: each holds sockets to all its peers."""
    yield
    if exactness := sys.modules.get("tests.actors.exactness"):
        exactness.close_hosts()
