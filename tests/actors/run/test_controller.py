"""Parts of the controller that a small run does not bring up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray

from actors.feed.step_source import StepSource
from actors.messages import Origin
from actors.pool.monitor import Monitor
from actors.run.controller import Controller
from actors.state.commit_log import CommitLog
from actors.state.run_state import RunState
from actors.step import CollectedStep, DataLost, GenerationLost, Seat
from data.errors import DataIOError
from ops.geometry import Geometry

ANOTHER_POSITION = {"step": 3}


def test_time_in_which_nobody_was_looked_at_is_held_against_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller.__new__(Controller)
    controller._watched_at, controller._unwatched_s = 100.0, 0.0
    seen = []
    for now in (100.2, 102.0, 702.0, 702.2):  # the data took ten minutes to open
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        seen.append(controller._now())
    assert seen == pytest.approx([100.2, 102.0, 107.0, 107.2])


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
    feeder = source(Mock() if open_ else None)
    state = RunState.__new__(RunState)
    state._token = (lambda step: {"step": step}) if open_ else feeder.token
    state.data_token = lambda: ANOTHER_POSITION  # type: ignore[method-assign]
    found: Mapping[str, Any] | None = state._position_after(7)
    assert found == ({"step": 8} if open_ else ANOTHER_POSITION)


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
    monkeypatch: pytest.MonkeyPatch, keepers: int | None, disk: int | None, expected: str | None
) -> None:
    state = RunState.__new__(RunState)
    state._commits, state.keepers = Mock(committed=7), Mock()
    position = (keepers, {"from": "keepers"}) if keepers is not None else None
    state.keepers.standing.return_value.position = position
    found = (disk, Path("step")) if disk is not None else None
    monkeypatch.setattr(RunState, "on_disk", lambda self: found)
    monkeypatch.setattr(RunState, "_is_damaged", lambda self, folder: False)
    monkeypatch.setattr("actors.state.run_state.load", lambda folder: ({"data_token": {"from": "disk"}}, None))
    assert state.data_token() == ({"from": expected} if expected else None)


@pytest.mark.parametrize("generation", [3, 4])
def test_the_state_a_generation_starts_from_survives_the_commits_on_the_way(
    monkeypatch: pytest.MonkeyPatch, generation: int
) -> None:
    """A loss finds finished steps that nobody has committed yet: they are, when their state is found to be whole."""
    state, collected = RunState.__new__(RunState), Mock(spec=CollectedStep, snapshots=("s7",))
    collected.running.step, collected.running.generation = 7, 3
    found = Mock(spec=Origin, step=7, checkpoint=None)
    monkeypatch.setattr("actors.state.run_state.origin_of", lambda *arguments, **named: found)
    state.keepers, state.writer, state.on_disk = Mock(), Mock(), Mock()  # type: ignore[method-assign]
    state._config = Mock()
    state._first, state.survivors = None, ["export"]  # type: ignore[list-item]
    state._commits = CommitLog(commit=lambda done: state.committed(done, {}), committed=6)
    state._commits.add(Mock(spec=CollectedStep, snapshots=(), running=collected.running))
    assert state.choose(4, ()) is found
    assert state._commits.committed == 7 and state.survivors == ["export"]
    collected.running.generation = generation
    state.committed(collected, {})
    assert bool(state.survivors) == (generation < 4), "the new generation's first commit lets them go"


def test_a_shard_that_died_with_its_worker_is_a_lost_generation_not_a_keeper_to_repair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = RunState.__new__(RunState)
    state.keepers, state._commits, state._repaired_at = Mock(), Mock(), 0.0
    state._config, state._tell = Mock(), Mock()
    answers: dict[str, Any] = {"w0": None, "w1": ray.exceptions.ActorDiedError()}
    world = [Mock(spec=Seat, node="n", handle=Mock()) for _ in answers]
    for seat, name in zip(world, answers, strict=True):
        seat.name = name
        seat.handle.set_keepers.remote.return_value = name

    def get(reference: str) -> Any:
        if isinstance(answers[reference], Exception):
            raise answers[reference]
        return answers[reference]

    monkeypatch.setattr(ray, "wait", lambda references, timeout: (references[:1], references[1:]))
    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(GenerationLost) as lost:
        state.repair_keepers(world, quiet=True)
    assert lost.value.dead == ("w1",) and not state._commits.replace_acknowledgements.called
    answers["w1"] = "newest shard of w1"
    state._repaired_at = 0.0
    state.repair_keepers(world, quiet=True)
    state._commits.replace_acknowledgements.assert_called_once_with(["newest shard of w1"])


def test_a_met_wish_to_stop_does_not_stop_the_next_controller() -> None:
    monitor = Monitor()
    monitor.scale(3)
    monitor.stop("Ctrl-C")
    monitor.stopped()
    assert monitor.report().wishes.stop == "" and monitor.report().wishes.target == 3
