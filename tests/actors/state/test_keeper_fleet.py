"""The controller's questions to its keepers: one that lives is waited for, and keepers lie where copies survive."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray

from actors.config import SnapshotConfig
from actors.names import keeper_name
from actors.outcome import StopRun
from actors.records.events import KeepersRepaired, KeepersSilent, RunEvent, SnapshotsFailed
from actors.state.commit_log import CommitLog
from actors.state.keeper import HeldShard, Standing
from actors.state.keeper_fleet import Keepers, keeper_nodes
from actors.state.run_state import RunState
from actors.state.snapshots import origin_of

ROOM = ("host", 1 << 40)
GONE = ray.exceptions.ActorUnschedulableError("its node is gone")
AWAY = ray.exceptions.ActorUnavailableError("out of reach", b"0" * 16)


class Clock:
    """Time passes while somebody waits; a keeper's answer comes at its time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.asked: list[tuple[str, str]] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(ray, "get", self.get)
        monkeypatch.setattr(ray, "kill", lambda handle: None)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        last = max(reference.at for reference in references)
        self.now = max(self.now, min(self.now + timeout, last))
        done = [reference for reference in references if reference.at <= self.now]
        return done, [reference for reference in references if reference not in done]

    def get(self, reference: Any, timeout: float) -> Any:
        if isinstance(reference.value, Exception):
            raise reference.value
        return reference.value


class Actor:
    """A keeper's handle. `answers` gives (seconds until it answers, what) for every question in turn."""

    def __init__(self, clock: Clock, *answers: tuple[float, Any]) -> None:
        self.clock, self.answers, self.told = clock, list(answers), []  # type: ignore[var-annotated]

    def __getattr__(self, question: str) -> Any:
        return Mock(remote=lambda *arguments: self._called(question, arguments))

    def _called(self, question: str, arguments: tuple[Any, ...]) -> Any:
        if question in ("rollback", "commit", "note"):
            self.told.append((question, *arguments))
            return None
        after, value = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return Mock(spec=["at", "value"], at=self.clock.now + after, value=value)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def keepers_of(actors: Mapping[str, Actor], patience_s: float = 600.0) -> tuple[Keepers, list[str], list[str]]:
    lost: list[str] = []
    slow: list[str] = []
    keepers = Keepers("run", SnapshotConfig(patience_s=patience_s), lost.append, lambda name, s: slow.append(name))
    keepers.find = lambda: dict(keepers._handles)  # type: ignore[method-assign]
    keepers._handles.update(actors)
    return keepers, lost, slow


def held(step: int) -> list[HeldShard]:
    return [HeldShard(step=step, generation=1, lo=0, hi=10, total=10, num_bytes=0)]


def test_a_busy_keeper_is_waited_for_and_only_a_lost_one_is_empty(clock: Clock) -> None:
    keepers, lost, slow = keepers_of(
        {"busy": Actor(clock, (45.0, held(450))), "gone": Actor(clock, (0.0, GONE)), "idle": Actor(clock, (0.1, []))}
    )
    assert keepers.inventories(600.0) == {"busy": held(450), "idle": []}
    assert (lost, slow, keepers.silent) == (["gone"], ["busy"], ())
    assert clock.now < 1060, "no longer than it takes"


def test_a_keeper_out_of_reach_is_asked_again(clock: Clock) -> None:
    keepers, lost, _ = keepers_of({"a": Actor(clock, (0.0, AWAY), (0.0, AWAY), (1.0, held(7)))})
    assert keepers.inventories(600.0) == {"a": held(7)} and lost == []


def test_waiting_ends_with_the_patience_and_says_who_was_silent(clock: Clock) -> None:
    keepers, lost, _ = keepers_of({"a": Actor(clock, (0.0, held(7))), "frozen": Actor(clock, (1e9, []))})
    assert keepers.inventories(600.0) == {"a": held(7)}
    assert keepers.silent == ("frozen",) and lost == [] and 1600 <= clock.now < 1620


def test_a_frozen_keeper_holds_nobody_up_when_others_hold_the_newest_step(clock: Clock) -> None:
    keepers, _, _ = keepers_of({"a": Actor(clock, (0.0, held(7))), "frozen": Actor(clock, (1e9, []))})
    found = origin_of(keepers, [], None, 600.0, newest=7)
    assert found is not None and found.step == 7 and clock.now < 1020


def state_of(keepers: Keepers, committed: int, on_disk: int) -> tuple[RunState, list[RunEvent]]:
    state, told = RunState.__new__(RunState), []  # type: ignore[var-annotated]
    state.keepers, state._first, state.survivors = keepers, None, []
    state._config = Mock(snapshot=keepers._config)
    state._commits = CommitLog(commit=Mock(), committed=committed)
    state.on_disk = lambda: (on_disk, Path("step"))  # type: ignore[method-assign]
    state._tell = told.append
    state.writer, state._verdicts = Mock(), {(Path("step"), 0): ""}
    state._tell_torn = lambda: None  # type: ignore[method-assign]
    return state, told


def test_a_generation_starts_from_the_state_that_a_busy_keeper_holds(clock: Clock) -> None:
    """The keeper copied a large shard for 14 s: it counted as empty after 10, and its newer state was deleted."""
    busy = Actor(clock, (14.0, held(450)))
    keepers, _, _ = keepers_of({"busy": busy})
    state, told = state_of(keepers, committed=450, on_disk=399)
    origin = state.choose(2, ())
    assert origin is not None and origin.step == 450 and told == []
    assert busy.told == [("rollback", 450, 2)]


def test_what_a_silent_keeper_may_hold_is_neither_passed_over_nor_deleted(clock: Clock) -> None:
    frozen = Actor(clock, (1e9, held(450)))
    keepers, _, _ = keepers_of({"frozen": frozen})
    state, told = state_of(keepers, committed=450, on_disk=399)
    with pytest.raises(StopRun, match=r"frozen may hold the newest state.*snapshot\.patience_s") as stop:
        state.choose(2, ())
    assert stop.value.outcome.code == 75 and [type(event) for event in told] == [KeepersSilent]
    state.keep_last(())
    assert not state.let_go() and frozen.told == [] and not state.writer.save_origin.called


def test_a_controller_does_not_begin_without_the_word_of_a_keeper_that_lives(clock: Clock) -> None:
    keepers, _, _ = keepers_of({"frozen": Actor(clock, (1e9, Standing(committed=450)))})
    state, _ = state_of(keepers, committed=-1, on_disk=399)
    state.standing = keepers.standing(600.0)
    state._silent = keepers.silent
    with pytest.raises(StopRun):
        state.first()
    assert not state.let_go(), "nothing is committed by this controller, and yet they stay"


def test_repair_replaces_the_lost_and_the_long_silent_and_leaves_the_busy(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    keepers, lost, _ = keepers_of({"busy": Actor(clock, (30.0, ROOM)), "gone": Actor(clock, (0.0, GONE))})
    monkeypatch.setattr(keepers, "prepare", Mock())
    keepers.repair(["n"], give_up_s=600.0)
    assert lost == ["gone"] and list(keepers._handles) == ["busy"]
    clock.now += 700
    keepers.repair(["n"], give_up_s=600.0)
    assert lost == ["gone", "busy"]


def test_copies_lie_on_another_living_node_also_when_it_has_no_worker() -> None:
    alive = {"a": 8.0, "b": 2.0, "c": 4.0}
    assert keeper_nodes(["a", "a"], alive, (), copies=1) == ["a", "c"]
    assert keeper_nodes(["a", "a"], alive, {"b"}, copies=1) == ["a", "b"], "where the older keeper is"
    assert keeper_nodes(["a", "b", "a"], alive, (), copies=1) == ["a", "b"]
    assert keeper_nodes(["a", "b"], alive, (), copies=2) == ["a", "b", "c"]
    assert keeper_nodes(["a"], {"a": 1.0}, (), copies=3) == ["a"]


def test_when_all_workers_stand_on_one_node_of_two_its_death_takes_no_shard(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    keepers, _, _ = keepers_of({})
    monkeypatch.setattr("actors.state.keeper_fleet.spawn", lambda name, node, namespace: f"on {node}")
    monkeypatch.setattr(
        ray,
        "nodes",
        lambda: [{"NodeID": n, "Alive": n != "dead", "Resources": {"memory": 1.0}} for n in ("away", "dead", "here")],
    )
    keepers.prepare(["here", "here"])
    assert [keepers.of(rank) for rank in range(2)] == [("on away",), ("on away",)]
    assert list(keepers.in_use().values()) == ["on away"]


def test_a_node_without_workers_that_is_too_small_gets_no_keeper(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head node of a few GB beside the one with all GPUs."""
    sizes, told = {"big": 800.0, "gpus": 900.0, "head": 8.0}, []
    monkeypatch.setattr(
        ray, "nodes", lambda: [{"NodeID": n, "Alive": True, "Resources": {"memory": m}} for n, m in sizes.items()]
    )
    monkeypatch.setattr(
        "actors.state.keeper_fleet.spawn", lambda name, node, namespace: Actor(clock, (0.0, (node, 10)))
    )
    keepers = Keepers("run", SnapshotConfig(), told.append, needs=lambda: 600)
    keepers.find = lambda: dict(keepers._handles)  # type: ignore[method-assign]
    keepers.prepare(["gpus"])
    assert list(keepers._nodes.values()) == ["gpus", "big"] and keepers.of(0) == tuple(keepers.in_use().values())
    assert keepers._placed[0] == (keeper_name("run", "big"),)
    keepers.repair(["gpus"], give_up_s=600.0)  # it is full of something else
    assert keepers._placed[0] == (keeper_name("run", "gpus"),) and told == []


def test_keepers_that_cannot_hold_the_state_end_the_run_with_a_reason(clock: Clock) -> None:
    """It stood still for ever: repaired twice a second, without a word in the events."""
    keepers, _, _ = keepers_of({"full": Actor(clock, (0.0, ROOM))})
    keepers.prepare = Mock()  # type: ignore[method-assign]
    state, told = state_of(keepers, committed=3, on_disk=-1)
    state._repaired_at = 0.0
    state._commits.failure = "MemoryError: the node can spare 1 MiB"
    began, rounds = clock.now, 0
    with pytest.raises(StopRun, match="can spare 1 MiB") as stop:
        while rounds < 10_000:
            state.repair_keepers((), quiet=rounds > 500)
            rounds += 1
    assert stop.value.outcome.code == 1 and clock.now - began < 400
    kinds = [type(event) for event in told]
    assert kinds.count(KeepersRepaired) == 7 and kinds[-1] is SnapshotsFailed


def test_a_commit_forgives_earlier_repairs(clock: Clock) -> None:
    keepers, _, _ = keepers_of({"a": Actor(clock, (0.0, ROOM))})
    keepers.prepare = Mock()  # type: ignore[method-assign]
    state, _ = state_of(keepers, committed=3, on_disk=-1)
    state._repaired_at, state._generation, state._positions = 0.0, 1, {}
    for _ in range(5):
        clock.now += 60
        state.repair_keepers((), quiet=True)
    assert state._repairs == 5
    position = Mock(spec=["at", "value"], at=1e9)
    state.committed(Mock(snapshots=(), running=Mock(step=4, generation=1)), position)
    assert state._repairs == 0
