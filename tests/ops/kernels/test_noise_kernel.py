"""The kernel's numbers are the CPU's."""

from __future__ import annotations

import pytest
import torch

from ops.flow.noise import NoiseKey, _numbers
from ops.flow.noise_kernel import fill

from .conftest import DEVICE


@pytest.mark.parametrize(("start", "blocks"), [(0, 1), (0, 128), (5, 300), (2**40 + 1, 3)])
@pytest.mark.parametrize("sample", ["a", "b", "c"])
def test_the_kernel_gives_the_numbers_of_the_cpu(start: int, blocks: int, sample: str) -> None:
    key = NoiseKey.of(1, 2, sample)
    found, expected = (
        fill(key.low, key.high, start, blocks, torch.device(DEVICE)).cpu(),
        torch.from_numpy(_numbers(key, start, blocks)),
    )
    differs = (found != expected).sum().item()
    assert differs <= 1 and torch.allclose(found, expected, rtol=2e-7, atol=0), f"{differs} of {expected.numel()}"


def test_no_numbers_are_no_launch() -> None:
    assert fill(0, 0, 0, 0, torch.device(DEVICE)).shape == (0,)
