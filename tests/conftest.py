"""Defaults of every test: one thread per process, no dashboards, no network, quiet Ray."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # or a late call joins the cluster of another test process
os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # as Heddle starts it
os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15 its workers starve beside tests that compute

import pytest

if importlib.util.find_spec("hypothesis"):  # tests of a GPU run without it
    import hypothesis

    # Machines are shared: slow is no fault. The same examples each time, so that a change elsewhere does not meet a new
    # one; `--hypothesis-profile explore` looks for others.
    unhurried = hypothesis.settings(
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
    )
    hypothesis.settings.register_profile("explore", unhurried)
    hypothesis.settings.register_profile("unhurried", unhurried, derandomize=True)
    hypothesis.settings.load_profile("unhurried")

GPU_MARK = "mark.gpu"
LONGEST = (  # minutes each, begun first, so that no process of the test run ends alone
    "app/test_train.py",  # waits for Ray, as others below; what computes stands between, for the other process
    "ops/test_kernels_interpreted.py",
    "actors/test_exactness.py",
    "blackbox/test_blackbox.py",
    "ops/test_sync.py",
    "app/test_bench_gpu_rehearsal.py",
    "ops/test_forecast.py",
    "ops/test_fused_dispatch.py",
    "ops/test_node_gradients.py",
    "app/test_spread.py",
    "app/test_bench_gpu.py",
    "ops/test_comm.py",
    "data/engines/test_ray_data.py",
    "app/test_memory_view.py",
    "actors/test_changing_plans.py",
    "ops/test_weights.py",
    "actors/test_ends.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What importing all test files makes is not looked at for garbage, neither meanwhile (10 s of 36) nor later (0.5 s
    of each `gc.collect`, which products call to give memory back)."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _keep_what_there_is()


def _keep_what_there_is() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _kept_modules() -> None:
    """What the tests before imported is not looked at for garbage either, and what they dropped is gone."""
    _keep_what_there_is()


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    """More threads than cores make small matrices slower and timings wild."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Tensors that a test draws without a seed are the same whatever ran before it, and in whichever process."""
    import torch

    torch.default_generator.manual_seed(0)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`pytest -m gpu` opens the files that have such tests only: the others import packages that they do not need."""
    if config.option.markexpr != "gpu":
        return None
    files = collection_path.rglob("*.py") if collection_path.is_dir() else [collection_path]
    return None if any(_has_gpu_tests(file) for file in files) else True


def _has_gpu_tests(file: Path) -> bool:
    """A test file that names the mark, or one of a folder whose conftest.py gives it to all."""
    if not file.name.startswith("test_"):
        return False
    folder = file.parent / "conftest.py"
    by_folder = folder.is_file() and folder != Path(__file__) and GPU_MARK in folder.read_text(encoding="utf-8")
    return by_folder or GPU_MARK in file.read_text(encoding="utf-8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first; tests marked `gpu` are skipped where there is no CUDA device."""
    rank = {Path(__file__).parent / name: n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if not wanted:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _same_log_levels() -> Iterator[None]:
    """What a command under test does to the loggers ends with its test: later ones read what is said."""
    loggers = [logging.getLogger(name) for name in ("actors", "app", "data", "ops")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True, scope="module")
def _closed_hosts() -> Iterator[None]:
    """Executors that a module's tests made are closed at its end: each holds sockets to all its peers."""
    yield
    if exactness := sys.modules.get("tests.actors.exactness"):
        exactness.close_hosts()


@pytest.fixture
def not_under_nohup() -> Iterator[None]:
    """SIGHUP does what it does by default, also where the tests run under nohup, which has it ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
