"""Wan2.2 A14B, both experts in one run: every item knows its expert before the step, and each is trained apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from actors.config import PlannerConfig, TrainConfig
from actors.feed.experts import ExpertDraw
from actors.plan.costs.profile import Profile
from actors.plan.schedule.check import check
from actors.plan.schedule.problem import PlanOptions
from actors.plan.types import Cascade, Cluster, Item, Part, Plan, PlanError, StepPlan
from actors.planning.make_plan import make_plan
from actors.planning.options import profile_of
from actors.state import checkpoint_files
from actors.worker.loading import build_sync
from ops.comm.collectives import Group
from ops.config import FlowConfig
from ops.geometry import Geometry
from ops.models.experts import parts_of
from ops.models.folders import resolve
from ops.models.load import build_dit
from ops.shards import ShardState, cut
from tests.actors.exactness import Host, items_of, make_hosts, one_worker, random_cascades, run_step, train_config
from tests.families.kit import MODEL
from tests.ops.exported import own_shard

BOTH = replace(MODEL, dit=replace(MODEL.dit, num_layers=1, expert="both", boundary=0.7))
DRAW = ExpertDraw(flow=FlowConfig(), seed=3, geometry=Geometry(), sigmas=((0.7, 1.0), (0.0, 0.7)))


def hosts_of(world: int, train: TrainConfig | None = None, shards: Sequence[ShardState] | None = None) -> list[Host]:
    return make_hosts(world, torch.float64, train or train_config(), config=BOTH, shards=shards)


def items_at(step: int, experts: Sequence[int] = (0, 1, 1)) -> list[Item]:
    found = items_of(np.random.default_rng(step), len(experts), step)
    return [replace(item, expert=expert) for item, expert in zip(found, experts)]


def plan_of(items: Sequence[Item], world: int, step: int) -> list[Cascade]:
    """A random plan, whose packed cascades are of one expert: planned for each of them, one after the other."""
    rng, plan = np.random.default_rng(step + world), []
    for expert in (0, 1):
        mine = [item for item in items if item.expert == expert]
        for cascade in random_cascades(rng, mine, world, step):
            late = 100.0 * expert
            changed = replace(cascade, start_s=cascade.start_s + late, end_s=cascade.end_s + late)
            plan.append(replace(changed, id=f"{cascade.id}/e{expert}"))
    return plan


def state_of(hosts: Sequence[Host]) -> ShardState:
    shards = [own_shard(host.executor.sync) for host in hosts]
    return cut(shards, 0, shards[0].total)


def middle(host: Host) -> int:
    """Where the parameters of the expert for low noise begin."""
    return next(slot.lo for slot in host.executor.sync.layout if slot.name.startswith("low."))


def assert_same(one: ShardState, other: ShardState, limit: float = 1e-9) -> None:
    assert one.state == other.state
    for name, array in one.arrays.items():
        assert np.linalg.norm(array - other.arrays[name]) <= limit * np.linalg.norm(array), name


def test_an_expert_is_drawn_as_often_as_levels_lie_in_its_interval() -> None:
    items = items_of(np.random.default_rng(0), 3)
    drawn = [item.expert for step in range(700) for item in DRAW.routed(step, items)]
    numbers = np.random.Generator(np.random.Philox(1))
    flow = FlowConfig()
    sigmas = 1 / (1 + np.exp(-(flow.logit_mean + flow.logit_std * numbers.standard_normal(100_000))))
    shifted = flow.flow_shift * sigmas / (1 + (flow.flow_shift - 1) * sigmas)
    assert np.mean(drawn) == pytest.approx(np.mean(shifted < 0.7), abs=0.04)
    assert DRAW.routed(5, items) == DRAW.routed(5, items[:1]) + DRAW.routed(5, items[1:]), "an item is drawn alone"


@pytest.mark.parametrize("world", [2, 3])
def test_any_plan_trains_both_as_one_worker_does(world: int) -> None:
    reference, hosts = hosts_of(1), hosts_of(world)
    for step, experts in enumerate([(0, 1, 1), (1, 1), (0,), (1, 0)]):
        items = items_at(step, experts)
        run_step(reference, items, one_worker(items, step), step)
        run_step(hosts, items, plan_of(items, world, step), step)
    expected = state_of(reference)
    assert (expected.updates, expected.part_updates) == (4, (3, 3))
    assert_same(expected, state_of(hosts))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_without_a_good_sample_of_an_expert_leaves_it_bit_for_bit(kind: Literal["adamw", "muon"]) -> None:
    train = train_config()
    hosts = hosts_of(2, replace(train, optimizer=replace(train.optimizer, kind=kind)))
    items = items_at(0, (0, 1))
    run_step(hosts, items, plan_of(items, 2, 0), 0)
    before, half = state_of(hosts), middle(hosts[0])
    for step, experts, bad in [(1, (1,), ()), (2, (0, 1), (0,))]:
        items = items_at(step, experts)
        undecoded = frozenset((items[i].id, n) for i in bad for n in range(items[i].batch))
        run_step(hosts, items, plan_of(items, 2, step), step, bad=undecoded)
    after = state_of(hosts)
    assert (before.part_updates, after.part_updates) == ((1, 1), (1, 3))
    for name, array in before.arrays.items():
        assert np.array_equal(array[:half], after.arrays[name][:half]), f"{name} of the expert that saw nothing"
        assert not np.array_equal(array[half:], after.arrays[name][half:]), f"{name} of the one that did"


def test_each_is_trained_as_by_a_run_of_its_own() -> None:
    """Mean over its own samples, its own norm, its own count: items of the other change nothing."""
    both, alone = hosts_of(1), hosts_of(1)
    for step, experts in enumerate([(0, 1), (0, 0), (1, 0)]):
        items = items_at(step, experts)
        run_step(both, items, one_worker(items, step), step)
        low = [item for item in items if item.expert]
        if low:  # the step is theirs alone, and their weights are larger
            run_step(alone, low, one_worker(low, step), step)
    half = middle(both[0])
    one, other = state_of(both), state_of(alone)
    assert (one.part_updates, other.part_updates) == ((3, 2), (0, 2))
    for name, array in one.arrays.items():
        np.testing.assert_allclose(array[half:], other.arrays[name][half:], rtol=1e-8, atol=1e-12)


def test_a_checkpoint_continues_on_another_number_of_workers(tmp_path: Path) -> None:
    steps = [(0, 1, 1), (1,), (0,), (1, 0)]
    reference, first = hosts_of(1), hosts_of(3)
    for step, experts in enumerate(steps):
        items = items_at(step, experts)
        run_step(reference, items, one_worker(items, step), step)
        if step < 2:
            run_step(first, items, plan_of(items, 3, step), step)
    folder = tmp_path / "step-1"
    checkpoint_files.begin(folder)
    for host in first:
        checkpoint_files.write_shard(folder, own_shard(host.executor.sync))
    parameters = checkpoint_files.parameters_meta(first[0].executor.sync.layout)
    assert parameters == checkpoint_files.trained_parameters(resolve(BOTH)[0])
    checkpoint_files.seal(folder, {"step": 1, "parameters": parameters})
    second = hosts_of(2, shards=checkpoint_files.load(folder)[1])
    for step, experts in enumerate(steps[2:], 2):
        items = items_at(step, experts)
        run_step(second, items, plan_of(items, 2, step), step)
    assert_same(state_of(reference), state_of(second))


def profile() -> Profile:
    model, geometry = resolve(BOTH)
    return profile_of(PlannerConfig(), model, geometry)


@pytest.mark.parametrize("strategy", ["knapsack", "knapformer", "cascade"])
def test_no_strategy_packs_items_of_two_experts(strategy: str) -> None:
    costs, cluster = profile(), Cluster(nodes=(2,))
    steps = [tuple(items_at(0, (0, 1, 0, 1)))]
    plan = make_plan(steps, costs, cluster, PlanOptions(strategy=strategy, budget_s=0.05))
    check(plan, steps, costs, cluster)


def test_the_check_refuses_a_cascade_of_two_experts() -> None:
    steps = [tuple(items_at(0, (0, 1)))]
    parts = tuple(Part(item=item.id, first=0, count=item.batch) for item in steps[0])
    mixed = Cascade(id="m", module="dit", step=0, parts=parts, degree=1, workers=(0,), start_s=0.0, end_s=1.0)
    step = StepPlan(step=0, cascades=(mixed,), makespan_s=1.0, lower_bound_s=0.0, planning_s=0.0, idle_ratio=0.0)
    with pytest.raises(PlanError, match=r"packs items of experts \[0, 1\]; a dit cascade is of one expert"):
        check(Plan(strategy="x", steps=(step,)), steps, profile(), Cluster(nodes=(1,)))


def test_parameters_of_the_experts_lie_one_behind_the_other() -> None:
    (host,) = hosts_of(1)
    assert parts_of(host.executor.modules.dit) == ("high.", "low.")
    names = [slot.name.partition(".")[0] for slot in host.executor.sync.layout]
    assert names == sorted(names) and set(names) == {"high", "low"}


def test_a_worker_updates_the_experts_apart() -> None:
    dit = build_dit(BOTH.dit, seed=0)
    sync = build_sync(dit, train_config())
    sync.form(Group.solo(), None)
    assert len(own_shard(sync).part_updates) == 2
    with pytest.raises(ValueError, match="deepspeed updates all weights together"):
        build_sync(dit, replace(train_config(), sync="deepspeed"))
