"""A worker's part of the state comes from where it is: its node's memory, other keepers, a checkpoint, the start."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors import process
from actors.held_state import Origin, Snapshot
from actors.messages import FormTask
from actors.state import checkpoint_files, pulling
from actors.state.keeper import Keeper
from actors.worker.home import Entry, HomeMemory
from ops.memory.lending import borrow
from ops.shards import ARRAYS, Distance, ShardState
from ops.update.state_memory import StateMemory
from tests.actors.fakes import Handle

TOTAL = 300
HERE = (os.getpid(), process.birth(os.getpid()))


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "get", lambda reference: reference)
    monkeypatch.setattr(pulling, "wait", lambda references, timeout: (references, []))


Make = Callable[[], tuple[Keeper, Any]]


@pytest.fixture
def make() -> Iterator[Make]:
    """A keeper, and a handle of it."""
    made: list[Keeper] = []

    def keeper() -> tuple[Keeper, Any]:
        made.append(Keeper())
        one = made[-1]
        return one, Handle(join=one.join, put=one.put, held=one.held, read=one.read)

    yield keeper
    for one in made:
        one.close()


def part(lo: int, hi: int, updates: int = 0, names: tuple[str, ...] = ARRAYS[:3]) -> ShardState:
    """Every element is its place, plus a number for each array and one for the updates."""
    arrays = {
        name: (np.arange(lo, hi) + 1000 * ARRAYS.index(name) + 10_000 * updates).astype(np.float32) for name in names
    }
    distances = distances_after(updates)
    return ShardState(updates=updates, lo=lo, hi=hi, total=TOTAL, arrays=arrays, distances=distances)


def distances_after(updates: int) -> tuple[Distance, ...]:
    return (Distance(d=updates / 3, d_max=updates / 3, numerator=updates / 7),) if updates else ()


def home_memory() -> HomeMemory:
    """One that makes and pulls a little at a time."""
    return HomeMemory(made_elements=70, pulled_elements=40)


def never() -> None:
    return None


def enters(
    home: HomeMemory, keeper: Any, origin: Origin | None, lo: int = 0, hi: int = TOTAL, generation: int = 1
) -> Entry:
    task = FormTask(generation=generation, rank=0, world=1, store=("", 0), origin=origin, home=keeper)
    return home.enter(task, lo, hi, ARRAYS, part, never)


def assert_is(found: ShardState, lo: int, hi: int, updates: int, names: tuple[str, ...] = ARRAYS) -> None:
    assert (found.lo, found.hi, found.updates, tuple(found.arrays)) == (lo, hi, updates, names)
    assert found.distances == distances_after(updates)
    for name, array in part(lo, hi, updates, names).arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)


def holds(keeper: Keeper, home: HomeMemory, lo: int, hi: int, step: int, generation: int = 1) -> Snapshot:
    """A worker there has this part of a step in the next bank; the keeper is not told yet."""
    memory = home._memory
    assert memory is not None
    bank = memory.order.next
    for name, array in memory.arrays(bank, lo, hi).items():
        array[:] = part(lo, hi, step + 1, ARRAYS).arrays[name]
    return Snapshot(
        step=step,
        generation=generation,
        rank=0,
        lo=lo,
        hi=hi,
        total=TOTAL,
        bank=bank,
        names=ARRAYS,
        updates=step + 1,
        distances=distances_after(step + 1),
    )


def test_a_new_run_begins_with_the_first_weights_a_part_at_a_time(make: Make) -> None:
    keeper, handle = make()
    keeper.begin(1, -1, 1, TOTAL, (HERE,))
    asked: list[tuple[int, int]] = []

    def first(lo: int, hi: int) -> ShardState:
        asked.append((lo, hi))
        return part(lo, hi)

    task = FormTask(generation=1, rank=0, world=1, store=("", 0), origin=None, home=handle)
    found = home_memory().enter(task, 0, TOTAL, ARRAYS, first, never)
    assert_is(found.shard, 0, TOTAL, 0, ARRAYS[:3])
    assert asked == [(0, 70), (70, 140), (140, 210), (210, 280), (280, 300)]
    assert (found.made_in, found.banks.current, found.banks.target(never)) == (1, 0, 1)


def test_a_checkpoint_is_read_into_the_nodes_memory(make: Make, tmp_path: Path) -> None:
    keeper, handle = make()
    keeper.begin(1, 8, 1, TOTAL, (HERE,))
    files = [checkpoint_files.write_shard(tmp_path, part(lo, hi, 9, ARRAYS)) for lo, hi in ((0, 100), (100, TOTAL))]
    checkpoint_files.seal(tmp_path, {"step": 8}, [(0, 100), (100, TOTAL)], files)
    found = enters(home_memory(), handle, Origin(step=8, checkpoint=str(tmp_path)), 60, 250)
    assert_is(found.shard, 60, 250, 9)


def test_what_lies_on_the_node_is_taken_as_it_is_and_only_the_rest_is_fetched(make: Make) -> None:
    """The worker of another node has gone: of its range there is a copy, and a part that lies elsewhere."""
    (near, near_handle), (far, far_handle), home = make(), make(), home_memory()
    for keeper in (near, far):
        keeper.begin(1, -1, 1, TOTAL, (HERE,))
    enters(home, near_handle, None, 0, 120)
    there = home_memory()
    enters(there, far_handle, None, 120, TOTAL)
    mine, theirs = holds(near, home, 0, 120, 0), holds(far, there, 120, TOTAL, 0)
    assert near.put([mine]) and far.put([theirs])
    assert far.hold([(mine, near_handle)])  # a copy of the whole, and here of nothing
    for keeper in (near, far):
        keeper.commit(keeper.standing().generation, 0)
        keeper.begin(2, 0, 1, TOTAL, (HERE,))
    near_handle.read.asked.clear()
    origin = Origin(step=0, generation=1, keepers=(near_handle, far_handle))
    found = enters(home, near_handle, origin, 0, TOTAL, generation=2)
    assert_is(found.shard, 0, TOTAL, 1)
    pulled = [(lo, hi) for _, _, lo, hi in far_handle.read.asked]
    assert pulled == [(lo, min(TOTAL, lo + 40)) for lo in range(120, TOTAL, 40)] and not near_handle.read.asked
    place = found.shard.arrays["master"].ctypes.data
    again = enters(home, near_handle, origin, 0, TOTAL, generation=2)
    assert again.shard.arrays["master"].ctypes.data == place, "the same memory, mapped once"
    far_handle.read.asked.clear()
    all_there = home_memory()
    assert_is(enters(all_there, far_handle, origin, 0, TOTAL, generation=2).shard, 0, TOTAL, 1)
    assert not far_handle.read.asked, "its copy is the state now"


def test_a_part_that_nobody_holds_is_named(make: Make) -> None:
    keeper, handle = make()
    keeper.begin(2, 5, 1, TOTAL, (HERE,))
    with pytest.raises(RuntimeError, match=r"\[\(0, 300\)\] of the state after step 5 is held by nobody"):
        enters(home_memory(), handle, Origin(step=5, generation=1, keepers=(handle,)), generation=2)


def test_a_keeper_beyond_a_network_that_fails_is_passed_over(make: Make) -> None:
    """It lives and has the state; another one has the same, and is within reach."""
    keeper, handle = make()
    keeper.begin(1, -1, 1, TOTAL, (HERE,))
    there = home_memory()
    enters(there, handle, None, 0, TOTAL)
    assert keeper.put([holds(keeper, there, 0, TOTAL, 0)])
    near, near_handle = make()
    near.begin(2, 0, 1, TOTAL, (HERE,))

    def beyond(*_: object) -> None:
        raise ray.exceptions.ActorUnavailableError("failed to connect to 10.77.0.2", None)

    beyond_held, beyond_read = Handle(held=beyond), Handle(held=keeper.held, read=beyond)  # cut before, and meanwhile
    origin = Origin(step=0, generation=1, keepers=(beyond_held, beyond_read, handle))
    assert_is(enters(home_memory(), near_handle, origin, 0, TOTAL, generation=2).shard, 0, TOTAL, 1)
    alone = Origin(step=0, generation=1, keepers=(beyond_held,))
    with pytest.raises(RuntimeError, match=r"held by nobody any more \(.*failed to connect to 10.77.0.2"):
        enters(home_memory(), near_handle, alone, 0, TOTAL, generation=2)


def test_the_keeper_is_waited_for_and_the_wait_can_end(make: Make) -> None:
    keeper, handle = make()
    waited = []

    def go_on() -> None:
        waited.append(1)
        if len(waited) == 3:
            keeper.begin(1, -1, 1, TOTAL, (HERE,))
        assert len(waited) < 2000, "patience is over"

    task = FormTask(generation=1, rank=0, world=1, store=("", 0), origin=None, home=handle)
    assert_is(home_memory().enter(task, 0, 10, ARRAYS, part, go_on).shard, 0, 10, 0, ARRAYS[:3])
    task = FormTask(generation=2, rank=0, world=1, store=("", 0), origin=None, home=handle)
    with pytest.raises(AssertionError, match="patience"):
        home_memory().enter(task, 0, 10, ARRAYS, part, go_on)


def test_a_worker_lends_what_it_has_and_says_when_it_has_left(make: Make) -> None:
    keeper, handle = make()
    keeper.begin(1, -1, 1, TOTAL, (HERE,))
    home = home_memory()
    found = enters(home, handle, None)
    assert found.banks.memory.present[0] == 1
    home.leave()
    home.leave()
    assert found.banks.memory.present[0] == 0
    lent = StateMemory(borrow(home.lends))
    assert lent.index == found.banks.memory.index and lent.total == TOTAL
    other, other_handle = make()  # another memory: that of a keeper that has taken over nothing
    other.begin(2, -1, 2, TOTAL, (HERE,))
    enters(home, other_handle, None, generation=2)
    assert StateMemory(borrow(home.lends)).order.generation == 2


def test_a_range_of_no_element_takes_no_part(make: Make) -> None:
    """More workers than the vector has cache lines."""
    keeper, handle = make()
    keeper.begin(1, -1, 1, TOTAL, (HERE,))
    found = enters(home_memory(), handle, None, TOTAL, TOTAL)
    assert (found.shard.lo, found.shard.hi) == (TOTAL, TOTAL)
