"""Keepers: workers of their node write into their memory, others are copied, and together they know what can be
recovered. A keeper that dies leaves all of it to the next one."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors import process
from actors.held_state import HeldShard, Snapshot
from actors.state import checkpoint_files, pulling
from actors.state.keeper import Keeper, VersionLost, described, end_all, forecast_bytes, known_by, place
from actors.state.recovery import newest_whole
from ops.memory.lending import borrow
from ops.memory.node_room import node_room, shared_room
from ops.shards import ARRAYS, ShardState, shard_bounds
from ops.update.state_memory import StateMemory
from tests.actors.fakes import Handle

TOTAL = 1000
HERE = (os.getpid(), process.birth(os.getpid()))


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "get", lambda reference: reference)
    monkeypatch.setattr(pulling, "wait", lambda references, timeout: (references, []))


@pytest.fixture
def keepers() -> Iterator[Callable[..., Keeper]]:
    made: list[Keeper] = []

    def make(**parts: Any) -> Keeper:
        made.append(Keeper(**parts))
        return made[-1]

    yield make
    for keeper in made:
        keeper.close()


def handle(keeper: Keeper) -> Any:
    """The keeper as another one knows it."""
    return Handle(read=keeper.read, held=keeper.held)


class Writing:
    """A worker of a keeper's node with a range of the state."""

    def __init__(self, keeper: Keeper, lo: int = 0, hi: int = TOTAL, generation: int = 1, rank: int = 0) -> None:
        joined = keeper.join(generation, HERE[0], lo, hi)
        assert joined is not None
        self.keeper, self.lo, self.hi, self.generation, self.rank = keeper, lo, hi, generation, rank
        self.joined, self.memory = joined, StateMemory(borrow(joined.number))

    def finish(self, step: int, value: float | None = None) -> Snapshot:
        """Write the next version, without a word to the keeper."""
        bank = self.memory.order.next
        for array in self.memory.arrays(bank, self.lo, self.hi).values():
            array[:] = step if value is None else value
        return Snapshot(
            step=step,
            generation=self.generation,
            rank=self.rank,
            lo=self.lo,
            hi=self.hi,
            total=TOTAL,
            bank=bank,
            names=ARRAYS,
            updates=step + 1,
        )


def begun(keeper: Keeper, generation: int = 1, step: int = -1, made_in: int = 1) -> Keeper:
    keeper.begin(generation, step, made_in, TOTAL, (HERE,))
    return keeper


def commits(keeper: Keeper, writing: Sequence[Writing], steps: Sequence[int]) -> None:
    for step in steps:
        assert keeper.put([one.finish(step) for one in writing])
        keeper.commit(keeper.standing().generation, step, {"at": step})


def values(shard: ShardState | None) -> set[float]:
    assert shard is not None and set(shard.arrays) == set(ARRAYS)
    return {float(value) for array in shard.arrays.values() for value in np.unique(array)}


def held(keeper: Keeper) -> list[tuple[int, int, int]]:
    return [(one.step, one.lo, one.hi) for one in keeper.inventory()]


def test_what_a_worker_has_written_is_held_without_a_copy(keepers: Callable[..., Keeper]) -> None:
    keeper = begun(keepers())
    worker = Writing(keeper)
    commits(keeper, [worker], range(3))
    shard = keeper.read(2, 1, 0, TOTAL)
    assert values(shard) == {2.0} and shard is not None and shard.updates == 3
    worker.memory.arrays(worker.memory.order.held, 0, TOTAL)["master"][:] = 7  # what no worker does
    assert shard.arrays["master"][0] == 7, "the same memory"
    assert held(keeper) == [(2, 0, TOTAL)] and keeper.standing().position == (2, {"at": 2})


def test_a_keeper_whose_memory_cannot_be_made_says_so_to_whoever_needs_it(
    keepers: Callable[..., Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes the answer of `begin`: workers waited for half an hour for a generation that never began there."""
    keeper = keepers()
    with monkeypatch.context() as limited:

        def reserve(total: int) -> StateMemory:
            raise OSError(errno.EFBIG, "File too large")

        limited.setattr(StateMemory, "reserve", reserve)
        begun(keeper)
    with pytest.raises(RuntimeError, match=r"cannot make the memory of the state, of 1000 .*File too large.*ulimit"):
        keeper.join(1, HERE[0], 0, TOTAL)
    assert keeper.join(2, HERE[0], 0, TOTAL) is None, "that generation has not begun"
    copied = Writing(begun(keepers())).finish(0)
    with pytest.raises(MemoryError, match="File too large"):
        keeper.hold([(copied, handle(keeper))])
    keeper.commit(1, 0, {"at": 0})
    assert held(keeper) == [] and keeper.standing().committed == -1
    commits(keeper, [Writing(begun(keeper))], [0])
    assert held(keeper) == [(0, 0, TOTAL)], "the next begin tries again, also that of a repair"


def test_memory_stays_flat_over_many_steps_and_is_two_versions(keepers: Callable[..., Keeper]) -> None:
    keeper = begun(keepers())
    workers = [Writing(keeper, lo, hi, rank=rank) for rank, (lo, hi) in enumerate(shard_bounds(TOTAL, 3))]
    used = []
    for step in range(20):
        commits(keeper, workers, [step])
        used.append(keeper.used_bytes())
    pages = len(ARRAYS) * -(-TOTAL * 4 // 4096) * 4096
    assert len(set(used[2:])) == 1 and 2 * pages <= used[-1] < 3 * pages


def test_what_an_earlier_controller_has_sent_is_refused_once_another_has_asked_how_far_the_run_is(
    keepers: Callable[..., Keeper],
) -> None:
    """Its last commit, late from a host that was cut off, would let go of the version that the other goes on from."""
    keeper = begun(keepers())
    worker = Writing(keeper)
    commits(keeper, [worker], range(2))
    assert keeper.put([worker.finish(2)])
    standing = keeper.take_over()
    keeper.commit(1, 2)
    assert (standing.committed, standing.generation) == (1, 2) == (keeper.standing().committed, 2)
    assert newest_whole([one for one in keeper.inventory() if one.step <= 1]) == (1, 1)
    assert keeper.join(1, HERE[0], 0, TOTAL) is None, "workers of the earlier controller are refused, too"
    keeper.begin(3, 1, 1, TOTAL, (HERE,))
    assert Writing(keeper, generation=3).joined.made_in == 1 and held(keeper) == [(1, 0, TOTAL)]


def test_a_step_is_held_when_all_of_it_was_put_and_late_messages_of_a_dead_generation_are_refused(
    keepers: Callable[..., Keeper],
) -> None:
    keeper = begun(keepers())
    first, second = Writing(keeper, 0, 500), Writing(keeper, 500, TOTAL)
    commits(keeper, [first, second], [0])
    late = second.finish(1)
    keeper.put([first.finish(1)])
    assert newest_whole(keeper.inventory()) == (0, 1)
    keeper.begin(2, 0, 1, TOTAL, (HERE,))
    assert not keeper.put([late]) and held(keeper) == [(0, 0, 500), (0, 500, TOTAL)]
    again = Writing(keeper, 0, TOTAL, generation=2)
    assert set(again.joined.ranges) == {(0, 500), (500, TOTAL)} and again.joined.made_in == 1
    assert keeper.put([again.finish(1)]) and newest_whole(keeper.inventory()) == (1, 2)
    keeper.begin(1, -1, 1, TOTAL, (HERE,))  # a message that was held up
    assert keeper.standing().generation == 2 and newest_whole(keeper.inventory()) == (1, 2)


def test_a_worker_that_comes_before_its_generation_waits_for_it(keepers: Callable[..., Keeper]) -> None:
    keeper = keepers()
    assert keeper.join(1, HERE[0], 0, TOTAL) is None
    begun(keeper)
    assert keeper.join(2, HERE[0], 0, TOTAL) is None and keeper.join(1, HERE[0], 0, TOTAL) is not None


def test_a_restarted_controller_learns_what_is_committed_and_where_the_data_stands(
    keepers: Callable[..., Keeper],
) -> None:
    keeper = begun(keepers(), generation=4, step=7)
    assert (keeper.standing().committed, keeper.standing().generation) == (7, 4)
    worker = Writing(keeper, generation=4)
    commits(keeper, [worker], [8, 9])
    assert (keeper.standing().committed, keeper.standing().position) == (9, (9, {"at": 9}))
    keeper.begin(5, 9, 4, TOTAL, (HERE,))
    assert (keeper.standing().generation, keeper.standing().position) == (5, (9, {"at": 9}))
    keeper.begin(6, 8, 4, TOTAL, (HERE,))
    assert keeper.standing().position is None, "it goes back with the training state"


# -- copies ------------------------------------------------------------------------------------------------------------


def test_a_copy_is_the_keepers_own_and_comes_in_pieces(keepers: Callable[..., Keeper]) -> None:
    home, other = begun(keepers()), begun(keepers(piece_elements=64))
    worker = Writing(home, 100, 700)
    sent, source = worker.finish(0), handle(home)
    home.put([sent])
    assert other.hold([(sent, source)]) and held(other) == [(0, 100, 700)]
    assert [(a, b) for _, _, a, b in source.read.asked] == [(lo, min(700, lo + 64)) for lo in range(100, 700, 64)]
    for array in worker.memory.arrays(sent.bank, 100, 700).values():
        array[:] = -1
    assert values(other.read(0, 1, 100, 700)) == {0.0}
    assert other.read(0, 1, 90, 110) is None and other.read(0, 1, 150, 160) is not None


def holding(other: Keeper, sent: Snapshot, home: Keeper, answers: list[bool]) -> threading.Thread:
    """A thread of the other keeper that copies a shard."""
    thread = threading.Thread(target=lambda: answers.append(other.hold([(sent, handle(home))])))
    thread.start()
    return thread


def test_a_copy_waits_until_its_source_knows_of_the_shard_and_until_the_last_step_is_committed(
    keepers: Callable[..., Keeper],
) -> None:
    home, other = begun(keepers()), begun(keepers())
    worker = Writing(home)
    for step, first in ((0, home), (1, other)):  # the home hears of it late; then the other one of the commit before
        sent = worker.finish(step)
        answers: list[bool] = []
        thread = holding(other, sent, home, answers)
        if first is other:
            home.put([sent])
        time.sleep(0.1)
        assert thread.is_alive() and (step, 0, TOTAL) not in held(other)
        if first is home:
            home.put([sent])
            thread.join(60)
            home.commit(home.standing().generation, 0)
        else:
            other.commit(other.standing().generation, 0)
            thread.join(60)
        assert answers == [True] and values(other.read(step, 1, 0, TOTAL)) == {float(step)}


def test_a_copy_of_what_is_over_ends(keepers: Callable[..., Keeper]) -> None:
    home, other = begun(keepers()), begun(keepers())
    sent = Writing(home).finish(0)
    answers: list[bool] = []
    thread = holding(other, sent, home, answers)
    time.sleep(0.05)
    other.begin(2, -1, 1, TOTAL, (HERE,))
    thread.join(60)
    assert answers == [False] and not any(lo < hi for _, lo, hi in held(other))


def test_a_shard_that_its_source_lets_go_of_meanwhile_is_not_held(keepers: Callable[..., Keeper]) -> None:
    """What was read may have been written over."""
    home, other = begun(keepers()), begun(keepers())
    worker = Writing(home)
    sent = worker.finish(0)
    home.put([sent])
    read = home.read

    def read_late(*asked: Any) -> ShardState | None:
        found = read(*asked)
        home.begin(2, -1, 1, TOTAL, (HERE,))
        other.begin(2, -1, 1, TOTAL, (HERE,))
        return found

    assert not other.hold([(sent, Handle(read=read_late, held=home.held))])
    assert other.inventory() == []


def test_no_late_piece_of_a_copy_lies_over_what_the_next_generation_writes(
    keepers: Callable[..., Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The piece has come, and the generation begins before it is put in place."""
    home, other = begun(keepers()), begun(keepers())
    sent = Writing(home).finish(0, value=5)
    home.put([sent])

    def get(reference: Any) -> Any:
        if isinstance(reference, ShardState) and other.standing().generation == 1:
            other.begin(2, -1, 1, TOTAL, (HERE,))
            assert other.put([Writing(other, generation=2).finish(0, value=7)])
        return reference

    monkeypatch.setattr(pulling, "get", get)
    assert not other.hold([(sent, handle(home))])
    assert values(other.read(0, 2, 0, TOTAL)) == {7.0}


def test_a_copy_that_is_already_there_is_not_made_again(keepers: Callable[..., Keeper]) -> None:
    home, other = begun(keepers()), begun(keepers())
    sent = Writing(home).finish(0)
    home.put([sent])
    source = handle(home)
    assert other.hold([(sent, source)]) and other.hold([(sent, source)]) and len(source.read.asked) == 1


def test_a_node_without_room_refuses_a_large_shard_by_name(
    keepers: Callable[..., Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    total = (80 << 20) // 16
    monkeypatch.setattr("ops.memory.node_memory.node_room", lambda: -1)
    keeper = keepers(room=lambda: 1 << 20)
    keeper.begin(1, -1, 1, total)
    huge = Snapshot(step=0, generation=1, rank=0, lo=0, hi=total, total=total, bank=1, names=ARRAYS, updates=1)
    with pytest.raises(MemoryError, match=r"can spare 1 MiB.*snapshot\.copies"):
        keeper.hold([(huge, handle(keeper))])
    assert keeper.room()[1] == keeper.used_bytes() + (1 << 20)


# -- deaths ------------------------------------------------------------------------------------------------------------


def test_the_keeper_after_one_that_died_knows_as_much_and_nothing_was_copied(keepers: Callable[..., Keeper]) -> None:
    dead = begun(keepers())
    worker = Writing(dead)
    commits(dead, [worker], range(4))
    dead.put([worker.finish(4)])
    lends = Lending(worker.memory)
    before, place_of = dead.inventory(), worker.memory.arrays(0, 0, TOTAL)["ema"].ctypes.data
    dead.close()
    keeper = keepers()
    assert not keeper.adopt([1]) and keeper.adopt([1, lends.number])
    assert keeper.inventory() == before and keeper.standing() == dead.standing()
    keeper.commit(keeper.standing().generation, 4)
    assert worker.memory.order.step == 4, "the worker that waits for it sees the commit"
    commits(keeper, [worker], [5, 6])
    assert values(keeper.read(6, 1, 0, TOTAL)) == {6.0}
    assert worker.memory.arrays(0, 0, TOTAL)["ema"].ctypes.data == place_of
    lends.close()


def test_a_position_that_is_too_long_for_the_nodes_memory_holds_no_commit_up(keepers: Callable[..., Keeper]) -> None:
    """Workers waited for an order that never came, and those of the next generation could not join."""
    dead, position = begun(keepers()), {"resized": "x" * (1 << 20)}
    worker = Writing(dead)
    for step in range(2):
        assert dead.put([worker.finish(step)])
        dead.commit(1, step, position)
        assert worker.memory.order.step == step
    lends = Lending(worker.memory)
    assert dead.standing().position == (1, position)
    dead.begin(2, 1, 1, TOTAL, (HERE,))
    again = Writing(dead, generation=2)
    dead.close()
    keeper = keepers()
    assert keeper.adopt([lends.number]) and keeper.inventory() == dead.inventory()
    assert (keeper.standing().committed, keeper.standing().position) == (1, None)
    commits(keeper, [again], [2])
    assert keeper.standing().position == (2, {"at": 2}) == known_by(worker.memory.index)[1].position
    lends.close()


def test_a_keeper_that_was_only_silent_is_ended_before_another_one_takes_its_memory(
    keepers: Callable[..., Keeper],
) -> None:
    silent = begun(keepers())
    worker = Writing(silent)
    commits(silent, [worker], range(3))
    lends = Lending(worker.memory)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        _, book, members = known_by(worker.memory.index)
        worker.memory.index = described((other.pid, process.birth(other.pid)), book, members)
        keeper = keepers()
        has_adopted, ended = keeper.adopt([lends.number]), other.poll()
        other.kill()
    assert has_adopted and ended == -signal.SIGKILL
    assert known_by(worker.memory.index)[0] == HERE and keeper.inventory() == silent.inventory()
    lends.close()


def test_a_model_of_another_size_does_not_enter_the_memory_of_a_run(keepers: Callable[..., Keeper]) -> None:
    keeper = begun(keepers())
    commits(keeper, [Writing(keeper)], [0])
    keeper.begin(2, 0, 1, TOTAL + 1, (HERE,))
    with pytest.raises(RuntimeError, match=r"the state of 1000 parameters, the model has 1001; use the run's own"):
        keeper.join(2, HERE[0], 0, TOTAL + 1)
    assert newest_whole(keeper.inventory()) == (0, 1)


class Lending:
    """A worker that lends what it has mapped."""

    def __init__(self, memory: StateMemory) -> None:
        from ops.memory.lending import Lender

        self._lender = Lender(memory.memory)
        self.number, self.close = self._lender.number, self._lender.close


def test_who_has_not_left_a_generation_is_ended_before_the_next_one_writes(keepers: Callable[..., Keeper]) -> None:
    keeper = keepers()
    sleeping = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(3)]
    stuck, left, stays = [(one.pid, process.birth(one.pid)) for one in sleeping]
    keeper.begin(1, -1, 1, TOTAL, (stuck, left, stays))
    for pid, _ in (stuck, left, stays):
        joined = keeper.join(1, pid, 0, 10)
    assert joined is not None
    StateMemory(borrow(joined.number)).present[1] = 0  # it has left, and may do what it likes
    keeper.begin(2, -1, 1, TOTAL, (stays,))
    assert [process.lives(*one) for one in (stuck, left, stays)] == [False, True, True]
    assert end_all([(HERE[0], "another birth")]) == "", "its number is somebody else's now"
    for one in sleeping:
        one.kill()
        one.wait()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_written_while_the_run_goes_on(keepers: Callable[..., Keeper], tmp_path: Path) -> None:
    keeper = begun(keepers())
    workers = [Writing(keeper, lo, hi, rank=rank) for rank, (lo, hi) in enumerate(shard_bounds(TOTAL, 2))]
    keeper.put([one.finish(0) for one in workers])
    keeper.commit(keeper.standing().generation, 0, None, [0])
    for step in (1, 2, 3):
        keeper.put([one.finish(step) for one in workers])
        keeper.commit(keeper.standing().generation, step, None, [0])
    written = keeper.write(str(tmp_path), 0, 1, [(0, 600), (600, TOTAL)])
    files = [checkpoint_files.File(name=one.name, size=one.size, crc32=one.crc32) for one in written]
    checkpoint_files.seal(tmp_path, {"step": 0}, [(0, 600), (600, TOTAL)], files)
    _, shards = checkpoint_files.load(tmp_path)
    assert [(one.lo, one.hi, one.updates) for one in shards] == [(0, 600, 1), (600, TOTAL, 1)]
    assert all(values(one) == {0.0} for one in shards)
    keeper.put([one.finish(4) for one in workers])
    keeper.commit(keeper.standing().generation, 4)
    assert [one.step for one in keeper.inventory()] == [4, 4]


def test_four_files_are_written_at_a_time(
    keepers: Callable[..., Keeper], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = begun(keepers())
    commits(keeper, [Writing(keeper)], [0])
    write, together = checkpoint_files.write_shard, threading.Barrier(4)

    def meeting(folder: Path, shard: ShardState) -> checkpoint_files.File:
        together.wait(timeout=60)  # for as many as may write
        return write(folder, shard)

    monkeypatch.setattr("actors.state.keeper.write_shard", meeting)
    bounds = shard_bounds(TOTAL, 8)
    written = keeper.write(str(tmp_path), 0, 1, bounds)
    assert [(one.lo, one.hi) for one in written] == bounds


def test_when_a_file_cannot_be_written_those_beside_it_have_ended_and_no_other_begins(
    keepers: Callable[..., Keeper], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = begun(keepers())
    commits(keeper, [Writing(keeper)], [0])
    failed, ended = threading.Event(), []

    def write(folder: Path, shard: ShardState) -> checkpoint_files.File:
        if shard.lo == 0:
            failed.set()
            raise OSError(28, "No space left on device")
        assert failed.wait(60)
        time.sleep(0.2)  # the folder must still be there
        ended.append(shard.lo)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("actors.state.keeper.write_shard", write)
    with pytest.raises(OSError, match="No space left"):
        keeper.write(str(tmp_path), 0, 1, shard_bounds(TOTAL, 20))
    seen = len(ended)
    assert 3 <= seen < 19, "the others that had begun"
    time.sleep(0.5)
    assert len(ended) == seen


def test_a_version_that_goes_while_it_is_written_is_no_checkpoint(
    keepers: Callable[..., Keeper], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = begun(keepers())
    commits(keeper, [Writing(keeper)], [0])
    write = checkpoint_files.write_shard

    def slow(folder: Path, shard: ShardState) -> checkpoint_files.File:
        keeper.begin(2, -1, 1, TOTAL, (HERE,))
        return write(folder, shard)

    monkeypatch.setattr("actors.state.keeper.write_shard", slow)
    with pytest.raises(VersionLost, match="has let go of step 0"):
        keeper.write(str(tmp_path), 0, 1, [(0, TOTAL)])
    with pytest.raises(VersionLost):
        keeper.write(str(tmp_path), 0, 1, [(0, TOTAL)])


def test_pages_that_nobody_needs_are_given_back(keepers: Callable[..., Keeper]) -> None:
    total = 1 << 20
    keeper = keepers()
    keeper.begin(1, -1, 1, total, (HERE,))
    joined = keeper.join(1, HERE[0], 0, total)
    assert joined is not None
    memory = StateMemory(borrow(joined.number))

    def step(number: int, lo: int, hi: int, pinned: Sequence[int] = ()) -> None:
        bank, generation = memory.order.next, memory.order.generation
        for array in memory.arrays(bank, lo, hi).values():
            array[:] = number
        one = Snapshot(
            step=number, generation=generation, rank=0, lo=lo, hi=hi, total=total, bank=bank, names=ARRAYS, updates=1
        )
        assert keeper.put([one])
        keeper.commit(keeper.standing().generation, number, None, pinned)

    bank_bytes = 4 * len(ARRAYS) * total
    for number in range(3):
        step(number, 0, total, [0])
    assert keeper.used_bytes() > 2.9 * bank_bytes, "one more while a checkpoint is written"
    for number in (3, 4, 5, 6):
        step(number, 0, total)
    assert eventually(lambda: keeper.used_bytes() < 2.1 * bank_bytes)
    keeper.begin(2, 6, 1, total, (HERE,))
    keeper.join(2, HERE[0], 0, total // 2)  # the other half is another node's now
    step(7, 0, total // 2)
    step(8, 0, total // 2)
    assert eventually(lambda: keeper.used_bytes() < 1.1 * bank_bytes)
    shard = keeper.read(8, 2, 0, total // 2)
    assert shard is not None and all((array == 8).all() for array in shard.arrays.values())


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


# -- the node's memory, and what copies what ---------------------------------------------------------------------------


def test_room_is_what_host_and_container_can_spare_less_what_the_monitor_keeps_free(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    300 kB\n")
    assert node_room(meminfo, tmp_path) == 250 * 1024
    for name, text in (("max", "204800"), ("current", "102400"), ("stat", "anon 5\ninactive_file 51200")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert node_room(meminfo, tmp_path) == int(204800 * 0.95) - 51200
    (tmp_path / "memory.max").write_text("max")
    assert node_room(meminfo, tmp_path) == 250 * 1024
    assert node_room(tmp_path / "none", tmp_path) == sys.maxsize, "unknown is no reason to refuse"


def test_room_knows_the_limit_of_a_container_of_cgroup_version_1(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in (
        ("limit_in_bytes", "204800"),
        ("usage_in_bytes", "102400"),
        ("stat", "rss 5\ntotal_inactive_file 51200"),
    ):
        (tmp_path / "memory" / f"memory.{name}").write_text(text)
    assert node_room(tmp_path / "none", tmp_path) == int(204800 * 0.95) - 51200


@pytest.mark.parametrize("limited", ["system.slice", "system.slice/job_7", "system.slice/job_7/step_0"])
@pytest.mark.parametrize("version", [1, 2])
def test_room_knows_the_limits_of_the_job_that_a_process_belongs_to(version: int, limited: str, tmp_path: Path) -> None:
    """A job of SLURM, or a unit of systemd, sees the cgroups of the whole host, of which one is its own."""
    own, root = tmp_path / "own", tmp_path / ("memory" if version == 1 else "")
    own.write_text(
        "9:cpu,memory:/system.slice/job_7/step_0\n0::/\n" if version == 1 else "0::/system.slice/job_7/step_0\n"
    )
    names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    for group, limit in ((limited, 204800), ("system.slice/job_8", 1024)):
        (root / group).mkdir(parents=True)
        for name, text in zip((*names, "stat"), (str(limit), "51200", "anon 5"), strict=True):
            (root / group / f"memory.{name}").write_text(text)
    assert node_room(tmp_path / "none", tmp_path, own) == int(204800 * 0.95) - 51200
    assert node_room(tmp_path / "none", tmp_path, tmp_path / "none") == sys.maxsize
    own.write_text("0::/docker/1f2e\n")
    assert node_room(tmp_path / "none", tmp_path, own) == sys.maxsize, "a container that is shown the host's path"


def test_shared_memory_is_measured_whole_however_much_of_it_is_taken(tmp_path: Path) -> None:
    whole, free = shared_room(tmp_path), shutil.disk_usage(tmp_path).free
    assert whole == shutil.disk_usage(tmp_path).total and free < whole
    assert shared_room(tmp_path / "none") is None


def test_copies_go_to_other_nodes_and_are_spread() -> None:
    workers = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
    keepers = {"ka": "a", "kb": "b", "kc": "c"}
    chosen = place(workers, keepers)
    assert all(keepers[name] != workers[worker] for worker, names in chosen.items() for name in names)
    load = [sum(name in names for names in chosen.values()) for name in keepers]
    assert max(load) - min(load) <= 1


def test_two_copies_lie_on_two_nodes() -> None:
    keepers = {"ka": "a", "kb": "b", "kb2": "b", "kc": "c"}
    for worker, names in place({0: "a", 1: "b", 2: "c"}, keepers, copies=2).items():
        nodes = [keepers[name] for name in names]
        assert len(set(nodes)) == 2 and {0: "a", 1: "b", 2: "c"}[worker] not in nodes


def test_on_a_single_node_nothing_is_copied() -> None:
    assert place({0: "a", 1: "a"}, {"k": "a"}, copies=3) == {0: (), 1: ()}


def test_any_lost_node_is_covered_by_the_others(keepers: Callable[..., Keeper]) -> None:
    """Also in the middle of a step, when some of its shards are written and copied and others are not."""
    nodes, bounds = "abc", shard_bounds(TOTAL, 3)
    made = {node: begun(keepers()) for node in nodes}
    where = place(dict(enumerate(nodes)), {node: node for node in nodes})
    workers = {node: Writing(made[node], *bounds[rank], rank=rank) for rank, node in enumerate(nodes)}
    for step, half in ((0, False), (1, False), (2, True)):
        sent = {node: workers[node].finish(step) for node in nodes}
        for rank, node in enumerate(nodes):
            made[node].put([sent[node]])
            if not (half and rank == 1):
                assert made[where[rank][0]].hold([(sent[node], handle(made[node]))])
        if not half:
            for keeper in made.values():
                keeper.commit(keeper.standing().generation, step)
    for lost in nodes:
        left = [keeper for node, keeper in made.items() if node != lost]
        found: list[HeldShard] = [one for keeper in left for one in keeper.inventory() if one.step <= 1]
        assert newest_whole(found) == (1, 1)
        for one in (one for one in found if one.step == 1):
            shards = [keeper.read(1, 1, one.lo, one.hi) for keeper in left]
            assert {values(shard) == {1.0} for shard in shards if shard is not None} == {True}


def test_forecast_counts_two_versions_of_what_is_owned_and_of_what_is_copied() -> None:
    assert forecast_bytes(1000, weight_bytes=16, copies=1, num_keepers=1) == 2 * 1000 * 16
    assert forecast_bytes(1000, weight_bytes=16, copies=1, num_keepers=2) == 2 * 1000 * 16
    assert forecast_bytes(1000, weight_bytes=12, copies=1, num_keepers=8) == 2 * 2 * 1000 * 12 // 8


def known(keeper: Keeper) -> dict[str, object]:
    return keeper._book.to_json()


def test_late_doubled_and_overtaken_commits_set_nothing_back(keepers: Callable[..., Keeper]) -> None:
    """By relays a commit may come twice, or after a newer one, or when the next generation has begun."""
    keeper = begun(keepers())
    worker = Writing(keeper)
    commits(keeper, [worker], range(3))
    keeper.put([worker.finish(3)])
    keeper.commit(1, 3, {"at": 3}, [3])
    newest, order = known(keeper), keeper._book.order
    for late in (2, 0, 1):
        keeper.commit(1, late, {"at": late}, [late])
        assert known(keeper) == newest, "neither position nor pins nor the version are those of before"
    keeper.commit(1, 3, {"at": 3}, [3])
    assert known(keeper) == newest and keeper._book.order == order and held(keeper) == [(3, 0, TOTAL)]
    keeper.begin(2, 3, 1, TOTAL, (HERE,))
    begun_again = known(keeper)
    for step in (3, 4, 9):
        keeper.commit(1, step, {"at": step}, [step])
        assert known(keeper) == begun_again, "the generation that sent it is over"
    keeper.commit(3, 4, {"at": 4}, [])
    assert known(keeper) == begun_again, "that generation has not begun here"
    commits(keeper, [Writing(keeper, generation=2)], [4])
    assert keeper.standing().committed == 4 and held(keeper)[-1] == (4, 0, TOTAL)


def test_a_commit_that_overtakes_another_leaves_a_keeper_without_shards_at_the_newest(
    keepers: Callable[..., Keeper],
) -> None:
    keeper = begun(keepers())
    for step in (1, 0, 2, 2, 1):
        keeper.commit(1, step, {"at": step}, ())
    assert (keeper.standing().committed, keeper.standing().position) == (2, (2, {"at": 2}))
