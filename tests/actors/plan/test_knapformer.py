"""KnapFormer's own rule as a baseline: legal, and never better balanced than knapsack, which starts from it."""

from __future__ import annotations

import random

import pytest

from actors.plan.costs.needs import NeedLine
from actors.plan.costs.profile import Profile
from actors.plan.schedule.check import check
from actors.plan.schedule.problem import PlanOptions
from actors.plan.types import Cluster, Item, Plan
from actors.planning.make_plan import make_plan
from ops.models.wan.config import WanConfig

CLUSTER = Cluster(nodes=(8,))


@pytest.fixture
def flops() -> Profile:
    return Profile.from_flops(WanConfig(num_heads=4))


def mixed(seed: int) -> list[Item]:
    """Images and clips of many lengths."""
    source = random.Random(seed)
    return [
        Item(id=f"i{n}", batch=source.choice((1, 4)), frames=source.choice((1, 17, 65)), height=256, width=448)
        for n in range(12)
    ]


def planned(profile: Profile, strategy: str, items: list[Item], topology: str = "", cluster: Cluster = CLUSTER) -> Plan:
    options = PlanOptions(strategy=strategy, topology=topology)
    plan = make_plan([items], profile, cluster, options)
    check(plan, [items], profile, cluster)
    return plan


@pytest.mark.parametrize("topology", ["g1n8", "g1n4+g4n1", ""])
@pytest.mark.parametrize("seed", range(3))
def test_its_plans_are_legal_and_end_no_earlier_than_those_of_knapsack(
    flops: Profile, topology: str, seed: int
) -> None:
    ends = [planned(flops, s, mixed(seed), topology).steps[0].makespan_s for s in ("knapformer", "knapsack")]
    assert ends[0] >= ends[1] * (1 - 1e-9)


def test_moves_and_swaps_are_worth_something(flops: Profile) -> None:
    steps = [mixed(seed) for seed in range(6)]
    published, ours = (
        sum(planned(flops, strategy, items, "g1n4+g4n1").steps[0].makespan_s for items in steps)
        for strategy in ("knapformer", "knapsack")
    )
    assert published > 1.02 * ours


def test_a_worker_that_would_be_overfilled_runs_its_sequences_in_several_packs(flops: Profile) -> None:
    """The rule gives it the same ones, as it knows no memory; where another topology holds them it is that one."""
    items, roomy = mixed(0), planned(flops, "knapformer", mixed(0), "g1n8")
    flops.needs.predicted["dit", "solo"] = NeedLine(fixed_gib=0.0, gib_per_unit=1.0)
    tight = planned(flops, "knapformer", items, "g1n8", Cluster(nodes=(8,), room_gib=(9000.0,) * 8))
    packs = [[c for c in plan.steps[0].cascades if c.module == "dit"] for plan in (roomy, tight)]
    assert len(packs[0]) == 8 < len(packs[1])
    held = [[sum(c.batch for c in of if c.workers == (worker,)) for worker in range(8)] for of in packs]
    assert held[0] == held[1]
