"""What the membership is told of the steps that run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from actors.pool.membership_types import Planned
from actors.run.generations import GenerationManager
from ops.waiting import Patience


def test_a_survivor_may_be_busy_as_long_as_any_step_on_the_workers_allows() -> None:
    """The step behind one that compiles is dispatched with a short limit, while the long one still runs."""
    heard: list[Any] = []
    manager = GenerationManager.__new__(GenerationManager)
    manager.observe = heard.append  # type: ignore[method-assign]
    compiling, next_one = (SimpleNamespace(patience=Patience(limit_s=s, why="")) for s in (1020.0, 120.0))
    manager.dispatched([compiling])  # type: ignore[list-item]
    manager.dispatched([compiling, next_one])  # type: ignore[list-item]
    manager.dispatched([next_one])  # type: ignore[list-item]
    assert heard == [Planned(limit_s=1020.0), Planned(limit_s=1020.0), Planned(limit_s=120.0)]
