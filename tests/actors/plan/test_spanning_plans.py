"""Every strategy plans with what spanning nodes takes of a load, and its plans are timed by it."""

from __future__ import annotations

import pytest

from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.topology import CrossNode
from actors.plan.registry import STRATEGIES
from actors.plan.schedule.check import check
from actors.plan.schedule.constructive import allot
from actors.plan.schedule.problem import PlanOptions, Problem
from actors.plan.types import ENCODED, Cascade, Cluster, Item
from actors.planning.make_plan import make_plan
from ops.models.wan.config import WanConfig
from tests.actors.plan.options import counted

NODES = Cluster(nodes=(2, 2))
LONG = (81, 480, 832)


def profile_of(cross: CrossNode) -> Profile:
    profile = Profile.from_flops(WanConfig(num_heads=8), tflops=1.0, degrees=(1, 2, 4))
    profile.cross_node = cross
    return profile


def dits(strategy: str, items: list[Item], profile: Profile, **options: object) -> list[Cascade]:
    """The transformer's cascades of a checked plan."""
    plan = make_plan([items], profile, NODES, counted(strategy=strategy, budget_s=0.02, **options))
    check(plan, [items], profile, NODES)
    return [cascade for cascade in plan.steps[0].cascades if cascade.module == "dit"]


def spanning(cascade: Cascade) -> bool:
    return len({worker // 2 for worker in cascade.workers}) > 1


def even() -> float:
    """Seconds for a row at which the clip is as quick on four workers of two nodes as on two of one."""
    two, four = (profile_of(CrossNode()).seconds("dit", Samples.of(1, LONG), degree) for degree in (2, 4))
    return (two - four) / profile_of(CrossNode(row_s=1.0)).penalty("dit", Samples.of(1, LONG), 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_clip_takes_all_nodes_where_its_rows_are_quickly_sent_and_one_where_not(strategy: str) -> None:
    """One clip of a step: four workers are quicker than two unless the link is slow."""
    item = Item(id="a", batch=1, frames=LONG[0], height=LONG[1], width=LONG[2], cached=ENCODED)
    for row_s, degree in ((0.5 * even(), 4), (2.0 * even(), 2)):
        profile = profile_of(CrossNode(row_s=row_s))
        (found,) = dits(strategy, [item], profile)
        assert found.degree == degree
        more = profile.penalty("dit", Samples.of(1, LONG), 4) if degree == 4 else 0.0
        assert found.seconds == pytest.approx(profile.seconds("dit", Samples.of(1, LONG), degree) + more)


@pytest.mark.parametrize("share, degree", [(0.5, 4), (2.0, 2)])
def test_constructive_degrees_for_a_target_that_none_meets_are_the_quickest(share: float, degree: int) -> None:
    item = Item(id="a", batch=1, frames=LONG[0], height=LONG[1], width=LONG[2], cached=ENCODED)
    problem = Problem([[item]], profile_of(CrossNode(row_s=share * even())), NODES, PlanOptions())
    assert allot(problem, problem.jobs(), 0.0) == [degree]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_bag_over_nodes_takes_what_its_parts_send(strategy: str, split: bool) -> None:
    """Batches whole and cut, cascades packed and not; no bag of one node is allowed."""
    profile = profile_of(CrossNode(row_s=2e-4, peer_s=0.05))
    items = [
        Item(id=f"i{n}", batch=batch, frames=frames, height=480, width=832, text_tokens=100 * n, cached=ENCODED)
        for n, (batch, frames) in enumerate(((4, 1), (3, 17), (1, 81)))
    ]
    of = {item.id: item for item in items}
    found = dits(strategy, items, profile, degrees=(4,), split=split)
    assert found and all(spanning(cascade) for cascade in found)
    for cascade in found:
        expected = 0.0
        for name in {part.item for part in cascade.parts}:
            item, count = of[name], sum(part.count for part in cascade.parts if part.item == name)
            shape = "dit", Samples.of_item(item, count), 4
            expected += profile.seconds(*shape) + profile.penalty(*shape)
        once = profile.models["dit"].coefficients[0] + 3 * 0.05  # launches, and a peer's seconds for each of three
        shared = len({part.item for part in cascade.parts}) - 1
        assert cascade.seconds == pytest.approx(expected - shared * once)
