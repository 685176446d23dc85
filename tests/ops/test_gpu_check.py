"""What is said of a GPU that PyTorch cannot use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ops.gpu_check import why_unusable

TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver."


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A build for CUDA, and a GPU that computes; tests say what is wrong with it."""
    has: dict[str, Any] = {"error": None, "device": "cpu"}

    def init() -> None:
        if has["error"] is not None:
            raise has["error"]

    arange = torch.arange
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch, "arange", lambda count, device: arange(has.get("count", count)))
    return has


def test_a_build_without_cuda_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert why_unusable() == (
        "PyTorch 2.13.0+cpu is a build without CUDA; install one with it, for example by pip install "
        "--force-reinstall torch==2.13.0 from PyPI"
    )


@pytest.mark.parametrize("kind", [RuntimeError, torch.cuda.DeferredCudaCallError])
def test_the_words_of_pytorch_are_kept(gpu: dict[str, Any], kind: type[Exception]) -> None:
    gpu["error"] = kind(f"{TOO_OLD}\nC++ CapturedTraceback: ...")
    assert why_unusable() == f"PyTorch {torch.__version__} of CUDA 13.0 cannot use it: {TOO_OLD.removesuffix('.')}"


def test_a_gpu_has_to_compute_and_rightly(gpu: dict[str, Any]) -> None:
    assert why_unusable() == ""
    gpu["count"] = 1001
    assert "500500 where 499500 is right" in why_unusable()
