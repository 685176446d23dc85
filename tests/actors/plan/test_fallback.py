"""The default strategy is never worse than what it can cheaply compute: the plan of knapsack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actors.plan.costs.profile import Profile
from actors.plan.schedule.check import check
from actors.plan.schedule.problem import Problem
from actors.plan.strategies.cascade import plan_horizon
from actors.plan.types import Cascade, Cluster
from actors.planning.make_plan import make_plan
from app.inputs.workload import read_workload
from tests.actors.plan.options import counted

BENCH = Path(__file__).resolve().parents[3] / "configs" / "bench"


@pytest.mark.parametrize(("name", "nodes"), [("B-64gpu", 8), ("C-64gpu", 8), ("A-16gpu", 2)])
def test_cascade_ends_no_later_than_knapsack(name: str, nodes: int, h100: Profile) -> None:
    """With a budget that is too short for the search on 64 GPUs; its first step alone."""
    steps = read_workload(BENCH / f"{name}.json").steps[:1]
    cluster = Cluster(nodes=(8,) * nodes)
    ends = {}
    for strategy in ("cascade", "knapsack"):
        plan = make_plan(steps, h100, cluster, counted(strategy=strategy, budget_s=0.001))
        check(plan, steps, h100, cluster)
        ends[strategy] = plan.steps[0].makespan_s
    assert ends["cascade"] <= ends["knapsack"] + 1e-9


def test_a_search_that_found_little_is_replaced_by_knapsack(h100: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search is replaced by one that puts cascade after cascade; in a run, too, where a clear gain is asked for."""
    steps = read_workload(BENCH / "A-16gpu.json").steps[:1]
    cluster = Cluster(nodes=(8, 8))

    def one_by_one(problem: Problem, seed: int, budget_s: float) -> list[Cascade]:
        end, found = 0.0, []
        for cascade in plan_horizon(problem, seed, 0.0):
            found.append(replace(cascade, start_s=end, end_s=end + cascade.seconds))
            end = found[-1].end_s
        return found

    packed = make_plan(steps, h100, cluster, counted(strategy="knapsack"))
    monkeypatch.setattr("actors.plan.strategies.cascade.plan_horizon", one_by_one)
    for replans in (False, True):
        plan = make_plan(steps, h100, cluster, counted(budget_s=0.2, replans=replans, least_gain=0.1 * replans))
        assert plan.steps[0].makespan_s == pytest.approx(packed.steps[0].makespan_s)
        assert len(plan.steps[0].cascades) == len(packed.steps[0].cascades)
        assert plan.steps[0].planning_s > 0
