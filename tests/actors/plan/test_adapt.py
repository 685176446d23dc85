"""Settings chosen for one number of workers, on another: the nearest that fit, and a plan that is legal."""

from __future__ import annotations

import pytest

from actors.plan.costs.profile import Profile
from actors.plan.schedule.balance import parse_topology
from actors.plan.schedule.check import check
from actors.plan.schedule.problem import PlanOptions
from actors.plan.types import Cluster, Item, PlanError
from actors.planning.adapt import adapted
from actors.planning.make_plan import make_plan
from ops.models.wan.config import WanConfig

SMALL = Profile.from_flops(WanConfig(num_heads=12))
STEP = [Item(id=f"i{number}", batch=2, frames=17, height=64, width=64, text_tokens=20) for number in range(4)]
LONG = [Item(id="a", batch=1, frames=129, height=1280, width=720)]  # from degree 4 on


def workers(count: int) -> Cluster:
    return Cluster(nodes=(count,))


@pytest.mark.parametrize(
    ("topology", "count", "expected"),
    [
        ("g1n2+g2n1", 4, "g1n2+g2n1"),
        ("g1n2+g2n1", 8, "g1n2+g2n1"),
        ("g1n16+g2n4+g4n2", 30, "g1n14+g2n4+g4n2"),
        ("g1n2+g2n1", 3, "g1n1+g2n1"),
        ("g1n2+g2n1", 9, "g1n5+g2n2"),
        ("g2n2", 3, ""),
    ],
)
def test_a_topology_keeps_its_larger_bags(topology: str, count: int, expected: str) -> None:
    options = PlanOptions(strategy="knapsack", topology=topology)
    found, told = adapted(options, [STEP], SMALL, workers(count))
    assert found.topology == expected
    assert bool(told) == (expected != topology)
    assert not told or told[0].endswith(f": {expected or 'one that the planner chooses'} is used")
    assert not expected or sum(parse_topology(expected, count)) <= count


@pytest.mark.parametrize(("wanted", "count", "expected"), [(4, 8, 4), (8, 7, 6), (12, 8, 8), (6, 4, 4), (5, 3, 3)])
def test_a_static_degree_becomes_the_nearest_legal_one(wanted: int, count: int, expected: int) -> None:
    options, told = adapted(PlanOptions(strategy="static", static_degree=wanted), [STEP], SMALL, workers(count))
    assert options.static_degree == expected
    assert bool(told) == (expected != wanted)


def test_what_a_strategy_does_not_use_stays_and_is_not_told() -> None:
    static = PlanOptions(strategy="static", topology="g2n2", static_degree=2)
    knapsack = PlanOptions(strategy="knapsack", topology="g1n3", static_degree=8)
    for options in (static, knapsack):
        assert adapted(options, [STEP], SMALL, workers(3 if options is knapsack else 7)) == (options, ())


def test_degrees_get_the_nearest_one_that_runs_what_none_of_them_can(h100: Profile) -> None:
    options, told = adapted(PlanOptions(degrees=(12,)), [LONG], h100, workers(6))
    assert options.degrees == (6, 12) and "planner.degrees [12] do not fit 6 workers: [6, 12] are used" in told
    assert adapted(PlanOptions(degrees=(12,)), [LONG], h100, workers(12)) == (PlanOptions(degrees=(12,)), ())


@pytest.mark.parametrize("count", range(1, 14))
@pytest.mark.parametrize(
    "options",
    [
        PlanOptions(strategy="knapsack", topology="g1n4+g4n1"),
        PlanOptions(strategy="knapsack", topology="g2n2"),
        PlanOptions(strategy="static", static_degree=4),
        PlanOptions(degrees=(4, 6), budget_s=0.0),
    ],
)
def test_any_number_of_workers_gets_a_legal_plan(options: PlanOptions, count: int) -> None:
    found, _ = adapted(options, [STEP], SMALL, workers(count))
    check(make_plan([STEP], SMALL, workers(count), found), [STEP], SMALL, workers(count))


def test_without_adaptation_the_same_settings_end_the_run() -> None:
    with pytest.raises(PlanError, match="is of 4 workers or a multiple of them, and the cluster has 7"):
        make_plan([STEP], SMALL, workers(7), PlanOptions(strategy="knapsack", topology="g2n2"))


def test_where_no_degree_helps_planning_says_why(h100: Profile) -> None:
    options, told = adapted(PlanOptions(degrees=(8,)), [LONG], h100, workers(2))
    assert options.degrees == (8,) and not told
    with pytest.raises(PlanError, match="Add 2 workers"):
        make_plan([LONG], h100, workers(2), options)
