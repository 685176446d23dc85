"""Tensors are counted as an allocator would: when they come, when they go, once each, and up to a limit."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ops.storages import StorageCount, storage_bytes

KIB = 1024


def floats(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB // 4)


def test_the_peak_is_what_lived_at_a_time_and_views_are_no_memory() -> None:
    before = floats(64)
    with StorageCount() as count:
        first = floats(4)
        view = first[10:20].view(5, 2)
        del first
        assert count.live_bytes == 4 * KIB, "a view keeps its storage"
        del view
        assert count.live_bytes == 0
        sums = before + before
        before.add_(1)
        assert count.live_bytes == 64 * KIB, "what was there before does not count, nor what is changed in place"
        del sums
    assert count.peak_bytes == 64 * KIB and count.live_bytes == 0


def test_a_backward_pass_counts_and_a_fake_one_counts_the_same() -> None:
    def peak(mode: StorageCount) -> int:
        torch.manual_seed(0)
        weight = torch.randn(64, 64, requires_grad=True)
        x = torch.randn(256, 64)
        with mode:
            hidden = (x @ weight).relu()
            (hidden @ weight).square().sum().backward()
        return mode.peak_bytes

    real = peak(StorageCount())
    with FakeTensorMode():
        assert peak(StorageCount()) == real
    assert real > 3 * 256 * 64 * 4, "the saved activations are in it"


def test_more_than_the_limit_is_an_out_of_memory_error_and_leaves_nothing() -> None:
    with StorageCount(limit_bytes=10 * KIB) as count:
        held = floats(6)
        with pytest.raises(torch.OutOfMemoryError, match="more"):
            floats(6)
        assert count.live_bytes == 6 * KIB
        del held
        floats(8)


def test_storages_are_counted_once() -> None:
    tensor = floats(4)
    assert storage_bytes([tensor, tensor[3:], floats(1)]) == 5 * KIB
