"""A run whose plan changes at every step trains like one worker: every strategy, executed for real."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.plan.costs.profile import Profile
from actors.plan.schedule.problem import PlanOptions
from actors.plan.types import Cascade, Cluster, Item
from actors.planning.make_plan import make_plan, rolling_cut
from actors.run.communicators import Communicators
from ops.models.folders import resolve
from tests.actors.exactness import items_of, make_hosts, one_worker, random_cascades, run_step, train_config
from tests.families.kit import MODEL

STRATEGIES = ("static", "knapsack", "cascade", "genetic", "flexsp", "mixed")
CLUSTER = Cluster(nodes=(2, 2))


def planned(strategy: str, items: list[Item], step: int, profile: Profile) -> list[Cascade]:
    if strategy == "mixed":
        return random_cascades(np.random.default_rng(step), items, CLUSTER.num_workers, step)
    degree = 2 if strategy == "static" else 0
    options = PlanOptions(strategy=strategy, budget_s=0.02, static_degree=degree, counted=True)
    return rolling_cut(make_plan([items], profile, CLUSTER, options, first_step=step, seed=step))


def test_steps_under_changing_plans_have_the_losses_of_one_worker() -> None:
    model, geometry = resolve(MODEL)
    profile = Profile.from_flops(model.dit, model.vae, model.text, geometry)
    hosts, single = make_hosts(4, torch.float32, train_config()), make_hosts(1, torch.float32, train_config())
    rng = np.random.default_rng(11)
    degrees = set()
    for step in range(14):
        items = items_of(rng, 3, step)
        plan = planned(STRATEGIES[step % len(STRATEGIES)], items, step, profile)
        degrees |= {c.degree for c in plan if c.module == "dit"}
        expected = run_step(single, items, one_worker(items, step), step)
        found = run_step(hosts, items, plan, step)
        assert abs(found - expected) < 1e-4, (
            f"step {step} ({STRATEGIES[step % len(STRATEGIES)]}): {found} against {expected}"
        )
    assert {1, 2} <= degrees, f"the strategies used degrees {degrees} only"


@pytest.mark.long
def test_steps_whose_bags_come_and_go_have_the_losses_of_one_worker() -> None:
    """With room for two peers, bags are closed in the middle of steps and between them, and come back."""
    hosts, single = make_hosts(4, torch.float32, train_config()), make_hosts(1, torch.float32, train_config())
    rng, account, left = np.random.default_rng(5), Communicators(2), 0
    for step in range(12):
        items = items_of(rng, 3, step)
        plan = random_cascades(rng, items, CLUSTER.num_workers, step)
        expected = run_step(single, items, one_worker(items, step), step)
        found = run_step(hosts, items, plan, step, account=account)
        assert abs(found - expected) < 1e-4, f"step {step}: {found} against {expected}"
        for rank, host in enumerate(hosts):
            groups = host.executor.groups
            assert groups is not None
            left += sum(groups._lives.values())
            assert account.peers(rank) == sum(len(bag) - 1 for bag in groups._groups if len(bag) > 1)
    assert left > 20
