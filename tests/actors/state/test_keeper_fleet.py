"""The controller's questions to its keepers: one that lives is waited for, and keepers lie where copies survive."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from actors.config import SnapshotConfig
from actors.held_state import HeldShard, Snapshot
from actors.letters import CommitCall
from actors.outcome import Events, StopRun
from actors.records.events import KeeperLost, KeeperSlow, KeepersRepaired, KeepersSilent, RunEvent, SnapshotsFailed
from actors.run.committer import Committer
from actors.state import checkpoint_files as checkpoint
from actors.state.checkpoint_files import root_of
from actors.state.keeper import Standing
from actors.state.keeper_fleet import Base, Keepers, keeper_nodes, keeper_on
from actors.state.recovery import CommitLog
from actors.state.run_state import RunState, StuckCommit
from actors.step import Seat
from ops.shards import ShardState
from tests.actors.fakes import Listening, Remote, collected, snapshot, state_of
from tests.families.kit import MODEL

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
        monkeypatch.setattr(ray, "kill", lambda handle, no_restart: None)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        last = max(reference.at for reference in references)
        self.now = max(self.now, min(self.now + timeout, last))
        done = [reference for reference in references if reference.at <= self.now]
        return done, [reference for reference in references if reference not in done]

    def get(self, reference: Any, timeout: float) -> Any:
        if isinstance(reference, list):
            return [self.get(one, timeout) for one in reference]
        if isinstance(reference.value, Exception):
            raise reference.value
        return reference.value


class Answer:
    """A reference: its value is there at this time."""

    def __init__(self, at: float, value: Any) -> None:
        self.at, self.value = at, value


class Actor:
    """A keeper's handle. `answers` gives (seconds until it answers, what) for every question in turn."""

    def __init__(self, clock: Clock, *answers: tuple[float, Any]) -> None:
        self.clock, self.answers, self.told = clock, list(answers), []  # type: ignore[var-annotated]
        self.adopts = True  # there is memory for it to take over

    def __getattr__(self, question: str) -> Any:
        return Remote(lambda *arguments: self._called(question, arguments))

    def _called(self, question: str, arguments: tuple[Any, ...]) -> Any:
        if question in ("begin", "commit", "put", "hold", "adopt"):
            self.told.append((question, *arguments))
            value = self.answers[0][1]
            return Answer(self.clock.now, value if isinstance(value, Exception) else self.adopts)
        after, value = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return Answer(self.clock.now + after, value)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class FoundHere(Keepers):
    """Its keepers are those of the test, and none is started beside them."""

    def find(self) -> dict[str, Any]:
        return dict(self._handles)

    def prepare(self, worker_nodes: Sequence[str], needs_bytes: int = 0, lenders: Any = None) -> list[str]:
        return []


class Placed(FoundHere):
    """Starts keepers, too."""

    prepare = Keepers.prepare  # type: ignore[assignment]


def keepers_of(actors: Mapping[str, Actor], patience_s: float = 600.0) -> tuple[Keepers, list[str], list[str]]:
    told: dict[type[RunEvent], list[str]] = {KeeperLost: [], KeeperSlow: []}

    def tell(event: Any) -> None:
        told[type(event)].append(event.keeper)

    keepers = FoundHere("run", SnapshotConfig(patience_s=patience_s), tell)
    keepers._handles.update(actors)  # type: ignore[arg-type]
    return keepers, told[KeeperLost], told[KeeperSlow]


def held(step: int) -> list[HeldShard]:
    return [HeldShard(step=step, generation=1, lo=0, hi=10, total=10, num_bytes=0)]


def said(keepers: Keepers) -> dict[str, Sequence[HeldShard]]:
    """What those that answer within ten minutes hold, by name."""
    names = {id(actor): name for name, actor in keepers._handles.items()}
    return {names[id(one.keeper)]: one.shards for one in keepers.inventories(600.0)}


def test_a_busy_keeper_is_waited_for_and_only_a_lost_one_is_empty(clock: Clock) -> None:
    keepers, lost, slow = keepers_of(
        {"busy": Actor(clock, (45.0, held(450))), "gone": Actor(clock, (0.0, GONE)), "idle": Actor(clock, (0.1, []))}
    )
    assert said(keepers) == {"busy": held(450), "idle": []}
    assert (lost, slow, keepers.silent) == (["gone"], ["busy"], ())
    assert clock.now < 1060, "no longer than it takes"


def test_a_keeper_out_of_reach_is_asked_again(clock: Clock) -> None:
    keepers, lost, _ = keepers_of({"a": Actor(clock, (0.0, AWAY), (0.0, AWAY), (1.0, held(7)))})
    assert said(keepers) == {"a": held(7)} and lost == []


def test_waiting_ends_with_the_patience_and_says_who_was_silent(clock: Clock) -> None:
    keepers, lost, _ = keepers_of({"a": Actor(clock, (0.0, held(7))), "frozen": Actor(clock, (1e9, []))})
    assert said(keepers) == {"a": held(7)}
    assert keepers.silent == ("frozen",) and lost == [] and 1600 <= clock.now < 1620


def test_a_frozen_keeper_holds_nobody_up_when_others_hold_the_newest_step(clock: Clock) -> None:
    at_once = (0.0, Standing(committed=7))
    answers, frozen = Actor(clock, at_once, (0.0, held(7))), Actor(clock, at_once, (1e9, []))
    keepers, _, _ = keepers_of({"a": answers, "frozen": frozen})
    recovery = state_of(keepers=keepers).recover(CommitLog(committed=7))
    assert recovery.step == 7 and clock.now < 1020


def behind_disk(tmp_path: Path, keepers: Keepers) -> tuple[RunState, Listening]:
    """The state of a run whose checkpoint after step 399 is on disk, and what it tells."""
    folder = checkpoint.step_folder(root_of(tmp_path), 399)
    checkpoint.begin(folder)
    shard = ShardState(updates=400, lo=0, hi=10, total=10, arrays={"master": np.zeros(10, np.float32)})
    checkpoint.seal(folder, {"step": 399, "parameters": []}, [(0, 10)], [checkpoint.write_shard(folder, shard)])
    listener = Listening()
    return state_of(tmp_path, keepers=keepers, listener=listener, model=MODEL), listener


def test_a_generation_starts_from_the_state_that_a_busy_keeper_holds(clock: Clock, tmp_path: Path) -> None:
    """The keeper copied a large shard for 14 s: it counted as empty after 10, and its newer state was deleted."""
    busy = Actor(clock, (0.0, Standing(committed=450)), (14.0, held(450)))
    keepers, _, _ = keepers_of({"busy": busy})
    state, listener = behind_disk(tmp_path, keepers)
    recovery = state.recover(CommitLog(committed=450))
    assert recovery.step == 450 and listener.told == [] and busy.told == []


def test_what_a_silent_keeper_may_hold_is_neither_passed_over_nor_deleted(clock: Clock, tmp_path: Path) -> None:
    frozen = Actor(clock, (0.0, Standing(committed=450)), (1e9, held(450)))
    keepers, _, _ = keepers_of({"frozen": frozen})
    state, listener = behind_disk(tmp_path, keepers)
    with pytest.raises(StopRun, match=r"frozen may hold the newest state.*snapshot\.patience_s") as stop:
        state.recover(CommitLog(committed=450))
    assert stop.value.outcome.code == 75 and listener.kinds == [KeepersSilent]
    assert state.keep_last((), CommitLog(committed=450)) == -1 and state.writer.saved == []  # type: ignore[attr-defined]
    assert not state.free_memory(450) and frozen.told == []


def test_a_controller_does_not_begin_without_the_word_of_a_keeper_that_lives(clock: Clock, tmp_path: Path) -> None:
    keepers, _, _ = keepers_of({"frozen": Actor(clock, (1e9, Standing(committed=450)))})
    state, _ = behind_disk(tmp_path, keepers)
    with pytest.raises(StopRun):
        state.first()
    assert not state.free_memory(-1), "nothing is committed by this controller, and yet they stay"


def test_repair_replaces_the_lost_and_the_long_silent_and_leaves_the_busy(clock: Clock) -> None:
    keepers, lost, _ = keepers_of({"busy": Actor(clock, (30.0, ROOM)), "gone": Actor(clock, (0.0, GONE))})
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


class Cluster:
    """Nodes, and the keepers that are started there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock, **memory: float) -> None:
        self.memory, self.clock, self.started = memory, clock, {}  # type: ignore[var-annotated]
        self.answers: dict[str, Any] = {}  # of keepers on these nodes, from the next one on
        self.adopt = True
        self.draining: set[str] = set()
        monkeypatch.setattr("actors.state.keeper_fleet.spawn", self._spawn)
        monkeypatch.setattr("actors.state.keeper_fleet.draining_nodes", lambda: frozenset(self.draining))
        monkeypatch.setattr(
            ray,
            "nodes",
            lambda: [
                {"NodeID": node, "Alive": memory > 0, "Resources": {"memory": memory}}
                for node, memory in self.memory.items()
            ],
        )

    def _spawn(self, name: str, node: str, namespace: str) -> Actor:
        self.started.setdefault(node, []).append(Actor(self.clock, (0.0, self.answers.get(node, (node, 1 << 40)))))
        self.newest(node).adopts = self.adopt
        return self.newest(node)

    def newest(self, node: str) -> Actor:
        return self.started[node][-1]


def snapshot_of(rank: int, lo: int, hi: int) -> Snapshot:
    return snapshot(7, total=100, rank=rank, lo=lo, hi=hi)


def base_of(**members: tuple[Any, ...]) -> Base:
    return Base(generation=4, step=6, made_in=3, total=100, members=members)


def test_no_keeper_begins_on_a_node_that_ray_drains_and_copies_leave_it(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts nothing there: the run ended after eight keepers that did not come."""
    cluster, keepers = Cluster(monkeypatch, clock, goes=4.0, here=1.0, stays=2.0), Placed("run", SnapshotConfig())
    assert keepers.prepare(["here"]) == ["here", "goes"]
    cluster.draining.add("goes")
    assert keepers.prepare(["here"]) == ["stays"]
    assert list(keepers.in_use().values()) == [cluster.newest("here"), cluster.newest("stays")]
    cluster.draining.add("stays")
    assert keepers.prepare(["here"]) == [] and list(keepers.in_use().values()) == [cluster.newest("here")]


def test_keepers_on_nodes_that_ray_drains_leave_with_what_they_hold_and_pin_what_is_written(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, keepers = Cluster(monkeypatch, clock, away=1.0, here=1.0), Placed("run", SnapshotConfig())
    cluster.draining = {"here", "another"}
    assert keepers.leaving() == []
    keepers.pin([6])
    keepers.prepare(["here"])
    keepers.begin(base_of())
    keepers.commit(7, {"at": 7}, [5])
    assert keepers.leaving() == [cluster.newest("here")]
    keepers.pin([5, 7])
    assert cluster.newest("here").told[-1] == ("commit", 4, 7, {"at": 7}, (5, 7)), "else as it was told"


def test_a_shard_is_held_on_its_own_node_and_copied_to_another_that_lives(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, keepers = Cluster(monkeypatch, clock, away=1.0, dead=0.0, here=1.0), Placed("run", SnapshotConfig())
    assert keepers.prepare(["here", "here"]) == ["here", "away"]
    here, away = cluster.newest("here"), cluster.newest("away")
    assert [keepers.home(rank) for rank in range(2)] == [here, here]
    assert list(keepers.in_use().values()) == [here, away]
    shards = [snapshot_of(0, 0, 60), snapshot_of(1, 60, 100), snapshot_of(2, 100, 100)]
    assert len(keepers.hold([replace(shards[0], copied="by the device"), *shards[1:]])) == 2  # type: ignore[arg-type]
    assert here.told == [("put", (shards[0], shards[1]))], "what is empty is held by nobody"
    assert away.told == [("hold", [(shards[0], here), (shards[1], here)])]


def test_without_snapshots_nothing_is_copied_and_workers_have_a_home(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, keepers = Cluster(monkeypatch, clock, away=1.0, here=1.0), Placed("run", SnapshotConfig(enabled=False))
    keepers.prepare(["here"])
    assert list(cluster.started) == ["here"] and len(keepers.hold([snapshot_of(0, 0, 100)])) == 1


def test_a_keeper_that_died_is_followed_by_one_that_takes_over_its_nodes_memory(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost, and nothing copied: workers of the node have the memory."""
    cluster, keepers = Cluster(monkeypatch, clock, here=1.0), Placed("run", SnapshotConfig())
    keepers.prepare(["here"], lenders={"here": (5, 6)})
    keepers.begin(base_of(here=((1, "b"),)))
    first = cluster.newest("here")
    assert first.told == [("begin", 4, 6, 3, 100, ((1, "b"),))]
    keepers.commit(7, {"at": 7}, [7])
    first.answers = [(0.0, GONE)]
    assert keepers.gone() == []
    keepers.commit(8, {"at": 8}, [7])
    assert keepers.gone() == [keeper_on("run", "here")]
    assert keepers.repair(["here"], give_up_s=600.0) == []
    second = cluster.newest("here")
    assert second is not first and second.told == [("adopt", (5, 6)), ("commit", 4, 8, {"at": 8}, (7,))]
    assert keepers.gone() == []


def test_memory_that_nobody_lends_any_more_is_lost_with_its_keeper(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, keepers = Cluster(monkeypatch, clock, here=1.0, away=1.0), Placed("run", SnapshotConfig())
    keepers.prepare(["here"], lenders={"here": (5,)})
    keepers.begin(base_of())
    for node in ("here", "away"):
        cluster.newest(node).answers = [(0.0, GONE)]
    cluster.adopt = False
    assert keepers.repair(["here"], give_up_s=600.0) == ["here"], "that for copies begins anew"
    assert cluster.newest("here").told == [("adopt", (5,)), ("begin", 4, 6, 3, 100, ()), ("commit", 4, 6, None, ())]
    assert cluster.newest("away").told == [("begin", 4, 6, 3, 100, ()), ("commit", 4, 6, None, ())]


def test_shards_that_are_given_to_a_lost_keeper_fail_and_do_not_vanish(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, keepers = Cluster(monkeypatch, clock, here=1.0), Placed("run", SnapshotConfig())
    keepers.prepare(["here"])
    lost = cluster.newest("here")
    lost.answers = [(0.0, GONE)]
    assert said(keepers) == {} and not keepers.in_use()
    (answer,) = keepers.hold([snapshot_of(0, 0, 100)])
    assert answer.value is GONE and lost.told[-1][0] == "put"  # type: ignore[attr-defined]


def test_a_dead_node_gets_no_keeper(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, keepers = Cluster(monkeypatch, clock, here=1.0), Placed("run", SnapshotConfig())
    keepers.prepare(["here"], lenders={"here": (5,)})
    cluster.newest("here").answers = [(0.0, GONE)]
    cluster.memory["here"] = 0.0
    assert said(keepers) == {} and len(cluster.started["here"]) == 1


def test_a_node_without_workers_that_is_too_small_gets_no_keeper(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head node of a few GB beside the one with all GPUs."""
    cluster, listener = Cluster(monkeypatch, clock, big=800.0, gpus=900.0, head=8.0), Listening()
    for node in cluster.memory:
        cluster.answers[node] = (node, 10)
    keepers = Placed("run", SnapshotConfig(), listener.on_event)
    keepers.prepare(["gpus"], needs_bytes=600)
    assert list(keepers._nodes.values()) == ["gpus", "big"]
    assert keepers._placed[0] == (keeper_on("run", "big"),)
    keepers.repair(["gpus"], give_up_s=600.0, needs_bytes=600)  # it is full of something else
    assert keepers._placed[0] == () and listener.told == [] and list(keepers.in_use()) == [keeper_on("run", "gpus")]
    clock.now += 300
    keepers.prepare(["gpus"], needs_bytes=600)
    assert keepers._placed[0] == ()
    clock.now += 301  # and what filled it may be gone
    keepers.prepare(["gpus"], needs_bytes=600)
    assert keepers._placed[0] == (keeper_on("run", "big"),)


def test_copies_go_to_another_node_where_ray_cannot_set_up_a_keeper(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of a submitted job did not fit its disk: each controller asked the same node, until Ray gave up."""
    cluster, keepers = Cluster(monkeypatch, clock, gpus=9.0, full=8.0, spare=4.0), Placed("run", SnapshotConfig())
    cluster.answers["full"] = ray.exceptions.RuntimeEnvSetupError("OSError: [Errno 28] No space left on device")
    for node in ("gpus", "spare"):
        cluster.answers[node] = (node, 1 << 40)
    assert keepers.prepare(["gpus"]) == ["gpus", "full"]
    keepers.begin(base_of())
    assert keepers.rooms(5.0) == [("gpus", 1 << 40)]
    keepers.repair(["gpus"], give_up_s=600.0)
    assert list(keepers.in_use()) == [keeper_on("run", "gpus"), keeper_on("run", "spare")]
    assert {node: len(started) for node, started in cluster.started.items()} == {"gpus": 1, "full": 1, "spare": 1}

    cluster.newest("spare").answers = [(0.0, GONE)]
    keepers.repair(["gpus"], give_up_s=600.0)
    assert len(cluster.started["spare"]) == 2, "a keeper that has died says nothing of its node"
    cluster.memory["spare"], cluster.answers["full"] = 0.0, ("full", 1 << 40)
    clock.now += 601
    cluster.newest("spare").answers = [(0.0, GONE)]
    keepers.repair(["gpus"], give_up_s=600.0)
    assert list(keepers.in_use()) == [keeper_on("run", "gpus"), keeper_on("run", "full")], "there may be room by now"


def test_a_node_with_workers_keeps_its_keeper_however_it_fails(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, keepers = Cluster(monkeypatch, clock, here=1.0), Placed("run", SnapshotConfig())
    keepers.prepare(["here"])
    keepers.begin(base_of())
    cluster.newest("here").answers = [(0.0, ray.exceptions.RuntimeEnvSetupError("no space"))]
    assert keepers.repair(["here"], give_up_s=600.0) == ["here"]
    assert len(cluster.started["here"]) == 2 and keepers.rested() == [] and not keepers._unfit


class WithSpare:
    """A run on one node, whose state was copied to another one until that had no room for it."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self._clock, self.seats = clock, [Seat(name="w0", node="gpus", handle=Remote())]  # type: ignore[arg-type]
        cluster, keepers = Cluster(monkeypatch, clock, gpus=9e9, spare=8e9), Placed("run", SnapshotConfig())
        keepers.prepare(["gpus"])
        gpus, self.spare = cluster.newest("gpus"), cluster.newest("spare")
        gpus.answers, self.spare.answers = [(0.0, Standing()), (0.0, ROOM)], [(0.0, Standing()), (0.0, ("spare", 10))]
        self.listener = listener = Listening()
        state = state_of(keepers=keepers, model=MODEL, listener=listener)
        keepers.begin(base_of())
        account = SimpleNamespace(records=lambda done: (SimpleNamespace(step=done.running.step), []))
        source = SimpleNamespace(release=lambda step: None)
        self.committer = Committer(
            state=state,
            account=account,  # type: ignore[arg-type]
            listener=listener,
            events=Events(listener),
            source=source,  # type: ignore[arg-type]
        )
        self.committer.restart(6)
        assert self.commits(range(7, 8), 1.0) == [7]
        state.repair_keepers(StuckCommit(why="no room"), self.seats, True, self.committer.log, ())

    def commits(self, steps: range, seconds: float) -> list[int]:
        """Steps that are held by the spare node, too."""
        self.spare.told.clear()
        for step in steps:
            self._clock.now += seconds
            self.committer.add(collected(step, 4, snapshot(step, generation=4)))
            self.committer.settle(self.seats, quiet=True)
            assert self.committer.committed == step
        return [shard.step for name, *told in self.spare.told if name == "hold" for shard, _ in told[0]]


def test_a_node_that_had_no_room_gets_copies_again_without_a_change_of_the_pool(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was looked at with the next generation alone: in a calm run nothing was copied for good."""
    run = WithSpare(clock, monkeypatch)
    assert run.commits(range(8, 16), 140.0) == [], "and after ten minutes it is still full"
    run.spare.answers = [(0.0, ROOM)]
    assert run.commits(range(16, 20), 140.0) == [17, 18, 19], "the one that counts by then, and those after it"


def test_a_run_that_waits_for_storage_or_data_is_not_ended_by_a_node_without_room(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try, every ten minutes, counted as a repair that did not help: the eighth ended the run."""
    run = WithSpare(clock, monkeypatch)
    assert run.commits(range(8, 10), 1.0) == []
    run.listener.told.clear()
    run.spare.told.clear()
    until = clock.now + 11 * 3600
    while clock.now < until:
        clock.now += 30
        run.committer.settle(run.seats, quiet=True)
    assert KeepersRepaired not in run.listener.kinds and SnapshotsFailed not in run.listener.kinds
    run.spare.answers = [(0.0, ROOM)]
    clock.now += 700
    run.committer.settle(run.seats, quiet=True)
    assert [name for name, *_ in run.spare.told if name == "hold"] == ["hold"], "the newest state that counts"


def test_keepers_that_cannot_hold_the_state_end_the_run_with_a_reason(clock: Clock) -> None:
    """It stood still for ever: repaired twice a second, without a word in the events."""
    keepers, _, _ = keepers_of({"full": Actor(clock, (0.0, Standing()), (0.0, ROOM))})
    listener, stuck = Listening(), StuckCommit(why="MemoryError: the node can spare 1 MiB")
    state = state_of(keepers=keepers, listener=listener, model=MODEL)
    began, rounds = clock.now, 0
    with pytest.raises(StopRun, match="can spare 1 MiB") as stop:
        while rounds < 10_000:
            state.repair_keepers(stuck, (), rounds > 500, CommitLog(committed=3), ())
            rounds += 1
    assert stop.value.outcome.code == 1 and clock.now - began < 400
    assert listener.kinds.count(KeepersRepaired) == 7 and listener.kinds[-1] is SnapshotsFailed


def test_a_commit_forgives_earlier_repairs(clock: Clock) -> None:
    keepers, _, _ = keepers_of({"a": Actor(clock, (0.0, Standing()), (0.0, ROOM))})
    listener, stuck = Listening(), StuckCommit(why="a keeper is gone")
    state = state_of(keepers=keepers, listener=listener, model=MODEL)

    def repair(times: int) -> list[int]:
        """The numbers of the repairs that are worth a word."""
        told = len(listener.told)
        for _ in range(times):
            clock.now += 60
            state.repair_keepers(stuck, (), True, CommitLog(committed=3), ())
        return [event.repairs for event in listener.told[told:]]

    assert repair(5) == [2, 3, 4, 5]
    state.after_commit(collected(4, 1), {})
    assert repair(2) == [2], "one is everyday"


def test_a_commit_goes_by_relays_and_to_those_whose_relay_is_gone_once_more(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, keepers = Cluster(monkeypatch, clock, a=1.0, b=1.0, c=1.0, d=1.0), Placed("run", SnapshotConfig())
    keepers.prepare(["a", "b", "c", "d"])
    keepers.begin(base_of())
    said: dict[str, Any] = {"ab": [], "c": GONE}
    asked: list[tuple[str, list[str]]] = []

    def relay(name: str) -> Any:
        def commit(call: CommitCall) -> Answer:
            asked.append((name, list(call.keepers)))
            return Answer(clock.now, said[name])

        return SimpleNamespace(commit=Remote(commit))

    relays = {"ab": relay("ab"), "c": relay("c")}
    finder: Any = SimpleNamespace(relay_for=lambda node: relays.get("ab" if node in "ab" else node))
    keepers.commit(7, {"at": 7}, (), finder)
    names = {node: keeper_on("run", node) for node in "abcd"}
    assert asked == [("ab", [names["a"], names["b"]]), ("c", [names["c"]])]
    commit = ("commit", 4, 7, {"at": 7}, ())
    assert [commit in cluster.newest(node).told for node in "abcd"] == [False, False, False, True], "d has no relay"
    assert keepers.gone() == [] and cluster.newest("c").told[-1] == commit, "nobody knows whether c's relay told it"
    assert keepers.gone() == []
    said.update(ab=[names["b"]], c=[])
    keepers.commit(8, {"at": 8}, (), finder)
    assert keepers.gone() == [names["b"]] == keepers.gone(), "until it is replaced"
    said["ab"] = []
    keepers.commit(9, {"at": 9}, (), finder)
    assert keepers.gone() == []


def test_a_commit_that_relays_still_have_when_the_next_generation_begins_is_sent_once_more(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late it is refused: no keeper would know where the data stands, nor that a checkpoint is being written."""
    cluster, keepers = Cluster(monkeypatch, clock, a=1.0), Placed("run", SnapshotConfig())
    keepers.prepare(["a"])
    keepers.begin(base_of())
    answers_s = [600.0, 0.0, 0.0]
    relay = SimpleNamespace(commit=Remote(lambda call: Answer(clock.now + answers_s.pop(0), [])))
    finder: Any = SimpleNamespace(relay_for=lambda node: relay)
    keepers.commit(7, {"at": 7}, (7,), finder)
    base = replace(base_of(), generation=5, step=7, made_in=4)
    keepers.begin(base)
    told, again = cluster.newest("a").told, ("commit", 5, 7, {"at": 7}, (7,))
    assert told[-2:] == [("begin", 5, 7, 4, 100, ()), again]
    keepers.commit(8, {"at": 8}, (7,), finder)
    assert keepers.gone() == [], "the relay has answered"
    keepers.begin(replace(base, generation=6, step=8))
    assert told[-1][:2] == ("begin", 6)
    keepers.commit(9, {"at": 9}, (7,), finder)
    keepers.begin(replace(base, generation=7))
    assert told[-1][:2] == ("begin", 7), "training goes on from an older step"
    assert keepers.repair(["a"], give_up_s=600.0) == [] and told[-1] == ("commit", 7, 7, None, (7,))
