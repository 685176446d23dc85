"""Runs the Triton kernels where there is no GPU: interpreted, on CPU tensors, with correct bf16 rounding.

Triton chooses between interpreter and compiler when it is imported, so these files need a process of their own:
`pytest tests/ops/kernels` is one. In a run with other tests (and without a GPU) nothing is collected here, and
`tests/ops/test_kernels_interpreted.py` starts that process.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FOLDER = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Called before collection if the command line names this folder: nothing else asked for means interpreter."""
    asked = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    if DEVICE == "cpu" and "triton" not in sys.modules and all(path.is_relative_to(FOLDER) for path in asked):
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)  # before marks are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU these are tests of a GPU."""
    for item in items:
        if DEVICE == "cuda" and item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.gpu)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    alone = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return None if alone else True


@pytest.fixture(autouse=True, scope="session")
def interpreter():
    if DEVICE == "cpu":
        from ops.kernels.base.interpreter import round_bf16_like_hardware

        round_bf16_like_hardware()


@pytest.fixture(autouse=True)
def triton_kernels(monkeypatch):
    """Every test in this folder runs the Triton kernels, never the library path, on memory that starts as NaN.

    A program takes at least 4 rows and there are up to 5, so that a few rows already cross programs and runs.
    """
    from ops.kernels.base import backend, host

    def refuse(reason: str) -> None:
        raise AssertionError(f"fell back to the library path: {reason}")

    monkeypatch.setattr(backend, "_log_once", refuse)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN
    with backend.forced("triton"), host.dealt(host.RowShares(least=4, interpreted=5)):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device() -> str:
    return DEVICE
