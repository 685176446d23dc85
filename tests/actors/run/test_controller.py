"""Parts of the controller that a small run does not bring up."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import ray

from actors.clock import PatientClock
from actors.feed.step_source import StepSource
from actors.messages import Origin
from actors.pool.monitor import Monitor
from actors.state import checkpoint_files as checkpoint
from actors.state.checkpoint_writer import root_of
from actors.state.commit_log import CommitLog, Stuck
from actors.state.keeper import HeldShard, Standing
from actors.state.recovery import recovery_from
from actors.state.survivors import Survivors
from actors.step import DataLost, GenerationLost, Seat
from data.errors import DataIOError
from ops.geometry import Geometry
from ops.shards import ShardState
from tests.actors.exactness import MODEL
from tests.actors.fakes import Handle, KeepersHere, Writing, collected, snapshot, state_of

ANOTHER_POSITION = {"step": 3}


def test_time_in_which_nobody_was_looked_at_is_held_against_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    clock, seen = PatientClock(), []
    for now in (100.2, 102.0, 702.0, 702.2):  # the data took ten minutes to open
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        seen.append(clock.now())
    assert seen == pytest.approx([100.2, 102.0, 107.0, 107.2])


def held(step: int) -> HeldShard:
    return HeldShard(step=step, generation=3, lo=0, hi=10, total=10, num_bytes=0)


def write_checkpoint(run_dir: Path, step: int, token: dict[str, Any]) -> None:
    folder = checkpoint.step_folder(root_of(run_dir), step)
    checkpoint.begin(folder)
    shard = ShardState(updates=step, lo=0, hi=4, total=4, arrays={"master": np.zeros(4, np.float32)})
    file = checkpoint.write_shard(folder, shard)
    checkpoint.seal(folder, {"step": step, "data_token": token, "parameters": []}, [(0, 4)], [file])


def source(feeder: Any) -> StepSource:
    made = StepSource(lambda: feeder, Geometry(), "sample", 10, 60.0)
    made._feeder = feeder
    return made


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.ActorDiedError(),
        ray.exceptions.OutOfMemoryError("killed"),
        ray.exceptions.NodeDiedError("gone"),
        ray.exceptions.ActorUnschedulableError("its node is gone"),
    ],
)
def test_a_feeder_that_is_gone_is_lost_data_whatever_ray_calls_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(ray, "get", Mock(side_effect=error))
    with pytest.raises(DataLost):
        source(Mock()).token(3)


def test_storage_that_fails_keeps_its_name_on_the_way_to_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = ray.exceptions.RayTaskError("items", "traceback", DataIOError("storage: no answer from s3"))
    monkeypatch.setattr(ray, "get", Mock(side_effect=failed))
    with pytest.raises(DataIOError, match="no answer"):
        source(Mock()).token(3)


def test_a_step_that_cannot_be_read_is_told_at_once_also_while_the_next_one_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feeder = Mock()
    feeder.items.remote.side_effect = lambda step: f"items {step}"
    feeder.batches.remote.side_effect = lambda step: f"batches {step}"
    done = ["items 3", "items 4", "batches 3"]  # the batches of step 4 never come
    monkeypatch.setattr(ray, "wait", lambda asked, num_returns, timeout: (done, [a for a in asked if a not in done]))

    def get(reference: str, timeout: float) -> None:
        if reference == "batches 3":
            raise ray.exceptions.RayTaskError("batches", "traceback", DataIOError("00001.tar is gone"))

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(DataIOError, match=r"00001\.tar"):
        source(feeder).has(3)


@pytest.mark.parametrize("open_", [True, False])
def test_a_checkpoint_of_a_run_whose_data_is_not_open_has_the_position_that_is_known(open_: bool) -> None:
    keepers = KeepersHere(Standing(committed=7, position=(7, ANOTHER_POSITION)), a=[held(7)])
    positions = SimpleNamespace(token=lambda step: {"step": step}) if open_ else source(None)
    commits, written = CommitLog(committed=7), []
    writer = Writing()
    writer.save_origin = lambda origin, meta: written.append(meta["data_token"])  # type: ignore[method-assign]
    state_of(keepers=keepers, positions=positions, commits=commits, writer=writer, model=MODEL).keep_last(())
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
        (None, None, None),
    ],
)
def test_data_goes_on_from_the_position_that_is_nearest_to_the_committed_step(
    tmp_path: Path, keepers: int | None, disk: int | None, expected: str | None
) -> None:
    position = (keepers, {"from": "keepers"}) if keepers is not None else None
    if disk is not None:
        write_checkpoint(tmp_path, disk, {"from": "disk"})
    commits, kept = CommitLog(committed=7), KeepersHere(Standing(position=position))
    state = state_of(tmp_path, keepers=kept, commits=commits)
    assert state.data_token() == ({"from": expected} if expected else None)


@pytest.mark.parametrize("generation", [3, 4])
def test_the_state_a_generation_starts_from_survives_the_commits_on_the_way(generation: int) -> None:
    """A loss finds finished steps that nobody has committed yet: they are, when their state is found to be whole."""
    commits, survivors, keepers = CommitLog(committed=6), Survivors(), KeepersHere(a=[held(7)])
    state = state_of(keepers=keepers, commits=commits, survivors=survivors)
    commits.add(collected(7, 3))
    survivors.ended(3)
    survivors.part(0, Handle(hand_over=lambda step: "w0"))  # type: ignore[arg-type]
    survivors.exports = (snapshot(7),)
    recovery = state.recover(4, ())
    assert recovery.step == 7 and [done.running.step for done in recovery.newly_safe] == [7]
    for done in recovery.newly_safe:
        commits.commit(done.running.step)
        state.committed(done, {})
    commits.restart(recovery.step)
    state.begin(recovery)
    assert commits.committed == 7 and survivors.exports == (snapshot(7),) and keepers.told == [("rollback", 7, 4)]
    state.committed(collected(8, generation), {})
    assert bool(survivors.exports) == (generation < 4), "the new generation's first commit lets them go"


def test_a_generation_goes_on_from_what_is_held_and_says_what_is_lost() -> None:
    finished = [collected(step, 3) for step in (7, 8)]
    safe = recovery_from(Origin(step=7), 4, 6, finished)
    assert (safe.step, safe.newly_safe, safe.lost_steps) == (7, (finished[0],), 0)
    lost = recovery_from(Origin(step=4), 4, 6, finished)
    assert (lost.step, lost.newly_safe, lost.lost_steps) == (4, (), 2)
    assert recovery_from(None, 4, 6, finished).lost_steps == 7


def test_a_shard_that_died_with_its_worker_is_a_lost_generation_not_a_keeper_to_repair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newest = snapshot(7, "newest shard of w1")
    answers: dict[str, Any] = {"w0": None, "w1": ray.exceptions.ActorDiedError()}
    world = [Seat(name=name, node="n", handle=Handle(set_keepers=lambda given, name=name: name)) for name in answers]  # type: ignore[arg-type]

    def get(reference: str) -> Any:
        if isinstance(answers[reference], Exception):
            raise answers[reference]
        return answers[reference]

    monkeypatch.setattr(ray, "wait", lambda references, num_returns, timeout: (references[:1], references[1:]))
    monkeypatch.setattr(ray, "get", get)
    stuck = Stuck(why="w1 is gone")
    with pytest.raises(GenerationLost) as lost:
        state_of(model=MODEL).repair_keepers(stuck, world, quiet=True)
    assert lost.value.dead == ("w1",)
    answers["w1"] = newest
    assert state_of(model=MODEL).repair_keepers(stuck, world, quiet=True) == [newest]


def test_a_met_wish_to_stop_does_not_stop_the_next_controller() -> None:
    monitor = Monitor()
    monitor.scale(3)
    monitor.stop("Ctrl-C")
    monitor.stopped()
    assert monitor.report().wishes.stop == "" and monitor.report().wishes.target == 3
