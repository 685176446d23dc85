"""Every way to copy a shard gives what was there when it began."""

from __future__ import annotations

import pytest
import torch

from ops.shards import ARRAYS
from ops.update.shard_export import CopyAtOnce, CopyOnStream, PinnedTargets, copies_of
from ops.update.state_memory import StateMemory
from tests.ops.peers import HostCopies

CPU = torch.device("cpu")


def state_of(size: int, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {name: torch.randn(size, generator=generator).to(device) for name in ARRAYS}


def bank_of(memory: StateMemory, bank: int) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in memory.arrays(bank, 3, memory.total).items()}


def test_a_copy_is_equal_and_in_the_bank_that_was_named() -> None:
    memory, state = StateMemory.reserve(1003), state_of(1000, CPU)
    CopyAtOnce()(state, bank_of(memory, 1))()
    for bank in range(3):
        for name, array in bank_of(memory, bank).items():
            assert torch.equal(array, state[name] if bank == 1 else torch.zeros(1000))


def test_state_in_host_memory_is_not_copied_at_all() -> None:
    assert copies_of(CPU) is None
    assert isinstance(copies_of(torch.device("meta")), CopyAtOnce)


def test_a_device_is_told_of_a_bank_once_and_forgets_it_with_the_generation() -> None:
    memory, device = StateMemory.reserve(100), HostCopies()
    targets = PinnedTargets(device)
    for bank in (0, 1, 0, 1):
        targets.pin(bank_of(memory, bank).values())
    addresses = [array.data_ptr() for bank in (0, 1) for array in bank_of(memory, bank).values()]
    assert device.pinned == addresses
    targets.release()
    targets.release()
    assert device.pinned == []
    targets.pin([bank_of(memory, 1)["ema"], torch.empty(0)])  # a generation later; a worker without a range
    assert device.pinned == [bank_of(memory, 1)["ema"].data_ptr()]


@pytest.mark.parametrize("banks", [(0, 2, 0, 1), (2, 0, 0), (1, 2, 1, 0)])
def test_a_device_forgets_a_bank_that_was_used_for_a_checkpoint_before_its_pages_are_given_back(
    banks: tuple[int, ...],
) -> None:
    """Else it would go on to write into pages that are the bank's no more."""
    memory, device = StateMemory.reserve(100), HostCopies()
    targets = PinnedTargets(device)
    for bank in banks:
        targets.pin(bank_of(memory, bank).values())
    spare = {array.data_ptr() for array in bank_of(memory, 2).values()}
    assert not spare & set(device.pinned) and len(device.pinned) == len(ARRAYS) * len(set(banks[-2:]))
    targets.pin(bank_of(memory, 2).values())
    assert spare <= set(device.pinned), "the device learns of it anew"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_stream_of_its_own_reads_what_was_queued_before_and_nothing_after() -> None:
    """Changed after `wait`, as by the next update, while the device is busy all along."""
    device, memory = torch.device("cuda"), StateMemory.reserve((1 << 24) + 3)
    begin, state = CopyOnStream(device), state_of(1 << 24, device)
    busy = torch.randn(4096, 4096, device=device)
    for turn in range(3):
        for _ in range(20):
            busy = torch.mm(busy, busy).clamp_(-1, 1)
        state["master"].add_(1.0)
        into = bank_of(memory, turn % 2)
        wait = begin(state, into)
        wanted = {name: array.clone() for name, array in state.items()}
        wait()
        for array in state.values():
            array.zero_()
        for name, array in wanted.items():
            assert torch.equal(into[name], array.cpu())
            state[name].copy_(array)
    begin.release()
