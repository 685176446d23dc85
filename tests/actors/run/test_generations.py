"""What the membership learns of the steps that run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from actors.plan.types import Cluster
from actors.pool.membership_types import Form, LeaveOut, Planned
from actors.records.events import GenerationFormed, RunEvent, WeightsFetched, WorkersLeftOut
from actors.run.generations import GenerationManager
from ops.waiting import Patience
from tests.actors.fakes import Handle, config_of


def test_a_survivor_may_be_busy_as_long_as_any_step_on_the_workers_allows() -> None:
    """The step after one that compiles is dispatched with a short limit, while the long one still runs."""
    heard: list[Any] = []
    manager = GenerationManager.__new__(GenerationManager)
    manager.observe = heard.append  # type: ignore[method-assign]
    compiling, next_one = (SimpleNamespace(patience=Patience(limit_s=s, why="")) for s in (1020.0, 120.0))
    manager.dispatched([compiling])  # type: ignore[list-item]
    manager.dispatched([compiling, next_one])  # type: ignore[list-item]
    manager.dispatched([next_one])  # type: ignore[list-item]
    assert heard == [Planned(limit_s=1020.0), Planned(limit_s=1020.0), Planned(limit_s=120.0)]


def test_that_weights_are_fetched_by_itself_is_told_once() -> None:
    """One worker without room is enough: all do as it does."""
    told: list[RunEvent] = []
    infos: Any = (
        SimpleNamespace(gradients="node", parameters="replicated", host_weights_gib=0.0),
        SimpleNamespace(gradients="node", parameters="node", host_weights_gib=56.8),
    )
    world = [SimpleNamespace(name=name) for name in ("w0", "w1")]
    runner = SimpleNamespace(world=world, cluster=Cluster(nodes=(2,)), next_step=0)
    manager: Any = GenerationManager.__new__(GenerationManager)
    manager.runner, manager._told_of_fetching, manager._told_of_cluster = None, False, None
    manager.forming = SimpleNamespace(form=lambda decision: runner)
    manager.committer = SimpleNamespace(account=SimpleNamespace(begin=lambda started: None))
    manager.events = SimpleNamespace(tell=told.append)
    manager.config = config_of()
    for generation in (1, 2):
        manager._form(Form(generation=generation, workers=(0, 1), infos=infos, reason="", clean=False))
    assert [type(event) for event in told] == [GenerationFormed, WeightsFetched, GenerationFormed]
    assert [event.parameters for event in told if isinstance(event, GenerationFormed)] == ["node", "node"]
    assert "56.80 GiB" in told[1].describe() and "no GPU has run this" in told[1].describe()


def test_who_is_left_out_gives_back_what_it_has_of_the_last_generation() -> None:
    told: list[RunEvent] = []
    asked = {name: Handle() for name in ("w0", "w2")}
    manager: Any = GenerationManager.__new__(GenerationManager)
    manager.pool, manager.events = SimpleNamespace(handle=asked.__getitem__), SimpleNamespace(tell=told.append)
    manager._apply(LeaveOut(workers=(0, 2), why="a clip of some bucket needs 6.6 GiB"))
    assert [handle.hand_over.asked for handle in asked.values()] == [[(None,)], [(None,)]]
    assert told == [WorkersLeftOut(workers=("w0", "w2"), why="a clip of some bucket needs 6.6 GiB")]
    assert told[0].describe() == "w0, w2 wait until others come or go: a clip of some bucket needs 6.6 GiB"
