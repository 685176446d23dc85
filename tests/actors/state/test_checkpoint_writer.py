"""Writing checkpoints in the background: no pile of writes, nothing left of failed ones; damage is passed over."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from actors.config import CheckpointConfig
from actors.held_state import HeldShard, Origin, Snapshot, WrittenShard
from actors.messages import Handover
from actors.outcome import Events
from actors.records.events import CheckpointDamaged, CheckpointFailed, CheckpointPassedOver
from actors.state import checkpoint_files as checkpoint
from actors.state import checkpoint_writer as checkpoints
from actors.state.checkpoints_on_disk import CheckpointsOnDisk
from actors.state.keeper import VersionLost
from actors.state.recovery import CommitLog
from actors.step import Seat
from ops.shards import ARRAYS, ShardState, shard_bounds
from tests.actors.fakes import (
    Handle,
    KeepersHere,
    Listening,
    Remote,
    Writing,
    collected,
    inventories_of,
    snapshot,
    state_of,
)
from tests.families.kit import MODEL

TOTAL = 640
META = {"parameters": []}


class Holding:
    """A keeper that holds these ranges of any step of generation 1, each of their elements being that step."""

    def __init__(self, *ranges: tuple[int, int]) -> None:
        self.ranges, self.wrote = ranges, []  # type: ignore[var-annotated]

    def held(self, step: int, generation: int) -> list[HeldShard]:
        assert generation == 1
        return [
            HeldShard(step=step, generation=1, lo=lo, hi=hi, total=TOTAL, num_bytes=16 * (hi - lo))
            for lo, hi in self.ranges
        ]

    def write(self, folder: str, step: int, generation: int, ranges: Sequence[tuple[int, int]]) -> list[WrittenShard]:
        written = []
        for lo, hi in ranges:
            arrays = {name: np.full(hi - lo, step, np.float32) for name in ARRAYS}
            shard = ShardState(updates=step, lo=lo, hi=hi, total=TOTAL, arrays=arrays)
            file = checkpoint.write_shard(Path(folder), shard)
            self.wrote.append((lo, hi))
            written.append(WrittenShard(lo=lo, hi=hi, name=file.name, size=file.size, crc32=file.crc32))
        return written

    @property
    def handle(self) -> Any:
        return Handle(held=self.held, write=self.write)


ALL = Holding(*shard_bounds(TOTAL, 2)).handle


def folder_of(run_dir: Path, step: int) -> Path:
    return checkpoint.step_folder(checkpoint.root_of(run_dir), step)


def write(run_dir: Path, step: int, *keepers: Any, **meta: Any) -> Path:
    """As the task does it that the writer begins."""
    folder = folder_of(run_dir, step)
    checkpoints._write(str(folder), {"step": step, **META, **meta}, 1, list(keepers or [ALL]))
    return folder


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: Any, timeout: float | None = None) -> Any:
        value = reference() if callable(reference) else reference
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(ray, "get", get)


def test_a_failed_write_leaves_nothing_on_the_disk_that_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attempt left up to a whole state, which made the next one fail."""
    whole, real, calls = write(tmp_path, 9), checkpoint._write, []

    def full(path: Path, parts: Iterable[bytes | memoryview]) -> checkpoint.File:
        calls.append(path)
        if len(calls) % 2 == 0:
            raise OSError(28, "No space left on device", str(path))
        return real(path, list(parts))

    monkeypatch.setattr(checkpoint, "_write", full)
    for step in (19, 29, 39):
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, step)
    assert [folder.name for folder in checkpoint.root_of(tmp_path).iterdir()] == [whole.name]


def test_each_keeper_writes_what_lies_on_its_node_and_what_two_have_is_written_once(tmp_path: Path) -> None:
    a, b = Holding((0, 200), (200, 400)), Holding((200, 400), (400, TOTAL))
    folder = write(tmp_path, 7, a.handle, b.handle)
    assert sorted(a.wrote + b.wrote) == [(0, 200), (200, 400), (400, TOTAL)] and len(a.wrote) == 2
    _, found = checkpoint.load(folder)
    assert (
        all((shard.arrays["ema"] == 7).all() for shard in found) and len(found) == 3 and not checkpoint.damage(folder)
    )


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)).filter(lambda r: r[0] < r[1]), max_size=4), max_size=4
    )
)
def test_shares_are_what_is_held_each_element_once_by_somebody_who_has_it(held: list[list[tuple[int, int]]]) -> None:
    shares = checkpoints._shares(held)
    written = [at for ranges in shares for lo, hi in ranges for at in range(lo, hi)]
    assert sorted(written) == sorted({at for ranges in held for lo, hi in ranges for at in range(lo, hi)})
    for share, ranges in zip(shares, held, strict=True):
        there = {at for lo, hi in ranges for at in range(lo, hi)}
        assert all(set(range(lo, hi)) <= there for lo, hi in share)


@pytest.mark.parametrize(
    ("keeper", "why"),
    [
        (Handle(held=lambda *version: ray.exceptions.ActorDiedError()), r"no keeper holds \[\(320, 640\)\]"),
        (Holding((320, 500)).handle, r"no keeper holds \[\(500, 640\)\] of step 7"),
        (
            Handle(held=Holding((320, TOTAL)).held, write=lambda *asked: ray.exceptions.ActorDiedError()),
            "a keeper is gone",
        ),
        (
            Handle(
                held=Holding((320, TOTAL)).held,
                write=lambda *asked: ray.exceptions.RayTaskError("write", "", VersionLost("let go of step 7")),
            ),
            "let go of step 7",
        ),
    ],
    ids=["gone", "incomplete", "dies meanwhile", "lets go meanwhile"],
)
def test_a_state_that_keepers_do_not_hold_to_the_end_is_no_checkpoint(tmp_path: Path, keeper: Any, why: str) -> None:
    with pytest.raises(checkpoints.StateLost, match=why):
        write(tmp_path, 7, Holding((0, 320)).handle, keeper)
    assert list(checkpoint.root_of(tmp_path).iterdir()) == []


def test_a_full_disk_of_a_keeper_is_told_in_its_words(tmp_path: Path) -> None:
    full = ray.exceptions.RayTaskError("write", "", OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 7, Handle(held=Holding((0, TOTAL)).held, write=lambda *asked: full))


def test_what_others_still_write_when_one_has_failed_is_removed_with_the_rest(tmp_path: Path) -> None:
    """They took the room of a full disk, and the next attempt met their files."""
    slow = Holding((320, TOTAL))
    full = ray.exceptions.RayTaskError("write", "", OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        write(
            tmp_path,
            7,
            Handle(held=Holding((0, 320)).held, write=lambda *asked: full),
            Handle(held=slow.held, write=lambda *asked: lambda: slow.write(*asked)),
        )
    assert slow.wrote == [(320, TOTAL)], "it has ended by now"
    assert list(checkpoint.root_of(tmp_path).iterdir()) == []


class Tasks:
    """Stands for Ray's tasks: each ends when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[tuple[Any, ...]] = []
        self.on_begin: Callable[[], None] = lambda: None
        self.done: set[int] = set()
        self.results: dict[int, Any] = {}
        monkeypatch.setattr(ray, "get", self._get)
        monkeypatch.setattr(ray, "remote", lambda function: Remote(self._begin))
        monkeypatch.setattr(ray, "wait", self._wait)

    def _begin(self, *arguments: Any) -> int:
        self.on_begin()
        self.begun.append(arguments)
        return len(self.begun) - 1

    def _get(self, reference: int, timeout: float | None = None) -> Any:
        if isinstance(result := self.results.get(reference), Exception):
            raise result
        return result

    def _wait(self, references: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        done = [reference for reference in references if reference in self.done][:num_returns]
        return done, [reference for reference in references if reference not in done]


def writer_of(
    run_dir: Path, config: CheckpointConfig | None = None, events: Events | None = None
) -> checkpoints.Writer:
    """The writer of a run in whose folder no other has left checkpoints."""
    config, events = config or CheckpointConfig(every=10), events or Events(Listening())
    return checkpoints.Writer(run_dir, config, 99, events, weight_bytes=16, unmoved=set(), disown=lambda step: None)


def save(writer: checkpoints.Writer, step: int) -> None:
    """As a run does it after a step whose checkpoint is due."""
    if not writer.puts_off(step):
        writer.save(Origin(step=step, generation=step, keepers=(ALL,)), {"step": step, **META})


@pytest.mark.parametrize(
    "fails",
    [
        None,
        ray.exceptions.RayTaskError("write", "", OSError(errno.ESTALE, "Stale file handle")),
        ray.exceptions.WorkerCrashedError(),
        TimeoutError(),
    ],
    ids=["it is written", "storage is still away", "its process ends", "it is given up"],
)
def test_an_old_one_that_cannot_be_moved_as_its_step_is_written_is_never_the_runs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Exception | None
) -> None:
    """Read a moment later it was whole: nothing was written, and a run that lost its nodes went on from it. Where
    whoever wrote the step could not move it either, it kept its name, and the next start took it."""
    folder, earlier = write(tmp_path, 19, came="before"), write(tmp_path, 9)
    disk, tasks = CheckpointsOnDisk(tmp_path, Listening().on_event), Tasks(monkeypatch)
    writer = checkpoints.Writer(
        tmp_path,
        CheckpointConfig(every=10),
        99,
        Events(Listening()),
        weight_bytes=16,
        unmoved=disk.unmoved,
        disown=disk.disown,
    )
    origin, meta = Origin(step=19, generation=1, keepers=(ALL,)), {"step": 19, **META}
    make_way_in_vain(disk, monkeypatch)
    writer.save(origin, meta)
    assert disk.newest() == (9, earlier), "it is not written yet"
    if fails is not None:
        if isinstance(fails, TimeoutError):
            now = time.monotonic() + 3601
            monkeypatch.setattr(time, "monotonic", lambda: now)
            monkeypatch.setattr(ray, "cancel", lambda task, force: None)
        else:
            tasks.results[0] = fails
            tasks.done.add(0)
        writer.poll()
        assert writer.due(20), "until there is another, a next start might come before anybody looks"
        assert disk.newest() == (9, earlier) and not folder.exists()
        assert CheckpointsOnDisk(tmp_path, Listening().on_event).newest() == (9, earlier)
        disk.make_way(19)
        writer.save(origin, meta)
    with monkeypatch.context() as answering:
        answering.setattr(ray, "get", lambda value, timeout=None: value)
        checkpoints._write(*tasks.begun[-1])
    tasks.done.add(len(tasks.begun) - 1)
    writer.poll()
    assert disk.newest() == (19, folder) and "came" not in checkpoint.load(folder)[0]
    assert checkpoint.load(folder.with_name("passed-over-step-19"))[0]["came"] == "before"
    disk.go_back(20)
    assert disk.newest() == (19, folder)


def test_an_old_one_whose_step_nobody_writes_is_moved_when_the_run_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, earlier = write(tmp_path, 19, came="before"), write(tmp_path, 9)
    disk = CheckpointsOnDisk(tmp_path, Listening().on_event)
    make_way_in_vain(disk, monkeypatch)
    assert disk.newest() == (9, earlier) and folder.is_dir()
    disk.go_back(25)
    assert disk.newest() == (9, earlier) and not folder.exists()


def make_way_in_vain(disk: CheckpointsOnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on after step 9, and nothing can be moved as it comes to step 19."""

    def gone(path: Path, target: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as away:
        away.setattr(Path, "rename", gone)
        disk.go_back(9)
        disk.make_way(19)


def test_writes_that_are_slower_than_their_interval_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, writer = Tasks(monkeypatch), writer_of(tmp_path)
    for step in range(9, 60, 10):
        save(writer, step)
    assert len(tasks.begun) == 1 and writer.due(69), "it may have ended by then"
    assert not any(writer.due(step) for step in range(60, 69)), "no worker copies a state that nobody can write"
    tasks.done.add(0)
    writer.poll()
    assert writer.due(61), "the next one is taken when the disk is ready"
    save(writer, 61)
    assert [begun[2] for begun in tasks.begun] == [9, 61] and not writer.due(62) and writer.steps == [61]
    save(writer, 99)
    assert len(tasks.begun) == 3, "the last step is never put off"


def test_what_is_written_or_was_by_this_writer_is_known_until_the_run_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, writer = Tasks(monkeypatch), writer_of(tmp_path)
    assert not writer.has(9)
    save(writer, 9)
    assert writer.has(9) and not writer.has(8)
    tasks.done.add(0)
    writer.poll()
    assert writer.has(8) and writer.has(9) and not writer.has(10)
    writer.go_back(7)
    assert writer.has(7) and not writer.has(8)


@pytest.mark.parametrize(("keep_last", "first"), [(0, []), (9, [19, 9])])
def test_a_run_looks_once_at_the_files_of_checkpoints_that_it_keeps_in_the_place_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_last: int, first: list[int]
) -> None:
    beside = {step: write(tmp_path / "beside", step) for step in (19, 29, 39)}
    write(tmp_path, 9)
    checkpoint.begin(folder_of(tmp_path, 14))
    tasks, asked, is_complete = Tasks(monkeypatch), list[int](), checkpoint.is_complete

    def counted(folder: Path) -> bool:
        asked.append(checkpoint.step_of(folder))
        return is_complete(folder)

    writer = writer_of(tmp_path, CheckpointConfig(every=10, keep_last=keep_last))
    monkeypatch.setattr(checkpoint, "is_complete", counted)
    for number, step in enumerate((19, 29, 39)):
        save(writer, step)
        beside[step].rename(folder_of(tmp_path, step))
        asked.clear()
        tasks.done.add(number)
        writer.poll()
        assert asked == (first if step == 19 else [step] if keep_last else [])
        assert not folder_of(tmp_path, 14).exists()
    save(writer, 9)  # passed over, as it is damaged, and written again
    asked.clear()
    tasks.done.add(3)
    writer.poll()
    assert asked == ([9] if keep_last else [])


def test_the_newest_checkpoint_of_a_folder_is_known_by_its_files_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checkpoint.newest_step(tmp_path) == -1
    for step in (9, 19):
        write(tmp_path, step)
    checkpoint.begin(folder_of(tmp_path, 29))
    assert checkpoint.newest_step(tmp_path) == 19

    def silent(folder: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle", str(folder))

    monkeypatch.setattr(checkpoint, "is_complete", silent)
    assert checkpoint.newest_step(tmp_path) is None


def test_storage_that_hangs_keeps_back_one_checkpoint_and_not_all_that_come_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tasks(monkeypatch)
    listener, now, ended = Listening(), time.monotonic(), list[int]()
    monkeypatch.setattr(ray, "cancel", lambda reference, force: ended.append(reference))
    writer = writer_of(tmp_path, events=Events(listener))
    save(writer, 9)
    monkeypatch.setattr(time, "monotonic", lambda: now + 3500)
    writer.poll()
    save(writer, 19)
    assert writer.steps == [9] and listener.told == [] and ended == [], "it is only slow"
    monkeypatch.setattr(time, "monotonic", lambda: now + 3700)
    writer.poll()
    assert writer.steps == [] and ended == [0], "keepers need not hold that version any more"
    assert [(type(e), e.step) for e in listener.told] == [(CheckpointFailed, 9)]
    assert writer.due(21)
    save(writer, 21)
    assert writer.steps == [21] and not writer.due(22)
    monkeypatch.setattr(time, "monotonic", lambda: now + 7400)
    writer.wait()
    assert writer.steps == [] and ended == [0, 1]


def test_what_an_attempt_has_left_that_was_given_up_goes_when_storage_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before: whoever looks into it may hang, too."""
    tasks, now = Tasks(monkeypatch), time.monotonic()
    monkeypatch.setattr(ray, "cancel", lambda reference, force: None)
    writer = writer_of(tmp_path)
    folders = {step: checkpoint.step_folder(checkpoint.root_of(tmp_path), step) for step in (9, 19, 29)}
    for step, later in ((9, 3700), (19, 7400)):
        save(writer, step)
        checkpoint.begin(folders[step])
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        writer.poll()
    assert folders[9].exists() and folders[19].exists() and writer.steps == []
    save(writer, 29)
    tasks.done.add(2)
    writer.poll()
    assert not folders[9].exists() and not folders[19].exists()


def test_two_that_are_whole_in_the_other_order_leave_no_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of a run is written beside the one before it, and may be done first: that one stays meanwhile, although
    it is older and not whole."""
    older, late, last = (write(tmp_path, step) for step in (79, 89, 99))
    not_yet = (late / checkpoint.COMPLETE).rename(tmp_path / "not yet")
    tasks = Tasks(monkeypatch)
    writer = writer_of(tmp_path, CheckpointConfig(every=10, keep_last=2))
    for step in (89, 99):
        save(writer, step)
    tasks.done.add(1)
    writer.poll()
    not_yet.rename(late / checkpoint.COMPLETE)
    tasks.done.add(0)
    writer.poll()
    assert writer.steps == [] and not older.exists() and late.is_dir() and last.is_dir()


def test_the_first_checkpoint_after_a_run_has_gone_back_is_no_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage gives step 49 no more, and the run goes on from 29: what it wrote then was removed at once."""
    withheld, beside = write(tmp_path, 49), [write(tmp_path / "beside", step) for step in (29, 31)]
    tasks = Tasks(monkeypatch)
    writer = writer_of(tmp_path, CheckpointConfig(every=10, keep_last=1))
    save(writer, 49)
    tasks.done.add(0)
    writer.poll()
    first = beside[0].rename(withheld.with_name("step-29"))
    run = state_of(tmp_path, writer=writer, model=MODEL)

    def not_given(folder: Path) -> bool:
        raise OSError(errno.EIO, "Input/output error", str(folder))

    monkeypatch.setattr("actors.state.checkpoints_on_disk.is_complete", not_given)  # else it is moved aside
    run.open(Origin(step=29, checkpoint=str(first)), 2, [])
    next_one = beside[1].rename(withheld.with_name("step-31"))
    save(writer, 31)
    tasks.done.add(1)
    writer.poll()
    assert next_one.is_dir() and withheld.is_dir() and not first.exists()


@pytest.mark.parametrize(
    ("weights", "earlier_s", "limit_s"), [(0, 0, 600), (5, 0, 1600), (14, 0, 3600), (14, 200, 1000)]
)
def test_where_somebody_waits_for_the_end_storage_that_hangs_is_given_up_sooner(
    weights: int, earlier_s: float, limit_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what an earlier checkpoint took; else by its size, in thousands of millions of weights of 16 bytes."""
    tasks, clock = Tasks(monkeypatch), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ray, "cancel", lambda reference, force: None)
    wait = ray.wait

    def waits(references: list[int], num_returns: int, timeout: float) -> Any:
        clock[0] += timeout
        return wait(references, num_returns=num_returns, timeout=timeout)

    monkeypatch.setattr(ray, "wait", waits)
    writer, meta = writer_of(tmp_path), {"parameters": [{"name": "it", "shape": [weights * 10**9]}]}
    if earlier_s:
        writer.save(Origin(step=9, generation=9, keepers=(ALL,)), {"step": 9, **meta})
        clock[0] += earlier_s
        tasks.done.add(0)
        writer.poll()
    writer.save(Origin(step=99, generation=99, keepers=(ALL,)), {"step": 99, **meta})
    begin = clock[0]
    writer.wait(lambda: writer.hurry() if clock[0] > begin + 50 else None)
    assert writer.steps == [] and clock[0] - begin == pytest.approx(min(3600, 50 + limit_s), abs=3)


def test_a_checkpoint_that_was_lost_with_its_keepers_is_taken_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, listener = Tasks(monkeypatch), Listening()
    writer = writer_of(tmp_path, events=Events(listener))
    assert writer.due(9) and not writer.due(10)
    save(writer, 9)
    tasks.done.add(0)
    tasks.results[0] = ray.exceptions.RayTaskError("checkpoint", "", checkpoints.StateLost("a keeper is gone"))
    writer.poll()
    assert [(type(e), e.step) for e in listener.told] == [(CheckpointFailed, 9)]
    assert writer.due(10) and writer.steps == [], "the next step is taken instead"
    save(writer, 10)
    assert not writer.due(11) and writer.steps == [10]


def test_a_checkpoint_whose_writer_went_with_its_node_leaves_nothing_and_is_taken_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, listener = Tasks(monkeypatch), Listening()
    writer = writer_of(tmp_path, events=Events(listener))
    save(writer, 9)
    checkpoint.begin(folder := checkpoint.step_folder(checkpoint.root_of(tmp_path), 9))
    tasks.done.add(0)
    tasks.results[0] = ray.exceptions.WorkerCrashedError()
    writer.poll()
    assert [(type(e), e.step) for e in listener.told] == [(CheckpointFailed, 9)] and not folder.exists()
    assert writer.due(10) and writer.steps == []
    save(writer, 10)
    assert not writer.due(11) and writer.steps == [10]


def test_the_last_state_is_a_checkpoint_once_its_steps_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = write(tmp_path, 3)
    folder = checkpoint.step_folder(checkpoint.root_of(tmp_path), 9)
    unsealed = checkpoints._write(str(folder), {"step": 9, **META}, 1, [ALL], seal=False)
    tasks, writer = Tasks(monkeypatch), writer_of(tmp_path)
    tasks.done.add(0)
    tasks.results[0] = unsealed
    assert writer.save_origin(Origin(step=9, generation=1, keepers=(ALL,)), {"step": 9, **META})
    assert checkpoint.complete(checkpoint.root_of(tmp_path)) == [older]
    save(writer, 9)
    assert len(tasks.begun) == 1, "counting the step does not write it again"
    writer.seal_last()
    assert checkpoint.complete(checkpoint.root_of(tmp_path)) == [older, folder] and not checkpoint.damage(folder)


def test_a_last_state_that_cannot_be_sealed_leaves_nothing_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint.step_folder(checkpoint.root_of(tmp_path), 9)
    unsealed = checkpoints._write(str(folder), {"step": 9, **META}, 1, [ALL], seal=False)
    tasks, listener = Tasks(monkeypatch), Listening()
    tasks.done.add(0)
    tasks.results[0] = unsealed
    writer = writer_of(tmp_path, events=Events(listener))
    assert writer.save_origin(Origin(step=9, generation=1, keepers=(ALL,)), {"step": 9, **META})

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "seal", full)
    writer.seal_last()
    assert [type(event) for event in listener.told] == [CheckpointFailed] and not folder.exists()


def test_a_checkpoint_begins_to_be_written_when_its_step_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that is killed between would leave a checkpoint of a step whose metrics nobody has written. Keepers
    hear of it first: one that is killed while it begins would leave a step with metrics that nobody knows to count."""
    tasks, keepers = Tasks(monkeypatch), KeepersHere()
    tasks.on_begin = lambda: begun_after.append(list(keepers.told))
    begun_after: list[Any] = []
    state = state_of(tmp_path, keepers=keepers, writer=writer_of(tmp_path), model=MODEL)
    assert state.saves(9) and tasks.begun == []
    state.after_commit(collected(9, 1, snapshot(9, total=TOTAL)), None)
    assert [begun[1]["step"] for begun in tasks.begun] == [9] and tasks.begun[0][2:] == (1, [], True, False)
    assert begun_after == [[("commit", 9, 9)]], "and that its version stays"


def test_lines_of_steps_are_on_disk_before_a_checkpoint_can_be_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on from it after a power cut would have a gap in metrics.jsonl."""
    folder = checkpoint.step_folder(checkpoint.root_of(tmp_path), 12)
    unsealed = checkpoints._write(str(folder), {"step": 12, **META}, 1, [ALL], seal=False)
    tasks, listener = Tasks(monkeypatch), Listening()
    tasks.on_begin = lambda: begun_after.append(len(listener.synced))
    begun_after: list[int] = []
    writer = writer_of(tmp_path, events=Events(listener))
    save(writer, 9)
    assert begun_after == [1], "one that is sealed where it is written"
    tasks.done |= {0, 1}
    tasks.results[1] = unsealed
    writer.save_origin(Origin(step=12, generation=1, keepers=(ALL,)), {"step": 12, **META})
    assert len(listener.synced) == 1, "its steps are counted later"
    writer.seal_last()
    assert len(listener.synced) == 2


def test_a_run_starts_from_the_older_checkpoint_when_the_newer_is_damaged_and_says_so(tmp_path: Path) -> None:
    older, damaged, torn = write(tmp_path, 9), write(tmp_path, 19), write(tmp_path, 29)
    path = next(damaged.glob("shard-*"))
    path.write_bytes(bytes(path.stat().st_size))
    (torn / checkpoint.COMPLETE).unlink()
    listener = Listening()
    state = state_of(tmp_path, listener=listener)
    origin = state.first()
    assert origin is not None and origin.checkpoint == str(older)
    assert {(type(e), e.folder) for e in listener.told} == {
        (CheckpointDamaged, "step-19"),
        (CheckpointPassedOver, "step-29"),
    }
    assert any(path.name in e.why for e in listener.told)
    assert state.disk.newest() == (9, older), "keepers are not let go for a damaged one"
    assert write(tmp_path, 19) == damaged and state.disk.newest() == (19, damaged), "written again, it counts again"


def test_the_data_position_is_read_from_a_whole_checkpoint(tmp_path: Path) -> None:
    for step in (9, 19):
        folder = write(tmp_path, step, data_token={"at": step})
    assert state_of(tmp_path).data_token(19) == {"at": 19}
    meta = folder / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"data_token": {"at": 91}}, indent=1))
    assert state_of(tmp_path).data_token(19) == {"at": 9}


class Told(KeepersHere):
    """Holds what it was made with."""

    def hold(self, snapshots: Sequence[Snapshot], relays: object = None) -> list[Any]:
        held = [
            HeldShard(step=one.step, generation=one.generation, lo=one.lo, hi=one.hi, total=one.total, num_bytes=0)
            for one in snapshots
        ]
        self._inventories = inventories_of(a=held)
        return super().hold(snapshots)


@pytest.mark.parametrize("kept", [False, True])
def test_steps_that_no_keeper_took_are_committed_by_the_checkpoint_of_the_workers_state(
    tmp_path: Path, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits, asked = CommitLog(committed=6, finished=tuple(collected(step, 1, snapshot(step)) for step in (7, 8))), []
    held = HeldShard(step=8, generation=1, lo=0, hi=TOTAL, total=TOTAL, num_bytes=0)

    def hand_over(step: int) -> Handover:
        asked.append(step)
        return Handover(worker="w0", snapshot=snapshot(8, total=TOTAL))

    seat = Seat(name="w0", node="n", handle=Handle(hand_over=hand_over))  # type: ignore[arg-type]
    keepers = Told(a=[held]) if kept else Told()
    writer = Writing(lambda step: write(tmp_path, step))
    state = state_of(tmp_path, keepers=keepers, writer=writer, model=MODEL)
    monkeypatch.setattr(ray, "wait", lambda references, num_returns, timeout: (references, []))
    assert state.keep_last([seat], commits) == 8
    assert asked == ([] if kept else [8]), "workers may be slow to answer: only where they are needed"


def test_an_attempt_that_was_given_up_takes_the_last_state_of_the_same_step_not_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files lie in the folder of that attempt, without COMPLETE until the steps are counted."""
    now, folder = time.monotonic(), folder_of(tmp_path, 9)
    unsealed = checkpoints._write(str(folder), {"step": 9, **META}, 1, [ALL], seal=False)
    tasks = Tasks(monkeypatch)
    monkeypatch.setattr(ray, "cancel", lambda reference, force: None)
    writer = writer_of(tmp_path)
    save(writer, 9)
    monkeypatch.setattr(time, "monotonic", lambda: now + 3700)
    writer.poll()
    assert writer.steps == []
    tasks.results[1] = unsealed
    tasks.done.add(1)
    assert writer.save_origin(Origin(step=9, generation=1, keepers=(ALL,)), {"step": 9, **META})
    writer.seal_last()
    assert checkpoint.complete(checkpoint.root_of(tmp_path)) == [folder] and not checkpoint.damage(folder)


def test_workers_without_a_part_of_the_state_are_no_reason_not_to_write_it(tmp_path: Path) -> None:
    """More of them than cache lines: the last ranges are empty."""
    bounds = shard_bounds(TOTAL, 50)
    assert bounds[-1] == (TOTAL, TOTAL)
    folder = write(tmp_path, 5, Holding(*bounds).handle)
    assert not checkpoint.damage(folder)
