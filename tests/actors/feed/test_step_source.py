"""What becomes of the feeder's errors on their way to the controller."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray

from actors.plan.types import Item
from actors.step import DataLost, DrawnItem, StepBatches, StepItems
from data.errors import DataIOError, DataUnreachable
from tests.actors.fakes import Handle, source_of


def failing(error: Exception) -> Any:
    """Ray's `get` that raises."""

    def get(reference: object, timeout: float | None = None) -> None:
        raise error

    return get


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
    monkeypatch.setattr(ray, "get", failing(error))
    with pytest.raises(DataLost):
        source_of(Handle()).token(3)


def test_storage_that_fails_keeps_its_name_on_the_way_to_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = ray.exceptions.RayTaskError("items", "traceback", DataIOError("storage: no answer from s3"))
    monkeypatch.setattr(ray, "get", failing(failed))
    with pytest.raises(DataIOError, match="no answer"):
        source_of(Handle()).token(3)


def test_data_that_could_not_be_opened_is_told_of_again_by_its_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who opens it while a generation forms cannot wait there."""
    failed = ray.exceptions.RayTaskError("start", "traceback", DataUnreachable("stat /nfs/0.tar: no answer"))
    monkeypatch.setattr(ray, "wait", lambda asked, num_returns, timeout: (asked, []))
    monkeypatch.setattr(ray, "get", failing(failed))
    monkeypatch.setattr(ray, "kill", lambda handle, no_restart: None)
    source = source_of(Handle(start=lambda *given: "started"))
    for call in (lambda: source.open(3), lambda: source.has(3)):
        with pytest.raises(DataUnreachable, match="no answer"):
            call()
    monkeypatch.setattr(ray, "get", lambda reference, timeout=None: reference)
    source.open(3)
    assert source.has(3)


def test_a_step_that_cannot_be_read_is_told_at_once_also_while_the_next_one_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feeder = Handle(items=lambda step: f"items {step}", batches=lambda step: f"batches {step}")
    done = ["items 3", "items 4", "batches 3"]  # the batches of step 4 never come
    monkeypatch.setattr(ray, "wait", lambda asked, num_returns, timeout: (done, [a for a in asked if a not in done]))

    def get(reference: str, timeout: float) -> None:
        if reference == "batches 3":
            raise ray.exceptions.RayTaskError("batches", "traceback", DataIOError("00001.tar is gone"))

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(DataIOError, match=r"00001\.tar"):
        source_of(feeder).has(3)


def test_the_samples_of_a_step_are_made_once_and_before_it_is_dispatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are thousands on a large cluster: the planner is asked while the step before runs."""
    plan = Item(id="s3.0", batch=2, frames=5, height=32, width=48)
    batches = StepBatches(references=("pixels",), position={"step": 4})  # type: ignore[arg-type]
    feeder = Handle(items=lambda step: (DrawnItem(plan=plan, keys=("0/0/1", "0/0/7")),), batches=lambda step: batches)
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference)
    source, made = source_of(feeder), StepItems.of
    asked: list[int] = []
    monkeypatch.setattr(StepItems, "of", lambda step, *given: asked.append(step) or made(step, *given))
    assert source.items(3) == (plan,) and asked == [3]
    data = source.data(3)
    assert asked == [3] and data.batches == {"s3.0": "pixels"}
    assert [(s.key, s.weight) for s in data.items.items["s3.0"].samples] == [("0/0/1", 0.5), ("0/0/7", 0.5)]
    assert source.items(3) == (plan,) and asked == [3]


def test_steps_that_an_earlier_feeder_has_told_keep_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feeder that begins again at the last committed step finds steps on the workers that were asked for before."""
    monkeypatch.setattr("actors.feed.step_source.wait", lambda asked, timeout: (asked, []))
    monkeypatch.setattr(ray, "get", lambda reference, timeout=None: {})
    monkeypatch.setattr("actors.feed.step_source.kill", lambda actor: None)
    monkeypatch.setattr("actors.feed.step_source.kill_process", lambda process: None)
    source = source_of(Handle())
    source._make = Handle
    source.open(3)
    assert source.next_unasked == 3
    for step in (3, 4, 5):
        source.request(step)
    source.open(4)
    assert source.next_unasked == 6
    source.open(8)
    assert source.next_unasked == 8


@pytest.mark.parametrize(("died_after_s", "lost_after_s"), [(20.0, 50.0), (None, None)])
def test_clips_that_do_not_come_after_a_nodes_death_are_lost(
    monkeypatch: pytest.MonkeyPatch, died_after_s: float | None, lost_after_s: float | None
) -> None:
    """Ray Data may wait for ever for what was decoded there. A node that was dead before says nothing."""
    now, opened_at = [1000.0], 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr("actors.feed.step_source.wait", lambda asked, num_returns, timeout: ([], asked))

    def nodes() -> list[Any]:
        alive = died_after_s is None or now[0] - opened_at < died_after_s
        return [{"NodeID": "old", "Alive": False}, {"NodeID": "n1", "Alive": alive}, {"NodeID": "n2", "Alive": True}]

    source = source_of(Handle(items=lambda step: step, batches=lambda step: step))
    source._nodes, source._dead = nodes, {"old"}
    for waited in range(0, 290, 2):
        now[0] = opened_at + waited
        try:
            assert not source.has(3)
        except DataLost as error:
            assert "a node died" in str(error)
            assert lost_after_s is not None and lost_after_s < waited <= lost_after_s + 8
            return
    assert lost_after_s is None


def test_what_is_asked_for_after_a_nodes_death_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr("actors.feed.step_source.wait", lambda asked, num_returns, timeout: ([], asked))
    source = source_of(Handle(items=lambda step: step, batches=lambda step: step))
    source._died_at = 990.0
    for waited in range(0, 250, 10):
        now[0] = 1000.0 + waited
        assert not source.has(3)
