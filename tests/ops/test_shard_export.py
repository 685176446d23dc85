"""Every way to copy a shard gives what was there when it began."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ops.shard_export import CopyArrays, CopyInThreads, CopyOnStream, PinnedMemory, copies_of, copy_at_once
from ops.shards import ARRAYS
from tests.ops.peers import HostCopies

CPU = torch.device("cpu")


def state_of(size: int, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {name: torch.randn(size, generator=generator).to(device) for name in ARRAYS}


@pytest.mark.parametrize("size", [5, (1 << 20) + 3])
@pytest.mark.parametrize("begin", [copy_at_once, CopyInThreads()], ids=["at once", "in threads"])
def test_copies_are_equal_and_in_memory_of_their_own(begin: CopyArrays, size: int) -> None:
    state = state_of(size, CPU)
    copies = begin(state)
    copies.wait()
    for name, array in state.items():
        np.testing.assert_array_equal(copies.arrays[name], array.numpy())
        assert not np.shares_memory(copies.arrays[name], array.numpy())


def test_a_copy_that_fails_says_so_to_everybody_who_waits() -> None:
    state = state_of(5, CPU)
    state["master"] = torch.empty(5, device="meta")  # nothing to read
    copies = CopyInThreads()
    with pytest.raises(NotImplementedError, match="meta"):
        copies(state).wait()


def test_state_beside_a_gpu_is_copied_in_threads_and_that_of_a_cpu_worker_at_once() -> None:
    assert copies_of(CPU, CPU) is copy_at_once
    assert isinstance(copies_of(torch.device("cuda"), CPU), CopyInThreads)


def test_pinned_memory_is_as_large_as_its_array_and_used_again_when_nobody_reads_it() -> None:
    """PyTorch would pin 128 MiB for each of these arrays, and keep them."""
    array, device = torch.empty((64 << 20) // 4 + 1), HostCopies()
    memory = PinnedMemory(device)
    first, second = memory.like(array), memory.like(array)
    assert first.nbytes == array.nbytes and torch.from_numpy(first).untyped_storage().nbytes() == array.nbytes
    places = [first.ctypes.data, second.ctypes.data]
    assert device.pinned == places and not np.shares_memory(first, second)
    part = first[5:]
    del first
    third = memory.like(array)
    assert third.ctypes.data not in places, "a part of the first is still held"
    del part
    again = memory.like(array)
    assert again.ctypes.data == places[0] and len(device.pinned) == 3
    del again, third
    larger = memory.like(torch.empty(len(array) + 1))  # the shard of another generation
    assert device.pinned == [places[1], larger.ctypes.data] and second.ctypes.data == places[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_stream_of_its_own_reads_what_was_queued_before_and_nothing_after() -> None:
    """Changed after `wait`, as by the next update, while the device is busy all along."""
    device = torch.device("cuda")
    begin, state = CopyOnStream(device), state_of(1 << 24, device)
    busy = torch.randn(4096, 4096, device=device)
    for _ in range(3):
        for _ in range(20):
            busy = torch.mm(busy, busy).clamp_(-1, 1)
        state["master"].add_(1.0)
        copies = begin(state)
        wanted = {name: array.clone() for name, array in state.items()}
        copies.wait()
        for array in state.values():
            array.zero_()
        for name, array in wanted.items():
            np.testing.assert_array_equal(copies.arrays[name], array.cpu().numpy())
            state[name].copy_(array)
