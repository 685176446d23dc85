"""Where a run's state is held, which of it is newest, and where the data goes on."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from actors.config import SnapshotConfig
from actors.held_state import HeldShard, Origin
from actors.messages import Handover, WorkerInfo
from actors.outcome import StopRun
from actors.records.events import CheckpointDamaged, CheckpointPassedOver
from actors.state import checkpoint_files as checkpoint
from actors.state.checkpoint_files import root_of
from actors.state.keeper import Standing
from actors.state.keeper_fleet import Base
from actors.state.recovery import CommitLog, KeeperInventory
from actors.state.run_state import StuckCommit
from actors.step import GenerationLost, Seat
from ops.shards import ShardState
from tests.actors.fakes import Handle, KeepersHere, Listening, Writing, collected, snapshot, source_of, state_of
from tests.families.kit import MODEL

ANOTHER_POSITION = {"step": 3}


def held(step: int) -> HeldShard:
    return HeldShard(step=step, generation=3, lo=0, hi=10, total=10, num_bytes=0)


def write_checkpoint(run_dir: Path, step: int, token: dict[str, Any]) -> Path:
    folder = checkpoint.step_folder(root_of(run_dir), step)
    checkpoint.begin(folder)
    shard = ShardState(updates=step, lo=0, hi=4, total=4, arrays={"master": np.zeros(4, np.float32)})
    file = checkpoint.write_shard(folder, shard)
    checkpoint.seal(folder, {"step": step, "data_token": token, "parameters": []}, [(0, 4)], [file])
    return folder


@pytest.mark.parametrize("open_", [True, False])
def test_a_checkpoint_of_a_run_whose_data_is_not_open_has_the_position_that_is_known(open_: bool) -> None:
    keepers = KeepersHere(Standing(committed=7, position=(7, ANOTHER_POSITION)), a=[held(7)])
    positions = SimpleNamespace(token=lambda step: {"step": step}) if open_ else source_of(None)
    written: list[Any] = []
    writer = Writing()
    writer.save_origin = lambda origin, meta: written.append(meta["data_token"])  # type: ignore[method-assign]
    state_of(keepers=keepers, positions=positions, writer=writer, model=MODEL).keep_last((), CommitLog(committed=7))
    assert written == [{"step": 8} if open_ else ANOTHER_POSITION]


@pytest.mark.parametrize(
    ("keepers", "disk", "expected"),
    [
        (7, None, "keepers"),
        (7, 7, "keepers"),
        (7, 5, "keepers"),
        (3, 7, "disk"),
        (3, 5, "disk"),
        (None, 5, "disk"),
        (8, 5, "disk"),
        (3, 8, "keepers"),
        (8, None, None),
        (None, 8, None),
        (5, 8, "keepers"),
        (None, None, None),
    ],
)
def test_data_goes_on_from_the_position_that_is_nearest_to_the_committed_step(
    tmp_path: Path, keepers: int | None, disk: int | None, expected: str | None
) -> None:
    position = (keepers, {"from": "keepers"}) if keepers is not None else None
    if disk is not None:
        write_checkpoint(tmp_path, disk, {"from": "disk"})
    state = state_of(tmp_path, keepers=KeepersHere(Standing(position=position)))
    assert state.data_token(7) == ({"from": expected} if expected else None)


@pytest.mark.parametrize(
    ("seconds", "step", "told"), [(1, 399, []), (1e9, 299, [CheckpointPassedOver])], ids=["for a moment", "for long"]
)
def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, step: int, told: list[type]
) -> None:
    write_checkpoint(tmp_path, 299, {})
    now = keep_bytes(monkeypatch, write_checkpoint(tmp_path, 399, {}), seconds)
    state = state_of(tmp_path, listener=(listener := Listening()))
    origin = state.first()
    assert origin is not None and origin.step == step and listener.kinds == told and now[0] < 100
    waited = now[0]
    assert state.step_on_disk() == step and now[0] == waited, "it is waited for once"
    monkeypatch.undo()
    assert state.step_on_disk() == 399


def test_a_run_whose_only_checkpoint_cannot_be_read_for_long_does_not_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is whole, by its names and sizes: it counted as damaged, for as long as the process lived."""
    keep_bytes(monkeypatch, only := write_checkpoint(tmp_path, 399, {}))
    state = state_of(tmp_path, listener=(listener := Listening()))
    with pytest.raises(OSError, match="Stale file handle"):
        state.first()
    assert listener.kinds == [CheckpointPassedOver] and state.disk.newest() is None
    monkeypatch.undo()
    assert state.disk.newest() == (399, only) and state.recover(CommitLog(committed=399)).step == 399


def test_what_storage_gives_again_and_is_damaged_is_no_state_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, 299, {})
    keep_bytes(monkeypatch, newest := write_checkpoint(tmp_path, 399, {}))
    state = state_of(tmp_path, listener=(listener := Listening()))
    state.first()
    monkeypatch.undo()
    (shard,) = newest.glob("shard-*")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert state.step_on_disk() == 299 and listener.kinds == [CheckpointPassedOver, CheckpointDamaged]


@pytest.mark.parametrize("writes", [True, False], ids=["it is written", "no keeper gives it for that"])
def test_a_run_does_not_jump_to_a_checkpoint_that_it_has_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    """Storage gave it again later: a lost worker brought the run from step 350 to step 399 of an earlier start, and the
    end took that one for what keepers held."""
    write_checkpoint(tmp_path, 299, {})
    keep_bytes(monkeypatch, write_checkpoint(tmp_path, 399, {}))
    keepers = KeepersHere(Standing(committed=-1), a=[held(350)])
    state = state_of(tmp_path, keepers=keepers, writer=(writer := Writing(writes=writes)), model=MODEL)
    origin = state.first()
    assert origin is not None and origin.step == 299
    state.forget_first()
    monkeypatch.undo()
    commits = CommitLog(committed=350)
    recovery = state.recover(commits)
    assert recovery.origin is not None and recovery.step == 350 and recovery.origin.checkpoint is None
    assert state.keep_last((), commits) == (350 if writes else -1) and writer.saved == [350]
    assert not state.free_memory(350), "nothing of that step is on disk yet"


def test_a_checkpoint_that_the_run_has_passed_over_stays_so_for_whoever_goes_on(tmp_path: Path) -> None:
    """The next controller, or a resumed run, took the newest one again, and dropped the steps that were trained since;
    one whose controller was lost counted what its keepers held alone as written."""
    for step in (299, 399):
        write_checkpoint(tmp_path, step, {})
    (tmp_path / "checkpoints" / "step-320").mkdir()
    state = state_of(tmp_path, listener=(listener := Listening()))
    origin = state.first((350, 3))
    assert origin is not None and origin.step == 299
    whys = [event.why for event in listener.told if isinstance(event, CheckpointPassedOver)]
    assert whys == ["it is not complete", "it is later than the newest line of metrics"]

    keepers = KeepersHere(Standing(committed=300), a=[held(350)])
    lost = state_of(tmp_path, keepers=keepers, writer=(writer := Writing(writes=False)), model=MODEL)
    assert lost.keep_last((), CommitLog(committed=300, recorded=(350, 3))) == -1 and writer.saved == [350]
    assert not lost.free_memory(300) and lost.newest_in_memory(300) == 350


def test_a_checkpoint_that_the_run_goes_on_without_is_never_taken_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps later the run came to its step, found it whole, and wrote none: the next start went on from the old one."""
    for step in (299, 399):
        write_checkpoint(tmp_path, step, {"from": "before"})
    torn = checkpoint.step_folder(root_of(tmp_path), 320)
    torn.mkdir()
    state = state_of(tmp_path, model=MODEL)
    state.first((350, 3))
    with monkeypatch.context() as away:
        withhold(away, checkpoint.step_folder(root_of(tmp_path), 399))
        state.open(Origin(step=299, checkpoint="step-299"), 5, [info("w0", "a", 1)])
        assert state.step_on_disk() == 299
    assert state.step_on_disk() == 299, "also when storage gives it again"
    kept = [path.name for path in root_of(tmp_path).iterdir()]
    assert sorted(kept) == ["passed-over-step-399", "step-299", "step-320"]
    state.disk.make_way(399)
    write_checkpoint(tmp_path, 399, {"from": "now"})
    assert state.step_on_disk() == 399 and state.data_token(400) == {"from": "now"}

    state.open(Origin(step=299, checkpoint="step-299"), 6, [info("w0", "a", 1)])
    assert state.step_on_disk() == 299 and (root_of(tmp_path) / "passed-over-step-399-2").is_dir()


@pytest.mark.parametrize("moves", [True, False], ids=["it can be moved", "nothing can"])
def test_what_is_not_given_by_the_time_that_its_step_is_written_is_moved_unseen_and_the_runs_own_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    """Given again a moment later it was whole, and nothing was written. What nothing could move was the run's own."""
    folder = write_checkpoint(tmp_path, 9, {"from": "before"})
    state = state_of(tmp_path, model=MODEL)
    with monkeypatch.context() as away:
        withhold(away, folder)
        if not moves:
            away.setattr(Path, "rename", lambda path, target: path.joinpath("COMPLETE", "x").stat())
        state.open(None, 5, [info("w0", "a", 1)])
        state.disk.make_way(9)
    assert state.disk.unmoved == (set() if moves else {9}) and state.step_on_disk() == -1
    assert checkpoint.begin(folder, anew=not moves)
    write_checkpoint(tmp_path, 9, {"from": "now"})
    state.disk.unmoved.discard(9)  # as the writer does
    assert state.step_on_disk() == 9 and (root_of(tmp_path) / "passed-over-step-9").is_dir()


def test_a_step_of_which_nothing_lay_there_asks_storage_nothing_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage that hangs would hang the controller, too."""
    state = state_of(tmp_path, model=MODEL)
    state.open(None, 5, [info("w0", "a", 1)])
    monkeypatch.setattr("actors.state.checkpoints_on_disk.is_complete", lambda folder: pytest.fail(str(folder)))
    state.disk.make_way(9)


def test_what_the_run_goes_on_without_is_moved_when_storage_lists_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One listing that failed as a generation began, and the run took the old one for its own."""
    for step in (299, 399):
        write_checkpoint(tmp_path, step, {"from": "before"})
    state, listed = state_of(tmp_path, model=MODEL), os.listdir
    assert state.first((350, 3)) == Origin(step=299, checkpoint=str(checkpoint.step_folder(root_of(tmp_path), 299)))
    with monkeypatch.context() as away:

        def given(folder: Any) -> list[str]:
            if Path(folder) == root_of(tmp_path):
                raise OSError(errno.ESTALE, "Stale file handle", str(folder))
            return listed(folder)

        away.setattr(os, "listdir", given)
        state.open(Origin(step=299, checkpoint="step-299"), 5, [info("w0", "a", 1)])
    write_checkpoint(tmp_path, 450, {"from": "an attempt of an earlier controller that becomes whole only now"})
    state.disk.make_way(399)
    assert not checkpoint.step_folder(root_of(tmp_path), 399).exists()
    write_checkpoint(tmp_path, 399, {"from": "now"})
    assert state.step_on_disk() == 399
    there = sorted(path.name for path in root_of(tmp_path).iterdir())
    assert there == ["passed-over-step-399", "passed-over-step-450", "step-299", "step-399"]

    state.open(Origin(step=349, generation=5), 6, [info("w0", "a", 1)])
    assert state.step_on_disk() == 299, "the run has gone back from its own, too"


def test_the_last_state_that_is_written_at_a_step_that_was_passed_over_is_the_runs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ended at the very step of a checkpoint that storage did not give, and which was not moved aside yet: what
    it had just written was."""
    write_checkpoint(tmp_path, 299, {})
    write_checkpoint(tmp_path, 350, {"from": "before"})

    def write(step: int) -> None:
        monkeypatch.undo()
        shutil.rmtree(checkpoint.step_folder(root_of(tmp_path), step), ignore_errors=True)  # as it was torn, for one
        write_checkpoint(tmp_path, step, {"from": "now"})

    keepers = KeepersHere(Standing(committed=-1), a=[held(350)])
    state = state_of(tmp_path, keepers=keepers, writer=Writing(write), model=MODEL)
    withhold(monkeypatch, checkpoint.step_folder(root_of(tmp_path), 350))
    state.first((340, 3))
    state.open(Origin(step=299, checkpoint="step-299"), 5, [info("w0", "a", 1)])
    state.forget_first()
    assert state.keep_last((), CommitLog(committed=350)) == 350 == state.step_on_disk(350)
    assert state.free_memory(350) and state.data_token(350) == {"from": "now"}


def test_no_controller_goes_on_without_a_checkpoint_of_a_later_version(tmp_path: Path) -> None:
    """It began anew, at step 0. One that is later than the metrics was passed over before, and is moved aside whole."""
    folder = write_checkpoint(tmp_path, 299, {})
    marker = folder / checkpoint.COMPLETE
    marker.write_text(json.dumps({**json.loads(marker.read_bytes()), "format": [2, 2]}))
    with pytest.raises(checkpoint.LaterFormat):
        state_of(tmp_path).first((299, 3))
    assert state_of(tmp_path).step_on_disk() == -1, "as long as it is not known"

    write_checkpoint(tmp_path, 199, {})
    state = state_of(tmp_path, model=MODEL, listener=(listener := Listening()))
    assert state.first((250, 3)) == Origin(step=199, checkpoint=str(checkpoint.step_folder(root_of(tmp_path), 199)))
    state.open(Origin(step=199, checkpoint="step-199"), 5, [info("w0", "a", 1)])
    assert "later version" in listener.told[0].why
    assert sorted(path.name for path in root_of(tmp_path).iterdir()) == ["passed-over-step-299", "step-199"]


def test_a_checkpoint_after_the_newest_line_of_metrics_is_used_where_there_is_no_other(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 399, {})
    origin = state_of(tmp_path, listener=(listener := Listening())).first((10, 1))
    assert origin is not None and origin.step == 399 and not listener.kinds


def keep_bytes(monkeypatch: pytest.MonkeyPatch, folder: Path, until: float = math.inf) -> list[float]:
    """Storage says which files of this checkpoint there are, and not what is in them; returns a clock that runs while
    it is waited for."""
    now, read = [0.0], checkpoint._as_it_is

    def stale(path: Path) -> checkpoint.File:
        if path.parent == folder and now[0] < until:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return read(path)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(checkpoint, "_as_it_is", stale)
    return now


def test_a_checkpoint_that_becomes_whole_while_an_older_one_is_read_is_the_one_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, 499, {"from": "499"})
    read = checkpoint._as_it_is

    def slow(path: Path) -> checkpoint.File:
        if path.parent.name == "step-499" and not (path.parent.parent / "step-999").exists():
            write_checkpoint(tmp_path, 999, {"from": "999"})
        return read(path)

    monkeypatch.setattr(checkpoint, "_as_it_is", slow)
    state = state_of(tmp_path)
    assert state.recover(CommitLog(committed=1003)).step == 999 and state.data_token(999) == {"from": "999"}


def test_where_storage_does_not_say_what_it_has_the_keepers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, 7, {})
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now.pop() + seconds))

    def silent(folder: Path) -> list[checkpoint.File]:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", str(folder))

    state = state_of(tmp_path, keepers=(keepers := KeepersHere()))
    with monkeypatch.context() as lost:
        lost.setattr(checkpoint, "_listed", silent)
        assert not state.free_memory(7) and keepers.told == []
    assert state.free_memory(7)


@pytest.mark.parametrize(("step", "goes_on"), [(9, 29), (29, 19)], ids=["an old one", "the newest"])
def test_a_checkpoint_that_storage_does_not_give_for_long_is_passed_over_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, goes_on: int
) -> None:
    """It ended the run with the next lost worker, though keepers held all, and no resume began."""
    folders = {one: write_checkpoint(tmp_path, one, {}) for one in (9, 19, 29)}
    now = withhold(monkeypatch, folders[step])
    listener = Listening()
    begun = state_of(tmp_path, listener=listener, model=MODEL)
    origin = begun.first()
    assert origin is not None and origin.step == goes_on and now[0] < 70
    assert listener.kinds == ([CheckpointPassedOver] if goes_on < step else [])
    running = state_of(tmp_path, listener=listener, keepers=KeepersHere(Standing(committed=40), a=[held(40)]))
    assert running.recover(CommitLog(committed=40)).step == 40 and running.step_on_disk() == goes_on
    waited = now[0]
    assert running.step_on_disk() == goes_on and now[0] == waited, "it is waited for once"
    monkeypatch.undo()
    assert running.step_on_disk() == 29


def test_a_run_whose_checkpoints_storage_does_not_give_does_not_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    withhold(monkeypatch, write_checkpoint(tmp_path, 9, {}))
    with pytest.raises(OSError, match="Input/output error"):
        state_of(tmp_path).first()


def test_a_run_whose_checkpoints_storage_does_not_list_does_not_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on from step 0, and cut its metrics there."""
    write_checkpoint(tmp_path, 9, {})
    now, listed = [0.0], os.listdir

    def given(folder: Any) -> list[str]:
        if Path(folder) == root_of(tmp_path) and now[0] < until:
            raise OSError(errno.ESTALE, "Stale file handle", str(folder))
        return listed(folder)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter(()))  # as since Python 3.13
    monkeypatch.setattr(os, "listdir", given)
    until = 20.0
    origin = state_of(tmp_path).first()
    assert origin is not None and origin.step == 9
    until = 1e9
    with pytest.raises(OSError, match="Stale file handle"):
        state_of(tmp_path).first()


@pytest.mark.parametrize("files", [checkpoint.COMPLETE, "*.safetensors"])
def test_a_run_whose_checkpoint_may_not_be_read_does_not_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str
) -> None:
    """It counted as not complete, or as damaged."""
    (refused,), opened = write_checkpoint(tmp_path, 9, {}).glob(files), open

    def given(name: Any, *more: Any, **named: Any) -> Any:
        if name == refused or name == str(refused):
            raise PermissionError(errno.EACCES, "Permission denied", str(name))
        return opened(name, *more, **named)

    monkeypatch.setattr("builtins.open", given)
    monkeypatch.setattr("io.open", given)
    with pytest.raises(PermissionError, match="Permission denied"):
        state_of(tmp_path).first()
    monkeypatch.undo()
    origin = state_of(tmp_path).first()
    assert origin is not None and origin.step == 9


def withhold(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[float]:
    """Storage does not give this checkpoint; returns a clock that runs while it is waited for."""
    now, listed = [0.0], checkpoint._listed

    def given(asked: Path) -> list[checkpoint.File]:
        if asked == folder:
            raise OSError(errno.EIO, "Input/output error", str(folder / checkpoint.COMPLETE))
        return listed(asked)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(checkpoint, "_listed", given)
    return now


def info(worker: str, node: str, pid: int) -> WorkerInfo:
    return WorkerInfo(worker=worker, node=node, host=node, pid=pid, born=f"b{pid}", device="cpu", lends=7 * pid)


@pytest.mark.parametrize(
    ("origin", "made_in"),
    [(Origin(step=7, generation=3), 3), (Origin(step=7, checkpoint="folder"), 5), (None, 5)],
    ids=["keepers", "checkpoint", "first weights"],
)
def test_keepers_learn_what_a_generation_goes_on_from_and_who_is_in_it(origin: Origin | None, made_in: int) -> None:
    keepers = KeepersHere()
    state = state_of(keepers=keepers, model=MODEL)
    state.open(origin, 5, [info("w0", "a", 1), info("w1", "a", 2), info("w2", "b", 3)])
    total = sum(math.prod(one["shape"]) for one in checkpoint.trained_parameters(MODEL))
    base = Base(
        generation=5,
        step=-1 if origin is None else 7,
        made_in=made_in,
        total=total,
        members={"a": ((1, "b1"), (2, "b2")), "b": ((3, "b3"),)},
    )
    assert keepers.told == [("prepare", ("a", "a", "b"), {"a": (7, 14), "b": (21,)}), ("begin", base)]


@pytest.mark.parametrize(
    ("origin", "at_once"),
    [(Origin(step=7, generation=3), True), (Origin(step=7, checkpoint="folder"), False), (None, False)],
    ids=["keepers", "checkpoint", "first weights"],
)
def test_a_generation_that_goes_on_from_keepers_has_its_state_copied_before_the_next_snapshot_is_due(
    origin: Origin | None, at_once: bool
) -> None:
    """Its ranges are cut anew and lie on one node each: another lost node took the run back to its last checkpoint."""
    state = state_of(model=MODEL, snapshot=SnapshotConfig(every=50))
    state.open(origin, 5, [info("w0", "a", 1), info("w1", "b", 2)])
    assert state.is_exported(8) == at_once
    state.after_commit(collected(8, 5), {})
    assert state.is_exported(9) == at_once and state.is_exported(100)
    state.after_commit(collected(9, 5, snapshot(9, generation=5)), {})
    assert not state.is_exported(10)
    off = state_of(model=MODEL, snapshot=SnapshotConfig(enabled=False))
    off.open(origin, 5, [info("w0", "a", 1)])
    assert not off.is_exported(8)


@pytest.mark.parametrize(
    ("steps", "given", "where"),
    [
        ((), True, "the start"),
        ((299, 399), True, "step 399"),
        ((399,), False, "its newest checkpoint, which storage does not give now"),
    ],
    ids=["no checkpoint", "checkpoints", "withheld"],
)
def test_whoever_may_end_a_silent_keeper_is_told_where_the_run_then_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...], given: bool, where: str
) -> None:
    """It was "from the start" although there was a checkpoint."""
    for step in steps:
        folder = write_checkpoint(tmp_path, step, {})
        if not given:
            withhold(monkeypatch, folder)
    keepers = KeepersHere(Standing(committed=450))
    keepers.silent = ("b",)
    with pytest.raises(StopRun, match=rf"b may hold the newest state.* the run continues from {where}$"):
        state_of(tmp_path, keepers=keepers).first()


def test_whoever_may_end_a_silent_keeper_is_not_told_of_a_start_where_nothing_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_listed(root: Path) -> list[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(root))

    monkeypatch.setattr("actors.state.checkpoints_on_disk.step_folders", not_listed)
    keepers = KeepersHere(Standing(committed=450))
    keepers.silent = ("b",)
    with pytest.raises(StopRun, match=r"from its newest checkpoint, which storage does not give now$"):
        state_of(tmp_path, keepers=keepers).first()


def test_a_checkpoint_of_a_later_version_does_not_hide_that_a_keeper_is_silent(tmp_path: Path) -> None:
    """The error named the checkpoint alone, and whoever ended the keeper lost the newest state."""
    complete = write_checkpoint(tmp_path, 399, {}) / "COMPLETE"
    complete.write_text(json.dumps(json.loads(complete.read_text()) | {"format": [9, 9]}))
    keepers = KeepersHere(Standing(committed=450))
    keepers.silent = ("b",)
    with pytest.raises(StopRun, match=r"may hold the newest state.* with the version of Heddle that wrote it$"):
        state_of(tmp_path, keepers=keepers).first()


class SlowKeepers(KeepersHere):
    """All but the first take long to answer: they are silent where the first one's answer is enough."""

    def inventories(self, patience_s: float, is_enough: Any) -> list[KeeperInventory]:
        first = self._inventories[:1]
        self.silent = ("b",) if is_enough(first) else ()
        return first if self.silent else self._inventories


def test_keepers_are_waited_for_until_they_give_the_step_of_the_newest_line_of_metrics() -> None:
    """They have heard of step 100 alone, which one of them holds: whoever took it dropped the 37 steps after it."""
    halves = {"a": [held(100), replace(held(137), hi=5)], "b": [replace(held(137), lo=5)]}
    for recorded, step in ((None, 100), ((137, 3), 137)):
        keepers = SlowKeepers(Standing(committed=100, generation=3), **halves)
        origin = state_of(keepers=keepers, model=MODEL).first(recorded)
        assert origin is not None and origin.step == step and keepers.silent == (("b",) if recorded is None else ())
        state = state_of(keepers=SlowKeepers(Standing(committed=100, generation=3), **halves), model=MODEL)
        assert state.keep_last((), CommitLog(committed=100, recorded=recorded)) == step


@pytest.mark.parametrize(
    ("on_disk", "recorded", "answers", "frees"),
    [
        (100, (137, 3), False, False),
        (100, (100, 3), False, True),
        (100, None, False, True),
        (137, (137, 3), True, True),
    ],
    ids=["it may hold later steps", "all that counts is on disk", "no step is in doubt", "storage has answered"],
)
def test_where_storage_ends_the_run_a_silent_keeper_that_may_hold_more_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_disk: int,
    recorded: tuple[int, int] | None,
    answers: bool,
    frees: bool,
) -> None:
    """Its silence was taken for having nothing: it was ended with the 37 steps that it held alone, as soon as storage
    answered again."""
    write_checkpoint(tmp_path, on_disk, {})
    keepers = KeepersHere(Standing(committed=100), a=[held(100)] if recorded == (100, 3) else [])
    state = state_of(tmp_path, keepers=keepers, model=MODEL)
    keepers.silent = ("keeper b",)
    commits = CommitLog(committed=100, recorded=recorded)

    def away(until: float = math.inf) -> tuple[int, Path] | None:
        raise OSError(errno.EHOSTUNREACH, "No route to host", str(tmp_path))

    with monkeypatch.context() as lost:
        if answers:
            assert state.keep_last((), commits) == on_disk
        else:
            lost.setattr(state.disk, "newest", away)
            with pytest.raises(OSError, match="No route to host"):
                state.keep_last((), commits)
    assert state.free_memory(100) == frees and keepers.told == ([("close",)] if frees else [])
    assert frees or state.newest_in_memory(100) == 100, "nobody knows of a later one"


def test_finished_steps_that_are_found_to_be_held_are_committed_on_the_way() -> None:
    keepers = KeepersHere(a=[held(7)])
    state = state_of(keepers=keepers)
    finished = collected(7, 3, snapshot(7, generation=3))
    recovery = state.recover(CommitLog(committed=6, finished=(finished,)))
    assert recovery.step == 7 and recovery.newly_safe == (finished,)
    state.after_commit(finished, {})
    assert ("commit", 7) in keepers.told


def test_workers_of_a_clean_end_hand_their_state_to_their_keepers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda reference, timeout=None: reference)
    monkeypatch.setattr(ray, "wait", lambda references, num_returns, timeout: (references, []))
    keepers, steps = KeepersHere(a=[held(8)]), []

    def hand_over(step: int) -> Handover:
        steps.append(step)
        return Handover(worker="w0", snapshot=snapshot(step))

    seat = Seat(name="w0", node="n", handle=Handle(hand_over=hand_over))  # type: ignore[arg-type]
    state = state_of(keepers=keepers)
    assert state.take_over([seat], 8) == []
    assert steps == [8] and keepers.told == [("hold", 8)] and state.recover(CommitLog(committed=8)).step == 8


def test_whoever_copies_what_was_handed_over_for_long_is_not_waited_for_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "get", lambda reference, timeout=None: reference)
    monkeypatch.setattr(ray, "wait", lambda references, num_returns, timeout: (references[:1], references[1:]))
    world: list[Any] = [
        Seat(name=f"w{n}", node="n", handle=Handle(hand_over=lambda step: Handover(worker="", snapshot=snapshot(step))))  # type: ignore[arg-type]
        for n in (0, 1)
    ]
    assert state_of(keepers=KeepersHere()).take_over(world, 8) == ["held 8"]


class Keeping(Writing):
    """Writes what has begun until the test says that it has ended; these steps have before."""

    def __init__(self, *being_written: int) -> None:
        super().__init__()
        self._steps, self._whole = [*being_written], -1

    @property
    def steps(self) -> list[int]:
        return [*self._steps]

    def has(self, step: int) -> bool:
        return step in self._steps or step <= self._whole

    def save(self, version: Origin, meta: Any) -> None:
        super().save(version, meta)
        self._steps.append(version.step)

    def end(self, step: int, whole: bool = True) -> None:
        self._steps.remove(step)
        self._whole = max(self._whole, step if whole else -1)

    def go_back(self, step: int) -> None:
        self._whole = min(self._whole, step)


@pytest.mark.parametrize(
    ("holds", "drained", "begun"),
    [
        ({"a": [8]}, "a", [8]),
        ({"a": [8]}, "", []),
        ({"a": [8], "stays": [8]}, "a", []),
        ({"a": [8], "stays": [3]}, "a", [8]),  # it copies the newest one still
        ({"a": [8], "b": [8]}, "ab", [8]),
        ({"a": [9, 5]}, "a", [5]),  # nothing is written yet that counts step 9
        ({}, "a", []),
    ],
    ids=["the only node", "no notice", "one stays", "one stays, with an older step", "all", "not counted", "nothing"],
)
def test_what_nodes_that_leave_alone_hold_is_written_at_once(
    monkeypatch: pytest.MonkeyPatch, holds: dict[str, list[int]], drained: str, begun: list[int]
) -> None:
    """The only pod with GPUs had a notice of 100 s. Keepers held the state, and went with it while the run waited for
    workers: everything since the last checkpoint was computed again."""

    class OneByOne(KeepersHere):
        """Each answers after the one before."""

        def inventories(self, patience_s: float, is_enough: Any) -> list[KeeperInventory]:
            heard = [self._inventories[:count] for count in range(1, len(self._inventories) + 1)]
            return next(filter(is_enough, heard), self._inventories)

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    keepers = OneByOne(None, **{name: [held(step) for step in steps] for name, steps in holds.items()})
    keepers.on_draining = [*drained]
    state = state_of(keepers=keepers, writer=(writer := Keeping()), model=MODEL)
    for _ in range(3):
        state.save_leaving(8)
        now[0] += 60
    assert [(one.step, one.generation) for one in writer.begun] == [(step, 3) for step in begun], "and once"
    assert keepers.told == [("pin", step) for step in begun]
    assert all(one.keepers and one.checkpoint is None for one in writer.begun)


def test_what_leaves_is_not_written_twice_and_again_when_the_run_has_gone_back(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Keeping(8)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    keepers = KeepersHere(a=[held(8)])
    keepers.on_draining = ["a"]
    state = state_of(keepers=keepers, writer=writer, model=MODEL)
    state.save_leaving(8)
    assert writer.begun == [] and keepers.told == [], "it was due"
    assert state.writes_leaving, "and is written by what leaves"
    writer.end(8)
    assert not state.writes_leaving
    keepers._inventories = KeepersHere(a=[held(9)])._inventories
    for _ in range(2):
        now[0] += 60
        state.save_leaving(9)
        writer.end(9)
        state.open(Origin(step=7, checkpoint="step-7"), 5, [info("w0", "a", 1)])
        assert not state.writes_leaving
    assert [one.step for one in writer.begun] == [9, 9] and keepers.told[0] == ("pin", 9)


def test_what_leaves_is_written_anew_where_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment's ESTALE, and a node with an hour's notice took all steps since the last checkpoint along."""
    now, writer = [100.0], Keeping()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    keepers = KeepersHere(a=[held(8)])
    keepers.on_draining = ["a"]
    state = state_of(keepers=keepers, writer=writer, model=MODEL)
    state.save_leaving(8)
    writer.end(8, whole=False)
    while now[0] < 125:
        now[0] += 1
        state.save_leaving(8)
        assert len(writer.begun) == 1 and state.writes_leaving, "storage has a moment, and the nodes are awaited"
    now[0] = 131.0
    state.save_leaving(8)
    assert [one.step for one in writer.begun] == [8, 8] and state.writes_leaving
    writer.end(8)
    now[0] = 200.0
    state.save_leaving(8)
    assert len(writer.begun) == 2 and not state.writes_leaving


@pytest.mark.parametrize("copied", [True, False], ids=["others hold it by then", "they leave no more"])
def test_nodes_are_not_awaited_for_long_whose_state_nobody_writes_anew(
    monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    now, writer = [100.0], Keeping(8)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    keepers = KeepersHere(a=[held(8)])
    keepers.on_draining = ["a"]
    state = state_of(keepers=keepers, writer=writer, model=MODEL)
    state.save_leaving(8)
    writer.end(8, whole=False)
    if copied:
        keepers._inventories = KeepersHere(a=[held(8)], stays=[held(8)])._inventories
    else:
        keepers.on_draining = []
    now[0] = 140.0
    state.save_leaving(8)
    assert writer.begun == [] and not state.writes_leaving


def test_keepers_are_not_asked_all_the_time_for_what_leaves_but_at_once_when_more_nodes_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second of two nodes that left within 10 s took the state along. One whose keeper was silent kept the
    controller for 10 s, again and again."""
    now, asked = [100.0], list[float]()

    class Slow(KeepersHere):
        def inventories(self, patience_s: float, is_enough: Any) -> list[KeeperInventory]:
            asked.append(now[0])
            now[0] += patience_s
            return super().inventories(patience_s, is_enough)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    keepers = Slow(a=[held(8)], b=[held(8)])
    keepers.on_draining = ["a"]
    state = state_of(keepers=keepers, writer=(writer := Writing()), model=MODEL)
    while now[0] < 125:
        state.save_leaving(8)
        now[0] += 1
    assert asked == [100.0, 120.0] and writer.begun == []
    now[0] = 135.0
    keepers.on_draining = ["a", "b"]
    state.save_leaving(8)
    assert asked[2:] == [135.0] and [one.step for one in writer.begun] == [8]


def test_while_a_checkpoint_is_written_its_version_stays(tmp_path: Path) -> None:
    class Busy(Writing):
        @property
        def steps(self) -> list[int]:
            return [4]

    keepers = KeepersHere()
    state_of(keepers=keepers, writer=Busy()).after_commit(collected(7, 3, snapshot(7)), {})
    assert keepers.told == [("commit", 7, 4)]


def test_a_repair_has_the_newest_shards_held_once_more() -> None:
    keepers = KeepersHere()
    state = state_of(keepers=keepers, model=MODEL)
    state.after_commit(collected(6, 3, snapshot(6)), {})
    keepers.told.clear()
    world = [Seat(name=f"w{n}", node=f"n{n}", handle=Handle()) for n in range(3)]  # type: ignore[arg-type]
    stuck, log = StuckCommit(why="k is gone"), CommitLog(committed=6)
    assert state.repair_keepers(stuck, world, True, log, [snapshot(7)]) == ["held 7"]
    assert keepers.told == [("repair",), ("hold", 6), ("hold", 7)], "also the one that is safe, on one node less"


def test_where_a_nodes_memory_went_with_its_keeper_the_generation_is_lost() -> None:
    keepers = KeepersHere()
    keepers.lost = ["n1"]
    world = [Seat(name=f"w{n}", node=f"n{n}", handle=Handle()) for n in range(3)]  # type: ignore[arg-type]
    with pytest.raises(GenerationLost) as lost:
        stuck = StuckCommit(why="k")
        state_of(keepers=keepers, model=MODEL).repair_keepers(stuck, world, True, CommitLog(committed=6), ())
    assert (lost.value.failures.dead, list(lost.value.failures.failed)) == ([], ["w1"])


def test_where_it_cannot_be_asked_what_keepers_hold_they_stay() -> None:
    """The end of a run whose newest line is later than what it knows to be committed."""

    class Lost(KeepersHere):
        def inventories(self, patience_s: float, is_enough: Any) -> Any:
            raise ray.exceptions.RaySystemError("the head node is gone")

    keepers = Lost()
    state = state_of(keepers=keepers, model=MODEL)
    with pytest.raises(ray.exceptions.RaySystemError):
        state.keep_last((), CommitLog(committed=-1, recorded=(7, 3)))
    assert not state.free_memory(-1) and keepers.told == [], "they may hold step 7"


def test_a_keeper_that_was_silent_once_keeps_no_later_end_from_its_checkpoint() -> None:
    keepers, writer = KeepersHere(a=[held(6)]), Writing()
    state = state_of(keepers=keepers, writer=writer, model=MODEL)
    keepers.silent = ("k",)
    assert state.recover(CommitLog(committed=6, finished=(collected(7, 3),))).step == 6
    keepers.silent = ()
    assert state.keep_last((), CommitLog(committed=6)) == 6 and writer.saved == [6]


def test_a_checkpoint_that_is_being_written_at_the_end_is_waited_for(tmp_path: Path) -> None:
    class Late(Writing):
        def wait(self, look: Any = lambda: None) -> None:
            write_checkpoint(tmp_path, 6, {})

    state = state_of(run_dir=tmp_path, keepers=KeepersHere(a=[held(6)]), writer=Late(writes=False), model=MODEL)
    assert state.keep_last((), CommitLog(committed=6)) == 6
