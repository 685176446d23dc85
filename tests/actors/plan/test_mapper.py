"""The mapper's rules: each chooses the workers it should, and without it the choice is another one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.plan.costs.profile import Profile
from actors.plan.schedule.check import check
from actors.plan.schedule.listing import ListSchedule
from actors.plan.schedule.problem import Mapper, PlannedJob, PlanOptions, Problem, StepContext
from actors.plan.types import Cluster, Item, places_in
from actors.planning.make_plan import make_plan
from app.bench.mapper import MAPPERS
from tests.actors.plan.options import counted

CLUSTER = Cluster(nodes=(8, 8), places=places_in((8, 8), rails="AABBCCDD"))
ITEM = Item(id="a", batch=1, frames=13, height=720, width=1280, text_tokens=100)


def bag(
    h100: Profile, mapper: Mapper, free: dict[int, float], degree: int, nodes: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Workers of a dit of one second, on the given nodes or where it ends first; `free`: busy until then."""
    problem = Problem([[ITEM]], h100, CLUSTER, PlanOptions(mapper=mapper))
    jobs = [PlannedJob("dit", 0, (0, "a"), 0, 1, ((degree, 1.0),))]
    schedule = ListSchedule(problem, jobs, StepContext(tuple(free.get(worker, 0.0) for worker in range(16))))
    if nodes:
        schedule.put(0, degree, nodes)
    else:
        schedule.place(0, degree)
    return schedule.where[0]


def test_a_bag_stays_inside_a_node_unless_nodes_do_not_count(h100: Profile) -> None:
    busy = dict.fromkeys(range(6), 5.0)
    whole = bag(h100, Mapper(), busy, 4)
    assert all(worker >= 8 for worker in whole)
    assert bag(h100, MAPPERS["by number"], busy, 4) == (6, 7, 8, 9)
    assert bag(h100, MAPPERS["without nodes"], dict.fromkeys(range(1, 15), 5.0), 2) == (0, 15)


def test_a_bag_over_nodes_has_common_rails_unless_rails_do_not_count(h100: Profile) -> None:
    busy = {worker: 5.0 for worker in range(8) if worker not in (4, 5)}  # of the first node only rail C is free
    assert bag(h100, Mapper(), busy, 4, nodes=(0, 1)) == (4, 5, 12, 13)
    assert bag(h100, MAPPERS["without rails"], busy, 4, nodes=(0, 1)) == (4, 5, 8, 9)


@pytest.mark.parametrize(("producers", "expected"), [(True, (2, 3)), (False, (6, 7))])
def test_of_equal_workers_those_that_hold_the_inputs_are_taken(
    h100: Profile, producers: bool, expected: tuple[int, ...]
) -> None:
    problem = Problem([[ITEM]], h100, CLUSTER, PlanOptions(mapper=Mapper(producers=producers)))
    encode = PlannedJob("vae", 0, (0, "a"), 0, 1, ((2, 1.0),))
    jobs = [encode, replace(encode, item=(0, "b")), PlannedJob("dit", 0, (0, "a"), 0, 1, ((2, 1.0),), preds=(0,))]
    schedule = ListSchedule(problem, jobs)
    schedule.fix(0, (2, 3))
    schedule.fix(1, (6, 7))
    schedule.put(2, 2, (0,))
    assert schedule.where[2] == expected


@pytest.mark.parametrize("name", MAPPERS)
def test_plans_of_every_mapper_are_legal(h100: Profile, name: str) -> None:
    step = [Item(id=str(frames), batch=1, frames=frames, height=1280, width=720) for frames in (81, 97, 113, 129)]
    plan = make_plan([step], h100, CLUSTER, counted(budget_s=0.05, mapper=MAPPERS[name]))
    check(plan, [step], h100, CLUSTER)
