"""Workers for a found schedule: nobody is used twice, and rails are kept for the bags over nodes that come later."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.plan.costs.profile import Profile
from actors.plan.schedule.listing import ListSchedule
from actors.plan.schedule.problem import PlannedJob, PlanOptions, Problem, StepContext
from actors.plan.strategies.search.improve import draw_bag, realise
from actors.plan.strategies.search.space import SearchResult
from actors.plan.types import Cluster, Item, places_in

CLUSTER = Cluster(nodes=(8, 8), places=places_in((8, 8), rails="AABBCCDD"))
PENALTY_S = 0.2  # of a bag over nodes without a common rail


@pytest.fixture(scope="module")
def problem(h100: Profile) -> Problem:
    item = Item(id="a", batch=1, frames=13, height=720, width=1280, text_tokens=100)
    return Problem([[item]], h100, CLUSTER, PlanOptions())


def found(*rows: tuple[float, int, tuple[int, ...]], seconds: float = 1.0) -> tuple[list[PlannedJob], SearchResult]:
    """A schedule of unrelated jobs (start, degree, nodes), each as long."""
    jobs = [
        PlannedJob("dit", 0, (0, "a"), 0, 1, ((degree, seconds),), [], ((degree, PENALTY_S),)) for _, degree, _ in rows
    ]
    end = max(start for start, _, _ in rows) + seconds
    return jobs, SearchResult(
        end,
        end,
        list(range(len(rows))),
        [degree for _, degree, _ in rows],
        [nodes for _, _, nodes in rows],
        [start for start, _, _ in rows],
        0,
    )


def test_a_bag_over_nodes_uses_the_same_rails_on_each(problem: Problem) -> None:
    for seed in range(20):
        jobs, plan = found((0.0, 12, (0, 1)))
        bag = draw_bag(ListSchedule(problem, jobs), 0, plan, random.Random(seed))
        assert len(bag) == 12 and problem.topology.overlap(bag) == 1.0


def test_whole_rails_stay_free_beside_small_jobs(problem: Problem) -> None:
    """Two jobs of 2 leave three whole rails on each node for the bag of 12, if they take a rail each and the same."""
    jobs, plan = found((0.0, 2, (0,)), (0.0, 2, (1,)), (0.0, 12, (0, 1)))
    plan.makespan = 1.0 + PENALTY_S * problem.topology.least_fall
    schedule = realise(problem, jobs, StepContext.idle(16), plan, 10.0)
    assert problem.topology.overlap(schedule.where[2]) == 1.0
    assert max(schedule.end) == pytest.approx(plan.makespan)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.5]), st.sampled_from([1, 2, 4, 6, 8, 12, 16])),
        min_size=1,
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_a_drawn_bag_has_its_size_on_its_nodes_whatever_is_busy(
    problem: Problem, rows: list[tuple[float, int]], source: random.Random
) -> None:
    jobs, plan = found(*[(start, degree, (0, 1) if degree > 8 else (source.randrange(2),)) for start, degree in rows])
    schedule = ListSchedule(problem, jobs)
    for index in plan.order:
        bag = draw_bag(schedule, index, plan, source)
        assert len(set(bag)) == plan.degree[index]
        assert {problem.topology.node[w] for w in bag} == set(plan.nodes[index])
        schedule.fix(index, bag)
