"""What the membership learns of the steps that run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.messages import WorkerInfo
from actors.outcome import Events
from actors.plan.types import Cluster
from actors.pool.membership import Membership
from actors.pool.membership_types import (
    Arrival,
    Break,
    Decision,
    Drain,
    End,
    Event,
    Exclusion,
    Form,
    LeaveNotice,
    Limits,
    RecoveredWorker,
    StepDispatch,
    View,
)
from actors.records.events import EnvironmentSeen, GenerationFormed, NodeRests, WeightsFetched, WorkersLeftOut
from actors.run.environment_words import environment_of
from ops.waiting import Patience
from tests.actors.fakes import Handle, Listening, StateHere, controller_of, pool_here


def test_a_survivor_may_be_busy_as_long_as_any_step_on_the_workers_allows() -> None:
    """The step after one that compiles is dispatched with a short limit, while the long one still runs."""

    class Noting(Membership):
        """Decides nothing."""

        def observe(self, events: Sequence[Event], now: float) -> tuple[View, tuple[Decision, ...]]:
            heard.extend(events)
            return self.view(), ()

    heard: list[Event] = []
    manager = controller_of(StateHere(), membership=Noting(Limits(min=1, max=4), generation=1)).generations
    compiling, next_one = (SimpleNamespace(patience=Patience(limit_s=s, why="")) for s in (1020.0, 120.0))
    manager.dispatched([compiling])  # type: ignore[list-item]
    manager.dispatched([compiling, next_one])  # type: ignore[list-item]
    manager.dispatched([next_one])  # type: ignore[list-item]
    assert heard == [StepDispatch(limit_s=1020.0), StepDispatch(limit_s=1020.0), StepDispatch(limit_s=120.0)]


def test_that_weights_are_fetched_by_itself_is_told_once() -> None:
    """One worker without room is enough: all do as it does."""
    infos: Any = (
        SimpleNamespace(gradients="node", parameters="replicated", host_weights_gib=0.0, environment=()),
        SimpleNamespace(gradients="node", parameters="node", host_weights_gib=56.8, environment=()),
    )
    world = [SimpleNamespace(name=name) for name in ("w0", "w1")]
    runner = SimpleNamespace(world=world, cluster=Cluster(nodes=(2,)), next_step=0)
    listener = Listening()
    manager: Any = controller_of(StateHere(), events=Events(listener)).generations
    manager.forming = SimpleNamespace(form=lambda decision: runner)
    for generation in (1, 2):
        manager._form(Form(generation=generation, workers=(0, 1), infos=infos, reason="", clean=False))
    told = listener.told
    assert [type(event) for event in told] == [GenerationFormed, WeightsFetched, GenerationFormed]
    assert [event.parameters for event in told if isinstance(event, GenerationFormed)] == ["node", "node"]
    assert "56.80 GiB" in told[1].describe() and "short runs have done this" in told[1].describe()


def of(host: str, **environment: str) -> WorkerInfo:
    told = tuple(environment.items())
    return WorkerInfo(worker="w", node=host, host=host, pid=1, device="cpu", environment=told)


def test_what_workers_compute_with_is_told_at_every_start_and_where_it_changes(tmp_path: Path) -> None:
    """A start after another controller's knows what that one has told."""
    old, new = {"torch": "2.12", "gpu": "A100"}, {"torch": "2.13", "gpu": "A100"}
    runner = SimpleNamespace(world=[], cluster=Cluster(nodes=(1,)), next_step=7)
    told: list[EnvironmentSeen] = []
    for formed in ([[of("a", **old)], [of("b", **old)]], [[of("a", **old)], [of("a", **old), of("b", **new)]]):
        listener = Listening()
        manager: Any = controller_of(StateHere(), events=Events(listener)).generations
        manager.config = replace(manager.config, run_dir=str(tmp_path))
        manager.forming = SimpleNamespace(form=lambda decision: runner)
        for generation, infos in enumerate(formed, start=1):
            manager._form(Form(generation=generation, workers=(), infos=tuple(infos), reason="", clean=False))
        told += [event for event in listener.told if isinstance(event, EnvironmentSeen)]
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(event.line()) + "\n" for event in told))
    assert [(event.software["torch"], event.hosts, event.changed) for event in told] == [
        ("2.12", ("a",), ()),
        ("2.12", ("a",), ()),
        ("2.12 or 2.13 (b)", ("a", "b"), ("torch 2.12 -> 2.12 or 2.13 (b)",)),
    ]
    assert told[-1].gpus == {"A100": 2} and told[-1].from_step == 7
    assert [bool(event.describe()) for event in told] == [False, False, True]


def test_workers_with_other_files_of_the_program_are_told_with_what_to_do() -> None:
    """A replacement imports what `git pull` has changed in an editable install since the others began."""
    before = environment_of([of("a", heddle="aa11")], 0, None)
    for infos, mixed in (([of("a", heddle="bb22")], False), ([of("a", heddle="aa11"), of("b", heddle="bb22")], True)):
        found = environment_of(infos, 7, before)
        assert found is not None and "step 7 on: heddle aa11 -> " in found.describe()
        assert ("give all nodes the same, or end the run and --resume" in found.describe()) == mixed


@pytest.mark.parametrize(("least", "leaves"), [(1, True), (2, False)])
def test_a_worker_that_computes_wrongly_leaves_where_the_run_has_enough_others(least: int, leaves: bool) -> None:
    listener, membership = Listening(), Membership(Limits(min=least, max=2))
    infos = [WorkerInfo(worker=f"w{n}", node="n", host="h", pid=n, device="cuda:0", gpu=str(n)) for n in (0, 1)]
    membership.observe([Arrival(worker=worker, info=info) for worker, info in enumerate(infos)], 0.0)
    manager = controller_of(StateHere(), membership=membership, events=Events(listener)).generations
    assert manager.distrust("w1") == leaves
    assert [event.describe() for event in listener.told if isinstance(event, NodeRests)] == leaves * [
        "no worker is started on h for 6 h unless the run needs it: GPU 1 of h seems to compute wrongly"
    ]


def test_who_is_left_out_gives_back_what_it_has_of_the_last_generation() -> None:
    asked = {name: Handle() for name in ("w0", "w2")}
    listener = Listening()
    pool = pool_here(handle=asked.__getitem__)
    manager = controller_of(StateHere(), pool=pool, events=Events(listener)).generations
    manager._apply(Exclusion(workers=(0, 2), why="a clip of some bucket needs 6.6 GiB"))
    assert [handle.hand_over.asked for handle in asked.values()] == [[(None,)], [(None,)]]
    (event,) = listener.told
    assert isinstance(event, WorkersLeftOut) and event.workers == ("w0", "w2")
    assert event.describe() == "w0, w2 wait until others come or go: a clip of some bucket needs 6.6 GiB"


@pytest.mark.parametrize(
    ("then", "goes"),
    [
        ({}, False),
        ({"formed": ["w0", "w1"]}, True),
        ({"formed": [RuntimeError("could not")]}, True),
        ({"over": True}, True),
        ({"late_s": 1801.0}, True),
    ],
    ids=str,
)
def test_a_worker_that_leaves_goes_when_the_others_have_formed_and_nobody_waits_for_that(
    monkeypatch: pytest.MonkeyPatch, then: dict[str, Any], goes: bool
) -> None:
    """It may hold state that they still fetch. Who does not answer meanwhile is replaced, and a stop is heard."""
    now, done, looks, removed = [0.0], list[Any](), list[float](), list[str]()

    def look() -> list[Event]:
        looks.append(now[0])
        return []

    monkeypatch.setattr("actors.run.generations.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(
        "actors.run.generations.wait", lambda forming, num_returns, timeout: (done, forming[len(done) :])
    )
    monkeypatch.setattr("actors.run.generations.error_of", lambda one: one if isinstance(one, Exception) else None)
    lookout = SimpleNamespace(look=look)
    pool = pool_here(remove=lambda name, frozen=False: removed.append(name))
    manager: Any = controller_of(StateHere(), pool=pool, lookout=lookout).generations
    manager.runner = SimpleNamespace(forming=["w0", "w1"])
    for worker in (3, 4):
        manager._apply(Drain(worker=worker, reason="leaving"))
    manager.look()
    assert removed == [] and looks == [0.0]
    done += then.get("formed", [])
    now[0] += then.get("late_s", 60.0)
    manager.runner = None if then.get("over") else manager.runner
    manager.look()
    assert removed == (["w3", "w4"] if goes else [])


def test_after_a_clean_end_workers_leave_when_keepers_have_copied_what_they_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their nodes may go with them, and with these the only copy of the newest steps."""
    copied, removed = list[Any](), list[str]()
    monkeypatch.setattr(
        "actors.run.generations.wait",
        lambda held, num_returns, timeout: (copied, [one for one in held if one not in copied]),
    )
    state = StateHere()
    state.take_over = lambda world, step: ["held by a", "held by b"]  # type: ignore[attr-defined]
    pool = pool_here(remove=lambda name, frozen=False: removed.append(name))
    lookout = SimpleNamespace(look=list, try_again=lambda: None)
    manager: Any = controller_of(state, pool=pool, lookout=lookout).generations
    manager.runner = SimpleNamespace(forming=[], world=())
    manager._apply(End(generation=1, reason="w1 leaves", clean=True))
    manager._apply(Drain(worker=1, reason="leaving"))
    copied.append("held by a")
    manager.look()
    assert removed == []
    copied.append("held by b")
    manager.look()
    assert removed == ["w1"]


def test_between_generations_what_leaves_with_its_nodes_is_saved_and_before_others_fetch_it() -> None:
    removed = list[str]()
    state, pool = StateHere(), pool_here(remove=lambda name, frozen=False: removed.append(name))
    state.take_over = lambda world, step: state.asked.extend(["take_over"])  # type: ignore[attr-defined]
    state.save_leaving = lambda committed: state.asked.append(f"save_leaving {committed}")  # type: ignore[method-assign]
    lookout = SimpleNamespace(look=list, try_again=lambda: None)
    manager: Any = controller_of(state, pool=pool, lookout=lookout).generations
    manager.committer.committed = 7
    manager.runner = SimpleNamespace(forming=[], world=())
    manager.look()
    assert state.asked == [], "the workers have it, and take it on"
    manager._apply(End(generation=1, reason="w1 leaves", clean=True))
    assert state.asked == ["take_over", "save_leaving 7"]
    state.writes_leaving = True
    manager._apply(Drain(worker=1, reason="leaving"))
    manager.look()
    assert removed == [] and set(state.asked[2:]) == {"save_leaving 7"}, "its node may leave with it"
    state.writes_leaving = False
    manager.look()
    assert removed == ["w1"]

    state.asked.clear()
    runner = SimpleNamespace(world=[], cluster=Cluster(nodes=(1,)), next_step=8)
    manager.runner = SimpleNamespace(forming=[], world=())

    def form(decision: Form) -> Any:
        state.asked.append("form")
        return runner

    manager.forming = SimpleNamespace(form=form)
    manager._form(Form(generation=2, workers=(0,), infos=(of("a"),), reason="", clean=True))
    assert state.asked == ["take_over", "save_leaving 7", "form"]


@pytest.mark.parametrize("breaks", [False, True], ids=["it waits for more", "its generation breaks meanwhile"])
def test_workers_of_a_run_without_a_generation_stay_until_what_leaves_with_their_node_is_saved(breaks: bool) -> None:
    """They were ended before a checkpoint began, and `heddle workers join` ended the keeper with them."""
    removed, saved = list[str](), list[int]()
    state, pool = StateHere(), pool_here(remove=lambda name, frozen=False: removed.append(name), names=["w1"])

    def save_leaving(committed: int) -> None:
        state.writes_leaving = not saved or state.writes_leaving
        saved.append(committed)

    seen: list[Event] = [Arrival(worker=1, info=of("b"))]
    lookout = SimpleNamespace(look=lambda: seen, try_again=lambda: None, late=lambda: "", frozen={})
    limits = Limits(min=1 if breaks else 2, max=4)
    parts = {"pool": pool, "lookout": lookout, "membership": Membership(limits, generation=1)}
    manager: Any = controller_of(state, **parts).generations
    manager.committer.committed = 7
    runner = SimpleNamespace(world=[], forming=[], cluster=Cluster(nodes=(1,)), next_step=8, running=True)
    manager.forming = SimpleNamespace(form=lambda decision: runner)
    manager.look()
    assert (manager.runner is runner) == breaks
    state.save_leaving = save_leaving  # type: ignore[method-assign]
    seen[:] = [LeaveNotice(worker=1)]
    if breaks:
        manager.survivors = SimpleNamespace(poll=list, part=lambda worker, handle: None)
        manager.pool.handle = lambda name: None
        manager.observe(*seen, Break(generation=manager.view.generation, reason="a peer is gone"))
        seen[:] = [RecoveredWorker(worker=1)]
    manager.look()
    assert removed == [] and set(saved) == {7}
    seen.clear()
    state.writes_leaving = False
    manager.look()
    assert removed == ["w1"]
