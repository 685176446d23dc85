"""What becomes of the feeder's errors on their way to the controller."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray

from actors.feed.growth import Growth
from actors.feed.pulse import ProcessId
from actors.feed.step_source import StepSource
from actors.plan.types import Item
from actors.records.events import FeederRenewed, RunEvent
from actors.step import DataLost, DrawnItem, StepBatches, StepItems
from data.errors import DataIOError, DataUnreachable
from ops.geometry import Geometry
from tests.actors.fakes import Handle, Remote, source_of


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


class Feeders:
    """Those that a source makes, and what has come of what they were asked; references are tuples."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int = 100) -> None:
        self.made: list[Handle] = []
        self.killed: list[Handle] = []
        self.late: set[tuple[object, ...]] = set()  # answers that have not come
        self.failed: dict[tuple[object, ...], Exception] = {}
        self.told: list[RunEvent] = []
        growth = Growth(most_bytes=0, settling_steps=2, steady_steps=1)  # over after three steps
        self.room = 1 << 40
        self.source = StepSource(
            self._make,
            Geometry(),
            "sample",
            steps,
            60.0,
            nodes=list,
            growth=growth,
            tell=self.told.append,
            room=lambda: self.room,
        )
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray, "get", self._get)
        monkeypatch.setattr(ray, "kill", lambda feeder, no_restart: self.killed.append(feeder))

    def _make(self) -> Any:
        number = len(self.made)
        methods = ("prepare", "start", "items", "batches", "pulse")
        answers = {name: lambda *asked, name=name: (number, name, *asked[:1]) for name in methods}
        self.made.append(Handle(**answers))
        return self.made[-1]

    def _wait(
        self, asked: list[Any], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        return [one for one in asked if one not in self.late], [one for one in asked if one in self.late]

    def _get(self, reference: Any, timeout: float | None = None) -> Any:
        assert reference not in self.late, f"nobody may wait for {reference}"
        if reference in self.failed:
            raise self.failed[reference]
        number, name, *of = reference
        if name == "pulse":
            return ProcessId(node="n", pid=number, born="then")
        if name == "items":
            return (DrawnItem(plan=Item(id=f"s{of[0]}.0", batch=1, frames=1, height=32, width=32), keys=("0/0/1",)),)
        if name == "batches":
            mib = (100 if number else 700) + of[0]  # the first one is larger, and all of them grow
            return StepBatches(references=(reference,), position={"step": of[0] + 1}, feeder_bytes=mib << 20)
        return {}

    def run(self, steps: range) -> None:
        """These steps are taken and committed, with two under way."""
        for step in steps:
            assert any(self.source.has(step) for _ in range(3))
            self.source.data(step)
            if step:
                self.source.release(step - 1)

    def asked(self, number: int, name: str) -> list[Any]:
        """The steps for which a feeder's method was called."""
        return [arguments[0] for arguments in getattr(self.made[number], name).asked]


def test_a_feeder_that_opens_its_data_holds_nothing_up_and_takes_over_what_nobody_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feeders = Feeders(monkeypatch)
    feeders.late = {(1, "prepare"), (0, "batches", 8)}
    feeders.source.open(0)
    feeders.run(range(7))
    assert len(feeders.made) == 2 and not feeders.source.has(7)
    assert feeders.asked(0, "batches") == list(range(9)), "the first one goes on"
    feeders.late = {(0, "batches", 8), (1, "start", 9)}
    assert not feeders.source.has(7) and feeders.asked(1, "start") == [], "nobody knows the position before 9"
    feeders.late = {(1, "start", 9)}
    feeders.run(range(7, 8))
    assert feeders.made[1].start.asked == [(9, {"step": 9}, ())]
    assert not feeders.source.has(8) and feeders.source.items(9) is None, "9 waits for who will have it"
    assert feeders.told == [] and feeders.killed == []
    feeders.late = set()
    feeders.run(range(8, 9))
    assert feeders.told == [FeederRenewed(from_step=9, settled_mib=701, grown_mib=707)]
    assert feeders.asked(1, "batches") == [9] and feeders.asked(0, "batches") == list(range(9))
    assert feeders.killed == [], "workers may still read what it has decoded"
    feeders.run(range(9, 10))
    assert feeders.killed == [feeders.made[0]] and feeders.asked(0, "release") == list(range(9))


def test_a_feeder_that_cannot_open_its_data_is_given_up_and_tried_again_after_as_much_growth(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    feeders = Feeders(monkeypatch)
    silent = ray.exceptions.RayTaskError("prepare", "traceback", DataUnreachable("stat /nfs/0.tar: no answer"))
    feeders.failed = {(1, "prepare"): silent, (2, "prepare"): ray.exceptions.ActorDiedError(), (3, "start", 13): silent}
    feeders.source.open(0)
    feeders.run(range(30))
    assert feeders.killed[:3] == feeders.made[1:4] and "stat /nfs/0.tar: no answer" in caplog.text
    first, *later = [event.from_step for event in feeders.told if isinstance(event, FeederRenewed)]
    assert first == 17 and later and feeders.asked(0, "batches") == list(range(17))


def test_growth_of_a_feeder_that_has_taken_over_is_counted_from_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from those of the one before it, of which the last are read after that."""
    feeders = Feeders(monkeypatch)
    feeders.source.open(0)
    feeders.run(range(12))
    assert feeders.told == [
        FeederRenewed(from_step=5, settled_mib=701, grown_mib=703),
        FeederRenewed(from_step=10, settled_mib=106, grown_mib=108),
    ]


def test_data_that_is_opened_anew_ends_all_feeders(monkeypatch: pytest.MonkeyPatch) -> None:
    feeders = Feeders(monkeypatch)
    feeders.late = {(1, "start", 5)}
    feeders.source.open(0)
    feeders.run(range(4))
    assert not feeders.source.has(4) and feeders.source.items(5) is None
    feeders.source.open(4)
    assert feeders.killed == [feeders.made[1], feeders.made[0]]
    feeders.run(range(4, 6))
    assert feeders.asked(2, "batches") == [4, 5, 6], "it is asked for what was held"


def test_no_feeder_takes_over_at_the_end_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    feeders = Feeders(monkeypatch, steps=6)
    feeders.late = {(1, "prepare")}
    feeders.source.open(0)
    feeders.run(range(5))
    feeders.late = set()
    feeders.run(range(5, 6))
    assert feeders.told == [] and feeders.killed == [feeders.made[1]] and len(feeders.made) == 2


def test_sizes_that_are_decided_while_a_feeder_opens_its_data_are_its_sizes_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feeders = Feeders(monkeypatch)
    feeders.late = {(1, "prepare")}
    before: Any = {"from": 2, "sizes": {"1x64x96": 3}}
    meanwhile: Any = {"from": 5, "sizes": {"1x64x96": 4}}
    feeders.source.resize(before)
    feeders.source.open(0)
    feeders.run(range(4))
    feeders.source.resize(meanwhile)
    for feeder in feeders.made:
        assert [record for (record,) in feeder.resize.asked] == [before, meanwhile]
    assert len(feeders.made) == 2


def test_a_feeder_that_freezes_before_it_takes_over_holds_a_run_up_for_no_longer_than_a_silent_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, ended = [1000.0], list[object]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr("actors.feed.step_source.kill_process", lambda *process: ended.append(process))
    feeders = Feeders(monkeypatch)
    feeders.late = {(1, "start", 5)}
    feeders.source.open(0)
    feeders.run(range(4))
    assert not feeders.source.has(4) and not feeders.source.has(4), "it answers and has not started"
    feeders.late.add((1, "pulse"))
    waited = 0
    while not feeders.source.has(4):
        now[0], waited = now[0] + 1.0, waited + 1
        assert waited < 100
    assert waited >= 59 and feeders.killed == [feeders.made[1]] and ended == [("n", 1, "then")]
    assert feeders.asked(0, "batches") == list(range(6)), "the one before it goes on"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_steps_that_have_come_long_ago_are_not_missing_when_a_feeder_takes_over(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of the one before was asked for steps ago, as its position is needed, and is dispatched only then."""
    feeders = Feeders(monkeypatch)
    feeders.source.open(0)
    for step in range(12):
        if step == 4:
            feeders.late = {(1, "batches", 5)}
            assert not feeders.source.has(4) and not feeders.source.has(4), "it has just been asked for"
            feeders.late = set()
        feeders.run(range(step, step + 1))
        clock[0] += 400.0
    assert feeders.told, "one has taken over"


def test_a_feeder_that_does_not_start_is_given_up_and_the_one_before_it_goes_on(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    feeders = Feeders(monkeypatch)
    feeders.late = {(1, "start", 5)}
    feeders.source.open(0)
    feeders.run(range(4))
    waited = 0
    while not feeders.source.has(4):
        feeders.late |= {(0, "batches", 5)} if feeders.killed else set()
        clock[0], waited = clock[0] + 1.0, waited + 1
        if waited > 70:
            feeders.late = set()
    assert feeders.killed == [feeders.made[1]] and 60 <= waited < 75


def test_a_feeder_is_not_renewed_where_two_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    feeders = Feeders(monkeypatch)
    feeders.room = 1 << 30
    feeders.source.open(0)
    feeders.run(range(8))
    assert len(feeders.made) == 1
    feeders.room = 1 << 40
    feeders.run(range(8, 20))
    assert len(feeders.made) > 1


def test_a_feeder_whose_successor_delivers_is_ended_by_its_process_where_it_is_frozen(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []
    monkeypatch.setattr("actors.feed.step_source.kill_process", lambda *process: ended.append(process))
    feeders = Feeders(monkeypatch)
    feeders.late = {(0, "batches", 1)}
    feeders.source.open(0)
    assert not feeders.source.has(0), "it is awaited, and so its process is known"
    feeders.late = set()
    feeders.run(range(5))
    assert feeders.told and feeders.killed == []
    feeders.late = {(0, "pulse")}
    for _ in range(70):
        clock[0] += 1.0
        feeders.source.has(5)
    feeders.run(range(5, 6))
    assert feeders.killed == [feeders.made[0]] and ended == [("n", 0, "then")]


def test_what_a_dead_feeder_has_delivered_is_asked_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pixels were lost with it, also those that the controller has taken already."""
    feeders = Feeders(monkeypatch)
    feeders.source.open(0)
    feeders.run(range(3))
    feeders.source.open(2)
    assert feeders.source.data(2).batches == {"s2.0": (1, "batches", 2)}
    assert feeders.asked(1, "batches") == [2]


def test_a_position_before_the_step_that_a_feeder_begins_at_is_not_that_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feeders = Feeders(monkeypatch)
    feeders.source.open(5, {"step": 3})
    feeders.made[0].token = Remote(lambda step: (0, "token", step))
    feeders.source.token(5)
    assert feeders.asked(0, "token") == [5], "what the feeder has walked to, with its counts"
