"""A packed cascade takes what its parts take, less the launches that they share: planned, learned and simulated."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.plan.costs.fit import Fit
from actors.plan.costs.max_frames import MaxFrames
from actors.plan.costs.needs import TRIES, Footprint, Needs
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.topology import CrossIsland, CrossNode, Topology
from actors.plan.schedule.check import check
from actors.plan.schedule.evaluator import simulate
from actors.plan.schedule.problem import PlanOptions, Problem
from actors.plan.strategies import cascade as cascade_strategy
from actors.plan.strategies.knapsack import knapsack_step
from actors.plan.types import Cascade, Cluster, Item, Module, Part, PlanError
from actors.planning.make_plan import make_plan
from actors.planning.observations import Observation, learn
from app.bench.cluster.physics import Physics
from app.bench.truth import learn_live
from ops.models.latte.config import LatteConfig
from ops.models.wan.config import WanConfig

IMAGE, CLIP = (1, 64, 64), (17, 64, 96)
PARTS = Samples.of(2, IMAGE, 10), Samples.of(1, CLIP, 10), Samples.of(1, (33, 64, 96), 10)
shapes = st.sampled_from((IMAGE, CLIP, (33, 64, 96), (9, 64, 64)))
packs = st.lists(st.tuples(st.integers(1, 3), shapes), min_size=2, max_size=4, unique_by=lambda part: part[1]).map(
    lambda found: [Samples.of(count, shape, 10) for count, shape in found]
)


def profile_of(launch_s: float, **changed: object) -> Profile:
    """`launch_s` for each of its layers."""
    profile = Profile.from_flops(WanConfig(num_heads=12), launch_s=launch_s, degrees=(1, 2, 3, 4))
    for name, value in changed.items():
        setattr(profile, name, value)
    return profile


def launches(profile: Profile) -> float:
    return profile.models["dit"].coefficients[0]


def alone(profile: Profile, parts: Sequence[Samples], degree: int) -> list[float]:
    return [profile.seconds("dit", part, degree) for part in parts]


@pytest.mark.parametrize("degree", [1, 2])
def test_a_pack_pays_launches_once(degree: int) -> None:
    profile = profile_of(0.1)
    saved = 2 * launches(profile)
    assert profile.together("dit", PARTS, degree) == pytest.approx(sum(alone(profile, PARTS, degree)) - saved)
    assert profile.together("dit", PARTS[:1], degree) == alone(profile, PARTS, degree)[0]


def test_all_to_alls_that_send_nothing_are_paid_once_too() -> None:
    profile = profile_of(0.1, cross_node=CrossNode(row_s=1e-4, peer_s=0.5), cross_island=CrossIsland(penalty=0.4))
    apart = sum(profile.penalty("dit", part, 3) for part in PARTS)
    assert profile.penalty_together("dit", PARTS, 3) == pytest.approx(apart - 2 * 0.5 * 2)
    assert profile.detour_together("dit", PARTS, 3) == pytest.approx(0.4 * profile.together("dit", PARTS, 3))
    by_share = profile_of(0.1, cross_node=CrossNode(penalty=0.3))
    assert by_share.penalty_together("dit", PARTS, 3) == pytest.approx(0.3 * by_share.together("dit", PARTS, 3))


def test_without_a_constant_a_pack_is_exactly_the_sum() -> None:
    profile = profile_of(0.0, cross_node=CrossNode(row_s=1e-4))
    assert profile.together("dit", PARTS, 2) == sum(alone(profile, PARTS, 2))
    assert profile.penalty_together("dit", PARTS, 2) == sum(profile.penalty("dit", part, 2) for part in PARTS)


def test_grids_that_go_through_layers_apart_have_launches_of_their_own() -> None:
    profile = Profile.from_flops(LatteConfig(), launch_s=0.1)
    assert launches(profile) > 0
    assert profile.together("dit", PARTS, 1) == sum(alone(profile, PARTS, 1))


@given(parts=packs, constant=st.floats(0, 1e6), degree=st.sampled_from((1, 2, 4)), measured=st.floats(1e-3, 50))
def test_no_constant_makes_a_pack_quicker_than_its_dearest_part(
    parts: list[Samples], constant: float, degree: int, measured: float
) -> None:
    """Also where the fit takes more for launches than was measured of a part."""
    profile = profile_of(1e-3)
    prior = profile.models["dit"]
    profile.models["dit"] = replace(prior, coefficients=(constant, *prior.coefficients[1:]))
    profile.measured[parts[0].key("dit", degree)] = measured
    prices = alone(profile, parts, degree)
    assert max(prices) <= profile.together("dit", parts, degree) * (1 + 1e-9)
    assert profile.together("dit", parts, degree) <= sum(prices)


def test_plans_balance_bags_and_simulated_clusters_have_the_same_seconds() -> None:
    profile = profile_of(0.05, cross_node=CrossNode(row_s=1e-5, peer_s=0.2))
    shapes = (IMAGE, CLIP, (33, 64, 96))
    items = [
        Item(id=f"i{n}", batch=n + 1, frames=frames, height=height, width=width, text_tokens=10)
        for n, (frames, height, width) in enumerate(shapes)
    ]
    cluster = Cluster(nodes=(2, 2))
    problem = Problem([items], profile, cluster, PlanOptions(strategy="knapsack", topology="g4n1"))
    [pack] = [cascade for cascade in knapsack_step(problem, 0) if cascade.module == "dit"]
    assert len(pack.parts) == 3
    parts = [Samples.of_item(item, item.batch) for item in items]
    topology = Topology(cluster, profile.cross_node)
    expected = profile.on(topology, "dit", parts, pack.workers)
    assert pack.seconds == pytest.approx(expected)
    samples = {item.shape: item.batch for item in items}
    quiet = Physics(noise=0.0, stragglers=0.0, text_tokens=10)
    assert quiet.cascade_s(profile, topology, "dit", samples, pack.workers, "any") == pytest.approx(expected)
    one_by_one = sum(profile.on(topology, "dit", [part], pack.workers) for part in parts)
    assert one_by_one - expected == pytest.approx(2 * (launches(profile) + 3 * 0.2))


def test_bags_are_chosen_by_what_their_packs_take() -> None:
    """Three clips of 0.3 s beside launches of 1 s: 1.45 s by both workers together, 1.6 s by each alone. As sums they
    would take 3.45 and 2.6 s."""
    profile = profile_of(0.0)
    items = [Item(id=f"i{n}", batch=1, frames=1 + 4 * n, height=64, width=64, text_tokens=10) for n in range(3)]
    profile.models = {"dit": Fit(source="", form="adaptiveload", coefficients=(1.0, 0.3), exponent=0.0)}
    problem = Problem([items], profile, Cluster(nodes=(2,)), PlanOptions(strategy="knapsack"))
    plan = knapsack_step(problem, 0)
    assert [cascade.degree for cascade in plan] == [2]
    assert plan[0].end_s == pytest.approx(1.45)


def test_packs_alone_teach_launches_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile begins with a tenth of the true launches, which are most of many cascades, and never sees a part
    alone."""
    true = profile_of(0.03)
    luck = random.Random(0)
    shapes = [(frames, side, side) for frames in (1, 9, 17, 33) for side in (64, 128)]
    packs = [[Samples.of(1, shape, 10) for shape in luck.sample(shapes, luck.randint(2, 4))] for _ in range(120)]
    seconds = [true.together("dit", parts, 2) for parts in packs]

    def error() -> float:
        profile = profile_of(0.003)
        for parts, took in zip(packs, seconds, strict=True):
            assert not learn(profile, [Observation(module="dit", parts=tuple(parts), degree=2, seconds=took)])
        learned = [profile.together("dit", parts, 2) for parts in packs[-40:]]
        return statistics.median(abs(one / took - 1) for one, took in zip(learned, seconds[-40:], strict=True))

    found = error()
    monkeypatch.setattr(Profile, "again", lambda *_: 0.0)
    assert found <= 0.03 < error(), "sums of parts cannot be what packs of two and of four take"


@pytest.mark.long
def test_a_machine_with_dear_launches_is_learned_and_planned_for() -> None:
    found = learn_live("knapsack", 100, 10, 0.02, launches_s=0.5)
    assert found.median <= 0.05 and 0.95 <= found.step_ratio <= 1.05
    assert found.plan_ratio <= 1.03 and found.plan_profiled <= 1.03


def test_simulate_times_packs_of_a_step_one_after_the_other() -> None:
    profile = profile_of(0.05)
    items = {(0, "a"): Item(id="a", batch=1, frames=1, height=64, width=64, text_tokens=10)}
    items[0, "b"] = replace(items[0, "a"], id="b", frames=17)
    problem = Problem([list(items.values())], profile, Cluster(nodes=(1,)), PlanOptions())
    parts = tuple(Part(item=name, first=0, count=1) for name in "ab")
    pack = Cascade(id="p", module="dit", step=0, parts=parts, degree=1, workers=(0,), start_s=0.0, end_s=0.0)
    [timed] = simulate(problem, [pack])
    two = [replace(pack, id=part.item, parts=(part,)) for part in parts]
    assert simulate(problem, two)[-1].end_s - timed.end_s == pytest.approx(launches(profile))


def test_units_that_cost_the_same_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    once = Profile.once
    monkeypatch.setattr(Profile, "once", lambda self, *key: asked.append(key) or once(self, *key))  # type: ignore[func-returns-value]
    step = [Item(id=str(n), batch=16, frames=1, height=64, width=96, text_tokens=8) for n in range(8)]
    problem = Problem([step], profile_of(0.1), Cluster(nodes=(8,)), PlanOptions())
    assert len({part for cascade in knapsack_step(problem, 0) for part in cascade.parts}) >= 8
    assert asked and len(asked) == len(set(asked))


def test_a_run_packs_a_later_step_only_where_packs_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    monkeypatch.setattr(
        cascade_strategy, "knapsack_step", lambda problem, step: packed.append(step) or knapsack_step(problem, step)
    )
    clip = Item(id="a", batch=1, frames=17, height=64, width=96, text_tokens=8)
    options = PlanOptions(budget_s=0.01, replans=True, least_gain=10.0)
    make_plan([[clip], [clip]], profile_of(0.1), Cluster(nodes=(2,)), options)
    assert packed == [0]


def test_packs_of_a_step_are_learned_by_one_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran with other captions than it is priced for asks the model, which each measurement moves."""
    profile = profile_of(0.1)
    fits: list[Module] = []
    for part in PARTS:
        profile.observe("dit", replace(part, text_tokens=50), 1, 2.0)
    fit = Profile._fit
    monkeypatch.setattr(Profile, "_fit", lambda self, module: fits.append(module) or fit(self, module))  # type: ignore[func-returns-value]
    assert not learn(profile, [Observation(module="dit", parts=PARTS, degree=1, seconds=5.0)] * 8)
    assert fits == ["dit"] and profile.live[PARTS[0].key("dit", 1)].count == 9


def clips(number: int) -> list[Item]:
    """Each one longer than the one before, with encodes from a cache."""
    return [
        Item(id=f"i{n}", batch=1, frames=17, height=64 * (1 + n), width=64, text_tokens=20, cached=("text", "vae"))
        for n in range(number)
    ]


def dits(profile: Profile, items: list[Item], cluster: Cluster, options: PlanOptions) -> dict[str, Footprint]:
    """DiT cascades of a plan that may run, with their sizes."""
    plan = make_plan([items], profile, cluster, options)
    check(plan, [items], profile, cluster)
    by_id = {item.id: item for item in items}
    return {
        one.id: profile.footprint(
            "dit", [Samples.of_item(by_id[part.item], part.count) for part in one.parts], one.degree
        )
        for one in plan.steps[0].cascades
        if one.module == "dit"
    }


def largest(found: dict[str, Footprint]) -> Footprint:
    return max(found.values(), key=lambda one: one.units)


@pytest.mark.parametrize("strategy", ["cascade", "exact", "knapsack", "knapformer"])
@pytest.mark.parametrize(("degrees", "workers", "topology"), [((1,), 2, ""), ((1, 2), 4, ""), ((1, 2), 4, "g2n2")])
def test_a_pack_that_ran_out_of_memory_is_planned_no_more(
    strategy: str, degrees: tuple[int, ...], workers: int, topology: str
) -> None:
    """Also where all workers together have no more than that limit for the step: bags then run several packs."""
    profile = Profile.from_flops(WanConfig(num_heads=4), launch_s=0.5, degrees=degrees)
    options = PlanOptions(strategy=strategy, topology=topology, budget_s=0.02, proof_s=0.1, degrees=degrees[-1:])
    limit = math.inf
    for turn in range(3):
        found = dits(profile, clips(8), Cluster(nodes=(workers,)), options)
        packs = [one.units for name, one in found.items() if "+" in name]
        assert all(units < limit for units in packs)
        assert packs or turn, "packs save launches"
        limit = largest(found).units
        assert profile.exceed(largest(found))


@pytest.mark.parametrize("strategy", ["cascade", "knapsack", "knapformer"])
def test_a_clip_alone_on_its_worker_is_tried_three_times(strategy: str) -> None:
    profile = Profile.from_flops(WanConfig(num_heads=4), launch_s=0.5, degrees=(1,))
    options = PlanOptions(strategy=strategy, budget_s=0.02, degrees=(1,))
    for _ in range(TRIES):
        found = dits(profile, clips(2), Cluster(nodes=(2,)), options)
        assert len(found) == 2
        assert profile.exceed(largest(found))
    with pytest.raises(PlanError, match="no legal degree for dit"):
        dits(profile, clips(2), Cluster(nodes=(2,)), options)


def test_a_pack_that_may_not_run_is_no_plan_where_there_is_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Profile.from_flops(WanConfig(num_heads=4), launch_s=0.5, degrees=(1,))
    options = PlanOptions(budget_s=0.02)
    limit = largest(dits(profile, clips(8), Cluster(nodes=(2,)), options))
    profile.exceed(limit)
    monkeypatch.setattr(Needs, "most_rows", lambda *_: math.inf)
    monkeypatch.setattr("actors.plan.strategies.knapsack._fits", lambda *_: True)
    assert largest(dits(profile, clips(8), Cluster(nodes=(2,)), options)).units < limit.units


@pytest.mark.parametrize("strategy", ["cascade", "knapsack"])
def test_a_batch_that_ran_out_of_memory_when_it_was_measured_is_no_pack_of_its_clips(strategy: str) -> None:
    profile = Profile.from_flops(WanConfig(num_heads=4), launch_s=0.5, degrees=(1,))
    profile.max_frames = (MaxFrames(module="dit", degree=1, height=64, width=64, batch=3, frames=9),)
    batch = [replace(clips(1)[0], batch=4)]
    found = dits(profile, batch, Cluster(nodes=(1,)), PlanOptions(strategy=strategy, budget_s=0.02))
    assert len(found) == 2
