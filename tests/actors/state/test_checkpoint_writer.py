"""Writing checkpoints in the background: no pile of writes, nothing left of failed ones; damage is passed over."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import ray

from actors.config import CheckpointConfig, SnapshotConfig
from actors.messages import Origin, Snapshot
from actors.records.events import CheckpointDamaged, CheckpointPassedOver
from actors.state import checkpoint_files as checkpoint
from actors.state import checkpoint_writer as checkpoints
from actors.state.commit_log import CommitLog
from actors.state.keeper import HeldShard, Keeper
from actors.state.run_state import RunState
from ops.shards import ARRAYS, ShardState, shard_bounds

TOTAL = 640
META = {"parameters": []}


def shards(step: int, size: int = 2) -> list[ShardState]:
    return [
        ShardState(step=step, lo=lo, hi=hi, total=TOTAL, arrays={n: np.full(hi - lo, step, np.float32) for n in ARRAYS})
        for lo, hi in shard_bounds(TOTAL, size)
    ]


def write(run_dir: Path, step: int) -> Path:
    folder = checkpoint.step_folder(checkpoints.root_of(run_dir), step)
    checkpoints._write(str(folder), {"step": step, **META}, shards(step), [])
    return folder


class Called:
    """An actor's method in this process: answers at once."""

    def __init__(self, method: Any) -> None:
        self.remote = method


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda reference: reference)


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


def test_the_writing_task_fetches_from_the_keepers_itself_piece_by_piece(tmp_path: Path) -> None:
    keeper, gets = Keeper(), []
    for shard in shards(7, size=3):
        keeper.put(7, shard)

    def get(step: int, lo: int, hi: int) -> list[ShardState]:
        gets.append((lo, hi))
        return keeper.get(step, lo, hi)

    handle = Mock(held=Called(keeper.held), get=Called(get))
    folder = tmp_path / "checkpoints" / "step-7"
    checkpoints._write(str(folder), {"step": 7, **META}, [], [handle])
    assert gets == shard_bounds(TOTAL, 3), "a whole state fits into no single node"
    _, found = checkpoint.load(folder)
    assert all((shard.arrays["ema"] == 7).all() for shard in found) and len(found) == 3


class Tasks:
    """Stands for Ray's tasks: each ends when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[tuple[Any, ...]] = []
        self.done: set[int] = set()
        monkeypatch.setattr(ray, "remote", lambda function: Mock(options=lambda **named: Mock(remote=self._begin)))
        monkeypatch.setattr(ray, "wait", self._wait)

    def _begin(self, *arguments: Any) -> int:
        self.begun.append(arguments)
        return len(self.begun) - 1

    def _wait(self, references: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        done = [reference for reference in references if reference in self.done][:num_returns]
        return done, [reference for reference in references if reference not in done]


def writer_of(run_dir: Path) -> checkpoints.Writer:
    config = CheckpointConfig(every=10)
    return checkpoints.Writer(run_dir, config, 99, lambda step: {"step": step, **META}, Mock(), Mock())


def snapshot(step: int) -> Snapshot:
    return Snapshot(step=step, generation=1, lo=0, hi=TOTAL, total=TOTAL, shard=f"shard {step}")


def test_writes_that_are_slower_than_their_interval_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, writer = Tasks(monkeypatch), writer_of(tmp_path)
    for step in range(9, 60, 10):
        writer.save(step, [snapshot(step)])
    assert len(tasks.begun) == 1 and writer.due(61), "the next one is taken when the disk is ready"
    tasks.done.add(0)
    writer.poll()
    writer.save(61, [snapshot(61)])
    assert [begun[2] for begun in tasks.begun] == [["shard 9"], ["shard 61"]] and not writer.due(62)
    writer.save(99, [snapshot(99)])
    assert len(tasks.begun) == 3, "the last step is never put off"


def test_the_last_state_never_passes_through_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, writer = Tasks(monkeypatch), writer_of(tmp_path)
    tasks.done.add(0)
    monkeypatch.setattr(ray, "put", Mock(side_effect=AssertionError("a state in the controller")))
    keeper = Mock()
    writer.save_origin(Origin(step=7, keepers=(keeper,), exports=("export",)))
    assert tasks.begun[0][2:] == (["export"], [keeper]) and not keeper.get.remote.called


def state_of(run_dir: Path) -> tuple[RunState, list[Any]]:
    state, told = RunState.__new__(RunState), []  # type: ignore[var-annotated]
    state._run_dir, state._verdicts, state._first, state.survivors = run_dir, {}, None, []
    state._config = Mock(snapshot=SnapshotConfig())
    state.keepers = Mock(silent=(), inventories=lambda patience_s, enough: {})
    state._commits = CommitLog(commit=Mock(), committed=-1)
    state._tell = told.append
    state.standing = Mock(committed=-1)
    return state, told


def test_a_run_starts_from_the_older_checkpoint_when_the_newer_is_damaged_and_says_so(tmp_path: Path) -> None:
    older, damaged, torn = write(tmp_path, 9), write(tmp_path, 19), write(tmp_path, 29)
    path = next(damaged.glob("shard-*"))
    path.write_bytes(bytes(path.stat().st_size))
    (torn / checkpoint.COMPLETE).unlink()
    state, told = state_of(tmp_path)
    origin = state.first()
    assert origin is not None and origin.checkpoint == str(older)
    assert {(type(e), e.folder) for e in told} == {
        (CheckpointDamaged, "step-19"),
        (CheckpointPassedOver, "step-29"),
    }
    assert any(path.name in e.why for e in told)
    assert state.on_disk() == (9, older), "keepers are not let go for a damaged one"
    assert write(tmp_path, 19) == damaged and state.on_disk() == (19, damaged), "written again, it counts again"


def test_the_data_position_is_read_from_a_whole_checkpoint(tmp_path: Path) -> None:
    for step in (9, 19):
        folder = checkpoint.step_folder(checkpoints.root_of(tmp_path), step)
        checkpoints._write(str(folder), {"step": step, "data_token": {"at": step}, **META}, shards(step), [])
    state, _ = state_of(tmp_path)
    state.keepers.standing.return_value.position = None  # type: ignore[attr-defined]
    assert state.data_token() == {"at": 19}
    meta = folder / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"data_token": {"at": 91}}, indent=1))
    state._verdicts.clear()
    assert state.data_token() == {"at": 9}


@pytest.mark.parametrize("kept", [False, True])
def test_steps_that_no_keeper_took_are_committed_by_the_checkpoint_of_the_workers_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    state, asked = state_of(tmp_path)[0], []
    state._commits.committed = 6
    for step in (7, 8):
        state._commits.add(Mock(running=Mock(step=step), snapshots=(Mock(acknowledgements=("never",)),)))
    if kept:
        held = HeldShard(step=8, generation=1, lo=0, hi=TOTAL, total=TOTAL, num_bytes=0)
        state.keepers.inventories = lambda patience_s, enough: {"a": [held]}  # type: ignore[method-assign]

    def exports(world: Any, step: int) -> list[Snapshot]:
        asked.append(step)
        return [Snapshot(step=8, generation=1, lo=0, hi=TOTAL, total=TOTAL, shard="shard 8")]

    monkeypatch.setattr("actors.state.run_state.exports_of", exports)
    state.writer = Mock(save_origin=lambda origin: write(tmp_path, origin.step))
    state.keep_last(("w0",))  # type: ignore[arg-type]
    assert state._commits.committed == 8 and state._commits.commit.call_count == 2  # type: ignore[attr-defined]
    assert asked == ([] if kept else [8]), "workers may be slow to answer: only where they are needed"
