"""Versions of a state in memory of a node: where they lie, what processes of the node see, and which may write
where."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.memory.lending import Lender, borrow
from ops.memory.node_memory import NodeMemory
from ops.shards import ARRAYS
from ops.update.own_state import ShardBanks
from ops.update.state_memory import BANKS, BankOrder, StateMemory
from ops.waiting import Cancelled, GroupError

TOTAL = 5000  # elements: an array ends in the middle of a page


def never() -> None:
    return None


def test_every_element_of_every_bank_has_a_place_of_its_own() -> None:
    memory = StateMemory.reserve(TOTAL)
    for bank in range(BANKS):
        for number, name in enumerate(ARRAYS):
            memory.arrays(bank, 0, TOTAL)[name][:] = 10 * bank + number
    for bank in range(BANKS):
        for number, name in enumerate(ARRAYS):
            part = memory.arrays(bank, 17, TOTAL - 3, (name,))[name]
            assert part.shape == (TOTAL - 20,) and (part == 10 * bank + number).all()
    assert memory.index == b"" and memory.order == BankOrder(generation=0, step=-1, held=0, next=0)


def test_pages_are_taken_by_range_and_given_back_by_range() -> None:
    """Nobody pays for the rest of the flat vector, and what shares a page with what is given back stays."""
    memory = StateMemory.reserve(1 << 20)
    before = memory.taken_bytes
    memory.take(1, 1000, 300_000)
    taken = memory.taken_bytes - before
    count = len(ARRAYS)
    assert count * 4 * 299_000 <= taken <= count * 4 * 299_000 + count * 2 * 4096
    values = memory.arrays(1, 0, 1 << 20)
    for array in values.values():
        array[1000:300_000] = 7.0
    memory.take(1, 1000, 300_000)
    memory.give(1, 100_000, 200_000)
    assert memory.taken_bytes - before <= taken - count * 4 * 100_000 + count * 2 * 4096
    for array in values.values():
        assert (array[1000:100_000] == 7.0).all() and (array[200_000:300_000] == 7.0).all()
        assert (array[101_024:198_976] == 0.0).all()


def test_a_range_that_the_node_has_no_room_for_is_refused_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = NodeMemory.reserve("test", 1 << 30)
    left = [200 << 20]

    def room() -> int:
        return left[0] - memory.taken_bytes

    monkeypatch.setattr("ops.memory.node_memory.node_room", room)
    memory.take("test", 0, 100 << 20)
    memory.take("test", 0, 100 << 20)  # it is there
    with pytest.raises(MemoryError, match=r"no room for 400 MiB of shared memory \(test\), of which a part was taken"):
        memory.take("test", 100 << 20, 500 << 20)
    assert memory.taken_bytes <= 264 << 20, "it ends with the first piece that is too much"
    left[0] = 0
    memory.take("test", 0, 100 << 20)  # nothing more is needed for it


@given(
    st.integers(0, (1 << 24) - 1), st.integers(-1, (1 << 32) - 3), st.integers(0, BANKS - 1), st.integers(0, BANKS - 1)
)
def test_an_order_is_one_number(generation: int, step: int, held: int, following: int) -> None:
    order = BankOrder(generation=generation, step=step, held=held, next=following)
    assert 0 <= order.pack() < 1 << 64 and BankOrder.unpack(order.pack()) == order


def test_whoever_has_the_memory_knows_what_its_keeper_knew_also_if_that_died_while_it_wrote() -> None:
    memory = StateMemory.reserve(TOTAL)
    lender = Lender(memory.memory)
    other = StateMemory(borrow(lender.number))
    for number in range(5):
        memory.index = b"all that is known " * number
        memory.order = BankOrder(generation=3, step=number, held=1, next=0)
        assert other.index == memory.index and other.order.step == number
    kept = memory.index
    halves = [4096, 4096 + (1 << 20)]
    following = next(at for at in halves if not memory.memory.buffer[at + 16 :].startswith(kept))
    memory.memory.buffer[following + 16 : following + 24] = b"\xff" * 8  # its first bytes are there, its head is not
    assert other.index == kept and other.total == TOTAL
    with pytest.raises(ValueError, match="too long"):
        memory.index = bytes(1 << 20)
    lender.close()


def banks_of(memory: StateMemory, generation: int = 3) -> ShardBanks:
    memory.order = BankOrder(generation=generation, step=7, held=1, next=0)
    return ShardBanks(memory, generation)


def test_versions_change_banks_with_every_commit_and_one_that_nobody_counts_on_stays() -> None:
    memory = StateMemory.reserve(TOTAL)
    banks = banks_of(memory)
    assert (banks.current, banks.holds(7)) == (1, True)
    assert banks.target(never) == 0
    banks.written(0)
    assert banks.target(never) == 0, "updated where it is"
    banks.seal(9)
    memory.order = BankOrder(generation=3, step=9, held=0, next=1)
    assert banks.target(never) == 1
    memory.order = BankOrder(generation=3, step=9, held=0, next=0)  # the other bank has a checkpoint
    assert banks.target(never) == 0


def waits(banks: ShardBanks, check: Callable[[], None] = never) -> tuple[threading.Thread, list[int | Exception]]:
    found: list[int | Exception] = []

    def run() -> None:
        try:
            found.append(banks.target(check))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_a_version_that_is_not_safe_yet_is_not_followed_by_another() -> None:
    memory = StateMemory.reserve(TOTAL)
    banks = banks_of(memory)
    banks.written(banks.target(never))
    banks.seal(8)
    thread, found = waits(banks)
    time.sleep(0.05)
    assert thread.is_alive() and not found, "bank 1 still has the only version that is safe"
    memory.order = BankOrder(generation=3, step=8, held=0, next=1)
    thread.join(60)
    assert found == [1]


def test_waiting_ends_with_its_generation() -> None:
    memory = StateMemory.reserve(TOTAL)
    banks = banks_of(memory)
    banks.seal(8)

    def cancelled() -> None:
        raise Cancelled("a worker died")

    thread, found = waits(banks, cancelled)
    thread.join(60)
    assert isinstance(found[0], Cancelled)
    memory.order = BankOrder(generation=4, step=8, held=1, next=0)
    thread, found = waits(banks)
    thread.join(60)
    assert isinstance(found[0], GroupError), "another generation's commit is no leave to write"


def test_a_dead_process_takes_nothing_with_it() -> None:
    memory = StateMemory.reserve(TOTAL)
    child = os.fork()
    if not child:
        memory.arrays(2, 0, TOTAL)["ema"][:] = np.arange(TOTAL)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    np.testing.assert_array_equal(memory.arrays(2, 0, TOTAL)["ema"], np.arange(TOTAL))
