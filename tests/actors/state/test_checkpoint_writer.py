"""Writing checkpoints in the background: no pile of writes, nothing left of failed ones; damage is passed over."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors.config import CheckpointConfig
from actors.messages import Handover, Origin
from actors.outcome import Events
from actors.records.events import CheckpointDamaged, CheckpointFailed, CheckpointPassedOver
from actors.state import checkpoint_files as checkpoint
from actors.state import checkpoint_writer as checkpoints
from actors.state.keeper import HeldShard, Keeper
from actors.state.recovery import CommitLog
from actors.step import Seat
from ops.shards import ARRAYS, ShardState, shard_bounds
from tests.actors.fakes import Handle, KeepersHere, Listening, Remote, Writing, collected, snapshot, state_of
from tests.families.kit import MODEL

TOTAL = 640
META = {"parameters": []}


def shards(step: int, size: int = 2) -> list[ShardState]:
    return [
        ShardState(
            updates=step, lo=lo, hi=hi, total=TOTAL, arrays={n: np.full(hi - lo, step, np.float32) for n in ARRAYS}
        )
        for lo, hi in shard_bounds(TOTAL, size)
    ]


def write(run_dir: Path, step: int) -> Path:
    folder = checkpoint.step_folder(checkpoints.root_of(run_dir), step)
    checkpoints._write(str(folder), {"step": step, **META}, shards(step), [])
    return folder


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda reference, timeout=None: reference)


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
    assert [folder.name for folder in checkpoints.root_of(tmp_path).iterdir()] == [whole.name]


def test_shards_are_written_side_by_side_and_no_more_of_them_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, real = checkpoints._AT_ONCE, checkpoint.write_shard
    together, fetched, written = threading.Barrier(at_once), [], []

    def write_shard(folder: Path, shard: ShardState) -> checkpoint.File:
        together.wait(timeout=60)  # for as many writes as there may be
        assert len(fetched) - len(written) <= at_once, "a whole state fits into no single node"
        file = real(folder, shard)
        written.append(file)
        return file

    def fetch(reference: Any, timeout: float | None = None) -> Any:
        fetched.append(reference)
        return reference

    monkeypatch.setattr(checkpoint, "write_shard", write_shard)
    monkeypatch.setattr(ray, "get", fetch)
    folder = checkpoint.step_folder(checkpoints.root_of(tmp_path), 9)
    checkpoints._write(str(folder), {"step": 9, **META}, shards(9, 2 * at_once), [])
    assert len(written) == 2 * at_once and len(checkpoint.load(folder)[1]) == 2 * at_once


def test_a_failed_write_is_removed_when_the_writes_beside_it_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = checkpoint.write_shard, threading.Event()

    def write_shard(folder: Path, shard: ShardState) -> checkpoint.File:
        if shard.lo == 0:
            failed.set()
            raise OSError(28, "No space left on device")
        assert failed.wait(60)
        time.sleep(0.1)  # the folder is still there
        return real(folder, shard)

    monkeypatch.setattr(checkpoint, "write_shard", write_shard)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 9)
    assert not list(checkpoints.root_of(tmp_path).iterdir())


def test_the_writing_task_fetches_from_the_keepers_itself_piece_by_piece(tmp_path: Path) -> None:
    keeper, gets = Keeper(), []
    for shard in shards(7, size=3):
        keeper.put(7, shard)

    def get(step: int, lo: int, hi: int) -> list[ShardState]:
        gets.append((lo, hi))
        return keeper.get(step, lo, hi)

    handle = Handle(held=keeper.held, get=get)
    folder = tmp_path / "checkpoints" / "step-7"
    checkpoints._write(str(folder), {"step": 7, **META}, [], [handle])  # type: ignore[list-item]
    assert gets == shard_bounds(TOTAL, 3), "a whole state fits into no single node"
    _, found = checkpoint.load(folder)
    assert all((shard.arrays["ema"] == 7).all() for shard in found) and len(found) == 3


class Tasks:
    """Stands for Ray's tasks: each ends when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[tuple[Any, ...]] = []
        self.on_begin: Callable[[], None] = lambda: None
        self.done: set[int] = set()
        self.results: dict[int, Any] = {}
        monkeypatch.setattr(ray, "get", lambda reference, timeout=None: self.results.get(reference))
        monkeypatch.setattr(ray, "remote", lambda function: Remote(self._begin))
        monkeypatch.setattr(ray, "wait", self._wait)

    def _begin(self, *arguments: Any) -> int:
        self.on_begin()
        self.begun.append(arguments)
        return len(self.begun) - 1

    def _wait(self, references: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        done = [reference for reference in references if reference in self.done][:num_returns]
        return done, [reference for reference in references if reference not in done]


def writer_of(run_dir: Path) -> checkpoints.Writer:
    config = CheckpointConfig(every=10)
    return checkpoints.Writer(run_dir, config, 99, Events(Listening()))


def save(writer: checkpoints.Writer, step: int) -> None:
    """As a run does it after a step whose checkpoint is due."""
    if not writer.puts_off(step):
        writer.save([snapshot(step, f"shard {step}")], {"step": step, **META})


def test_writes_that_are_slower_than_their_interval_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, writer = Tasks(monkeypatch), writer_of(tmp_path)
    for step in range(9, 60, 10):
        save(writer, step)
    assert len(tasks.begun) == 1 and writer.due(61), "the next one is taken when the disk is ready"
    tasks.done.add(0)
    writer.poll()
    save(writer, 61)
    assert [begun[2] for begun in tasks.begun] == [["shard 9"], ["shard 61"]] and not writer.due(62)
    save(writer, 99)
    assert len(tasks.begun) == 3, "the last step is never put off"


def test_the_last_state_never_passes_through_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, writer = Tasks(monkeypatch), writer_of(tmp_path)
    tasks.done.add(0)
    keeper: Any = Handle()
    export: Any = "export"
    writer.save_origin(Origin(step=7, keepers=(keeper,), exports=(export,)), {"step": 7, **META})
    assert tasks.begun[0][2:] == (["export"], [keeper], False) and keeper.get.asked == []


def test_the_last_state_is_a_checkpoint_once_its_steps_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = write(tmp_path, 3)
    folder = checkpoint.step_folder(checkpoints.root_of(tmp_path), 9)
    unsealed = checkpoints._write(str(folder), {"step": 9, **META}, shards(9), [], seal=False)
    tasks, writer = Tasks(monkeypatch), writer_of(tmp_path)
    tasks.done.add(0)
    tasks.results[0] = unsealed
    assert writer.save_origin(Origin(step=9, keepers=(), exports=()), {"step": 9, **META})
    assert checkpoint.complete(checkpoints.root_of(tmp_path)) == [older]
    save(writer, 9)
    assert len(tasks.begun) == 1, "counting the step does not write it again"
    writer.seal_last()
    assert checkpoint.complete(checkpoints.root_of(tmp_path)) == [older, folder] and not checkpoint.damage(folder)


def test_a_last_state_that_cannot_be_sealed_leaves_nothing_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint.step_folder(checkpoints.root_of(tmp_path), 9)
    unsealed = checkpoints._write(str(folder), {"step": 9, **META}, shards(9), [], seal=False)
    tasks, listener = Tasks(monkeypatch), Listening()
    tasks.done.add(0)
    tasks.results[0] = unsealed
    writer = checkpoints.Writer(tmp_path, CheckpointConfig(every=10), 99, Events(listener))
    assert writer.save_origin(Origin(step=9, keepers=(), exports=()), {"step": 9, **META})

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "seal", full)
    writer.seal_last()
    assert [type(event) for event in listener.told] == [CheckpointFailed] and not folder.exists()


def test_a_checkpoint_begins_to_be_written_when_its_step_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that is killed between would leave a checkpoint of a step whose metrics nobody has written. Keepers
    are told first: one that is killed while it begins would leave a step with metrics that nobody knows to count."""
    tasks, keepers = Tasks(monkeypatch), KeepersHere()
    tasks.on_begin = lambda: begun_after.append(list(keepers.told))
    begun_after: list[Any] = []
    state = state_of(tmp_path, keepers=keepers, writer=writer_of(tmp_path), model=MODEL)
    done = collected(9, 1)
    done.snapshots = (snapshot(9, "shard 9", total=TOTAL),)
    assert state.saves(9) and tasks.begun == []
    state.committed(done, None)
    assert [begun[1]["step"] for begun in tasks.begun] == [9] and tasks.begun[0][2:] == (["shard 9"], [], True)
    assert begun_after == [[("commit", 9)]]


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
    assert state.on_disk() == (9, older), "keepers are not let go for a damaged one"
    assert write(tmp_path, 19) == damaged and state.on_disk() == (19, damaged), "written again, it counts again"


def test_the_data_position_is_read_from_a_whole_checkpoint(tmp_path: Path) -> None:
    for step in (9, 19):
        folder = checkpoint.step_folder(checkpoints.root_of(tmp_path), step)
        checkpoints._write(str(folder), {"step": step, "data_token": {"at": step}, **META}, shards(step), [])
    assert state_of(tmp_path).data_token(19) == {"at": 19}
    meta = folder / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"data_token": {"at": 91}}, indent=1))
    assert state_of(tmp_path).data_token(19) == {"at": 9}


@pytest.mark.parametrize("kept", [False, True])
def test_steps_that_no_keeper_took_are_committed_by_the_checkpoint_of_the_workers_state(
    tmp_path: Path, kept: bool
) -> None:
    commits, asked = CommitLog(committed=6, finished=tuple(collected(step, 1, "never") for step in (7, 8))), []
    held = HeldShard(step=8, generation=1, lo=0, hi=TOTAL, total=TOTAL, num_bytes=0)

    def hand_over(step: int) -> Handover:
        asked.append(step)
        return Handover(worker="w0", exports=(snapshot(8, "shard 8", total=TOTAL),))

    seat = Seat(name="w0", node="n", handle=Handle(hand_over=hand_over))  # type: ignore[arg-type]
    keepers = KeepersHere(a=[held]) if kept else KeepersHere()
    writer = Writing(lambda step: write(tmp_path, step))
    state = state_of(tmp_path, keepers=keepers, writer=writer, model=MODEL)
    assert state.keep_last([seat], commits) == 8
    assert asked == ([] if kept else [8]), "workers may be slow to answer: only where they are needed"
