"""Where it costs time who is in a bag, a found schedule takes as long as the listing of the same order and bags."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.plan.costs.handoff import Handoff
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.costs.topology import CrossIsland, CrossNode
from actors.plan.schedule.check import check
from actors.plan.schedule.constructive import constructive
from actors.plan.schedule.evaluator import to_cascades
from actors.plan.schedule.listing import ListSchedule
from actors.plan.schedule.problem import EncodeKey, Mapper, PlannedJob, PlanOptions, Problem, StepContext
from actors.plan.strategies.search import native
from actors.plan.strategies.search.cells import plan_cells
from actors.plan.strategies.search.improve import improved, realise
from actors.plan.strategies.search.space import Space, build, chains
from actors.plan.strategies.search.step_jobs import StepsAhead, choices, own_jobs
from actors.plan.strategies.search.strips import balanced_strips
from actors.plan.types import Cluster, EarlyEncode, Item, places_in
from actors.planning.make_plan import make_plan
from ops.models.wan.config import WanConfig
from tests.actors.plan.options import counted

needs_compiler = pytest.mark.skipif(native.library() is None, reason="the C search was not built")
SHAPES = [(2, 17, 480, 832), (1, 81, 480, 832), (1, 33, 720, 1280), (3, 5, 480, 832), (1, 129, 480, 832)]


@pytest.fixture(params=[True, False], ids=["compiled", "without a compiler"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("the C search was not built")


def drawn(source: random.Random, speeds: Sequence[float]) -> Problem:
    """One or two steps on a random cluster, where handoffs, rails and islands may cost time and some of the first
    step's encodes have run."""
    profile = Profile.from_flops(WanConfig(num_heads=8), tflops=source.choice([1.0, 50.0]), degrees=(1, 2, 4, 8))
    profile.cross_node = CrossNode(penalty=source.choice([0.0, 0.3]), decay=source.choice([0.0, 1.0]))
    profile.cross_island = CrossIsland(penalty=source.choice([0.0, 0.4]))
    profile.handoff = Handoff(latency_s=source.choice([0.0, 0.1, 3.0]), gib_per_s=source.choice([0.0, 0.01]))
    nodes = source.choice([(3,), (4, 4), (2, 3, 2), (8, 2), (8, 8)])
    islands = source.choice(["ABABABAB", "AABBCCDD"])[: max(nodes)]
    with_islands = places_in(nodes, rails="AABBCCDD"[: max(nodes)], islands=islands)
    places = source.choice([(), places_in(nodes, rails="ABCDEFGH"[: max(nodes)]), with_islands])
    workers = sum(nodes)
    speed = tuple(source.choice(speeds) for _ in range(workers))
    steps = [
        [
            Item(id=f"s{step}i{n}", batch=b, frames=f, height=h, width=w, text_tokens=60)
            for n, (b, f, h, w) in enumerate(source.choice(SHAPES) for _ in range(source.randint(1, 4)))
        ]
        for step in range(source.randint(1, 2))
    ]
    done = [
        EarlyEncode(item=item.id, module="vae", workers=(source.randrange(workers),), end_s=source.choice([0.0, 0.7]))
        for item in steps[0]
        if source.random() < 0.25
    ]
    return Problem(steps, profile, Cluster(nodes=nodes, places=places, speed=speed), PlanOptions(), done=done)


def variants(problem: Problem) -> Iterator[tuple[StepContext, list[PlannedJob]]]:
    """Jobs of the first step, batches whole and cut, with encodes of the next."""
    context = problem.start
    for jobs in choices(problem, context, 0, StepsAhead(tuple(range(1, len(problem.steps))))):
        yield context, jobs


def end_of_dits(problem: Problem, jobs: Sequence[PlannedJob], placed: ListSchedule) -> float:
    """As the evaluator times them."""
    return max(c.end_s for c in to_cascades(problem, jobs, placed.placed) if c.module == "dit" and c.step == 0)


def candidate(space: Space, source: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """Any order and modes."""
    keys = np.array([source.random() for _ in range(space.num_jobs)])
    return keys, np.array([source.randrange(int(count)) for count in space.num_modes], dtype=np.intp)


@needs_compiler
@settings(max_examples=150, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.sampled_from([1e-9, 0.002]),
    st.sampled_from([(1.0,), (0.5,), (0.5, 0.8, 1.0)]),
)
def test_a_found_schedule_takes_as_long_as_the_listing_of_its_order_and_bags(
    source: random.Random, budget_s: float, speeds: tuple[float, ...]
) -> None:
    """Forward or from its end, any candidate or the best of many; workers of unequal speed, too."""
    problem = drawn(source, speeds)
    for context, jobs in variants(problem):
        space = build(problem, jobs, context)
        if space is None or space.bags is None:
            continue
        found = native.anneal(space, [candidate(space, source)], budget_s, source.randrange(9), 0.0, 60.0)
        assert found is not None
        listed = ListSchedule(problem, jobs, context)
        for index in found.order:
            assert len(found.bags[index]) == found.degree[index]
            assert {problem.topology.node[w] for w in found.bags[index]} == set(found.nodes[index])
            listed.fix(index, found.bags[index])
        end = max(listed.end[i] for i in found.order if jobs[i].module == "dit")
        assert end == pytest.approx(found.makespan, abs=1e-9)
        realised = realise(problem, jobs, context, found, budget_s)
        assert end_of_dits(problem, jobs, realised) == pytest.approx(found.makespan, abs=1e-9)


@pytest.mark.usefixtures("engine")
@settings(max_examples=15, deadline=None)
@given(source=st.randoms(use_true_random=False))
def test_what_every_engine_makes_of_a_step_the_evaluator_times_alike(source: random.Random) -> None:
    """Workers of unequal speed, too; and nothing is worse than what it starts from."""
    problem = drawn(source, [1.0, 0.5])
    for context, jobs in variants(problem):
        starts = constructive(problem, [job for job in jobs if not job.optional], context, math.inf)
        found = improved(problem, jobs, context, starts.tried, 0.002, 0, math.inf)
        assert found is not None
        assert end_of_dits(problem, jobs, found) == pytest.approx(found.step_end, abs=1e-9)


def least(problem: Problem) -> float:
    """Over all orders and all bags."""
    jobs, context = own_jobs(problem, problem.start, 0), problem.start
    everyone = range(problem.topology.num_workers)
    bags = [[bag for k, _ in job.modes for bag in itertools.combinations(everyone, k)] for job in jobs]
    orders = [
        order
        for order in itertools.permutations(range(len(jobs)))
        if all(order.index(p) < order.index(i) for i in order for p in jobs[i].preds)
    ]
    best = math.inf
    for chosen in itertools.product(*bags):
        for order in orders:
            schedule = ListSchedule(problem, jobs, context)
            for index in order:
                schedule.fix(index, chosen[index])
            best = min(best, max(schedule.end))
    return best


def small(
    seed: int, nodes: tuple[int, ...], both: bool = False, islands: str = "", speed: tuple[float, ...] = ()
) -> Problem:
    """Two clips; or one that has two encoders."""
    source = random.Random(seed)
    frames = source.sample([17, 33, 49, 65], 2)
    latency = [
        {"module": module, "batch": 1, "frames": f, "height": 64, "width": 64, "degree": k, "seconds": seconds}
        for module in (("text", "vae", "dit") if both else ("vae", "dit"))
        for f in frames
        for k, seconds in zip((1, 2), sorted((source.uniform(1, 3), source.uniform(2, 4)), reverse=True))
        if module == "dit" or k == 1
    ]
    profile = read_profile({"latency": latency, "extrapolate": False, "handoff": {"latency_s": source.uniform(0.3, 2)}})
    profile.cross_island = CrossIsland(penalty=0.4)
    items = [Item(id=str(f), batch=1, frames=f, height=64, width=64) for f in frames[: 1 if both else 2]]
    places = places_in(nodes, islands=islands) if islands else ()
    return Problem([items], profile, Cluster(nodes=nodes, places=places, speed=speed), counted())


def searched(problem: Problem, budget_s: float = 0.05) -> ListSchedule:
    jobs, context = own_jobs(problem, problem.start, 0), problem.start
    starts = constructive(problem, jobs, context, math.inf).tried
    found = improved(problem, jobs, context, starts, budget_s, 0, math.inf)
    assert found is not None
    return found


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("nodes", "both"), [((3,), False), ((2, 1), False), ((3,), True), ((2, 2), True)])
def test_small_steps_with_handoffs_are_planned_as_well_as_can_be(seed: int, nodes: tuple[int, ...], both: bool) -> None:
    problem = small(seed, nodes, both)
    assert max(searched(problem).end) == pytest.approx(least(problem))


@needs_compiler
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("nodes", "speed"), [((3,), (1.0, 0.6, 1.0)), ((2, 1), (0.8, 1.0, 1.0)), ((1, 2), (1.0, 0.5, 0.8))]
)
def test_small_steps_on_workers_of_unequal_speed_are_planned_as_well_as_can_be(
    seed: int, nodes: tuple[int, ...], speed: tuple[float, ...]
) -> None:
    problem = small(seed, nodes, speed=speed)
    assert max(searched(problem).end) == pytest.approx(least(problem))


@needs_compiler
@pytest.mark.parametrize("seed", range(6))
def test_dits_of_early_encodes_are_planned_as_well_as_can_be(seed: int) -> None:
    """One worker is still at the second encode: it holds the input of the other dit, too, which others could start
    before it is free."""
    idle, source = small(seed, (2, 1)), random.Random(seed)
    early = [
        EarlyEncode(item=item.id, module="vae", workers=(0,), end_s=(n + 1) * source.uniform(0.2, 1))
        for n, item in enumerate(idle.steps[0])
    ]
    problem = Problem(idle.steps, idle.profile, idle.cluster, idle.options, done=early)
    assert max(searched(problem).end) == pytest.approx(least(problem))


@needs_compiler
@pytest.mark.parametrize(("producers", "start"), [(True, 2.0), (False, 6.0)])
def test_a_bag_holds_a_worker_of_every_late_input(producers: bool, start: float) -> None:
    """Best fit would take the two that are free last; the first worker has what takes 5 s to them."""
    profile = Profile.from_flops(WanConfig(num_heads=8), tflops=1.0, degrees=(2,))
    profile.handoff = Handoff(latency_s=5.0)
    clip = Item(id="a", batch=1, frames=17, height=480, width=832)
    options = PlanOptions(mapper=Mapper(producers=producers))
    problem = Problem([[clip]], profile, Cluster(nodes=(3,)), options)
    ran: dict[EncodeKey, tuple[float, tuple[int, ...]]]
    ran = {((0, "a"), "text", 0, 1): (1.0, (0,)), ((0, "a"), "vae", 0, 1): (2.0, (1,))}
    context = StepContext((1.0, 2.0, 1.5), 0.0, ran)
    jobs = own_jobs(problem, context, 0)
    space = build(problem, jobs, context)
    assert space is not None
    found = native.anneal(space, [candidate(space, random.Random(0))], 1e-9, 0, 0.0, 60.0)
    assert found is not None and found.start == [start]
    listed = ListSchedule(problem, jobs, context)
    listed.place(0, 2)
    assert listed.begin == [start] and listed.where[0] == found.bags[0]


@needs_compiler
def test_a_bag_without_common_rails_takes_longer() -> None:
    """Each node has other rails free."""
    profile = Profile.from_flops(WanConfig(num_heads=8), tflops=1.0, degrees=(4,))
    profile.cross_node = CrossNode(penalty=0.5, decay=3.0)
    profile.handoff = Handoff(latency_s=1.0)
    clip = Item(id="a", batch=1, frames=17, height=480, width=832, cached=("text", "vae"))
    cluster = Cluster(nodes=(3, 3), places=places_in((3, 3), rails="ABC"))
    problem = Problem([[clip]], profile, cluster, PlanOptions())
    jobs, made = problem.jobs(), []
    for free in ((9.0, 0.0, 0.0, 0.0, 0.0, 9.0), (9.0, 0.0, 0.0, 9.0, 0.0, 0.0)):
        context = StepContext(free)
        space = build(problem, jobs, context)
        assert space is not None
        found = native.anneal(space, [candidate(space, random.Random(0))], 1e-9, 0, 0.0, 60.0)
        assert found is not None
        made.append(found.makespan)
        assert found.makespan == pytest.approx(jobs[0].on(problem.topology, found.bags[0]))
    assert made[0] > 1.05 * made[1]


@needs_compiler
@pytest.mark.parametrize("islands", ["AABBCCDD", "ABCDABCD", "AAABBBCC"])
def test_a_bag_that_no_island_holds_uses_as_few_as_hold_it(islands: str) -> None:
    profile = Profile.from_flops(WanConfig(num_heads=8), tflops=1.0, degrees=(4,))
    profile.cross_island = CrossIsland(penalty=0.5)
    clip = Item(id="a", batch=1, frames=17, height=480, width=832, cached=("text", "vae"))
    cluster = Cluster(nodes=(8,), places=places_in((8,), islands=islands))
    problem = Problem([[clip]], profile, cluster, PlanOptions())
    space = build(problem, problem.jobs(), problem.start)
    assert space is not None
    found = native.anneal(space, [candidate(space, random.Random(0))], 1e-9, 0, 0.0, 60.0)
    assert found is not None and found.makespan == pytest.approx(problem.jobs()[0].seconds(4))
    assert not problem.topology.strays(found.bags[0])


@needs_compiler
@pytest.mark.parametrize("seed", range(4))
def test_encodes_run_where_the_island_of_their_dit_will_be(seed: int) -> None:
    problem = small(seed, (4,), both=True, islands="ABAB")
    assert max(searched(problem).end) == pytest.approx(least(problem))


@needs_compiler
def test_without_the_rule_of_producers_a_handoff_still_takes_its_time() -> None:
    """Best fit alone gives the dit workers that encoded something else."""
    ends = []
    for producers in (True, False):
        problem = small(0, (3,))
        problem.options = replace(problem.options, mapper=Mapper(producers=producers))
        found = searched(problem)
        assert end_of_dits(problem, problem.jobs(), found) == pytest.approx(max(found.end), abs=1e-9)
        ends.append(max(found.end))
    assert ends[0] <= ends[1]


def test_what_was_encoded_before_the_plan_draws_its_dit() -> None:
    """Workers are idle, and best fit would take the last one."""
    problem = small(0, (3,))
    item = problem.steps[0][0]
    early = EarlyEncode(item=item.id, module="vae", workers=(1,))
    again = Problem(problem.steps, problem.profile, problem.cluster, problem.options, done=[early])
    jobs = again.jobs()
    (index,) = [i for i, job in enumerate(jobs) if job.module == "dit" and job.item[1] == item.id]
    schedule = ListSchedule(again, jobs, again.start)
    schedule.place(index, 1)
    assert schedule.where[index] == (1,) and schedule.begin[index] == 0.0


def test_a_part_of_a_cluster_counts_workers_of_early_encodes_from_its_own_first() -> None:
    problem = small(0, (2, 2))
    (name, _) = [item.id for item in problem.steps[0]]
    early = [EarlyEncode(item=name, module="vae", workers=(1, 2, 3), first=0, count=1)]
    whole = Problem(problem.steps, problem.profile, problem.cluster, problem.options, done=early)
    parts = [whole.on(whole.cluster.part(node, 1), 2 * node) for node in (0, 1)]
    assert [part.finished[(0, name), "vae"][0].workers for part in parts] == [(1,), (0, 1)]
    assert whole.finished[(0, name), "vae"] == early


@needs_compiler
@pytest.mark.parametrize("slow", [1.0, 0.6])
def test_cells_of_a_large_cluster_plan_with_early_encodes_handoffs_and_a_slow_worker(slow: float) -> None:
    profile = Profile.from_flops(WanConfig(num_heads=8), tflops=1.0, degrees=(1, 2, 4, 8))
    profile.handoff = Handoff(latency_s=0.5)
    step = [
        Item(id=str(n), batch=b, frames=f, height=h, width=w, text_tokens=60)
        for n, (b, f, h, w) in enumerate(SHAPES * 5)
    ]
    done = [EarlyEncode(item=item.id, module="vae", workers=(8 * n % 32,)) for n, item in enumerate(step[:8])]
    speed = () if slow == 1.0 else (1.0,) * 10 + (slow,) + (1.0,) * 21
    cluster, options = Cluster(nodes=(8,) * 4, speed=speed), counted(budget_s=0.05)
    plan = make_plan([step], profile, cluster, options, done=done)
    check(plan, [step], profile, cluster, done=done)


def test_cells_plan_a_part_of_the_cluster_with_the_speeds_of_its_workers() -> None:
    profile = Profile.from_flops(WanConfig(num_heads=8), tflops=1.0, degrees=(1, 2, 4, 8))
    step = [
        Item(id=str(n), batch=b, frames=f, height=h, width=w, text_tokens=60)
        for n, (b, f, h, w) in enumerate(SHAPES * 5)
    ]
    cluster = Cluster(nodes=(8,) * 4, speed=(1.0,) * 10 + (0.5,) + (1.0,) * 21)
    assert cluster.part(0, 2).speed + cluster.part(2, 2).speed == cluster.speed
    problem = Problem([step], profile, cluster, PlanOptions())
    jobs = problem.jobs()
    found = plan_cells(problem, jobs, problem.start, 0, 0.0)
    assert found is not None and len(found.placed) == len(jobs)
    assert end_of_dits(problem, jobs, found) == pytest.approx(max(found.end))


@pytest.mark.parametrize("slow", [1, 32])
def test_a_large_cluster_with_slow_workers_has_no_worse_plan_than_the_constructive_one(slow: int) -> None:
    profile = Profile.from_flops(WanConfig(num_heads=8), tflops=1.0, degrees=(1, 2, 4, 8))
    step = [
        Item(id=str(n), batch=b, frames=f, height=h, width=w, text_tokens=60)
        for n, (b, f, h, w) in enumerate(SHAPES * 12)
    ]
    cluster = Cluster(nodes=(8,) * 8, speed=(1.0,) * (64 - slow) + (0.5,) * slow)
    plan = make_plan([step], profile, cluster, counted(budget_s=0.01))
    check(plan, [step], profile, cluster)
    problem = Problem([step], profile, cluster, PlanOptions())
    alone = constructive(problem, problem.jobs(), problem.start, 0.0)
    assert plan.steps[0].makespan_s <= alone.score + 1e-6


def test_strips_of_nodes_with_slow_workers_have_less() -> None:
    profile = Profile.from_flops(WanConfig(num_heads=8), tflops=1.0, degrees=(1, 2, 4, 8))
    step = [Item(id=str(n), batch=1, frames=33, height=480, width=832, text_tokens=60) for n in range(30)]
    jobs = Problem([step], profile, Cluster(nodes=(8,) * 4), PlanOptions()).jobs()
    strips = balanced_strips(jobs, chains(jobs), [1.0, 0.5, 0.25, 1.0], 8, math.inf)
    shares = [len(strip.chains) for strip in strips]
    assert sum(shares) == 30 and shares[1] in (5, 6) and shares[2] in (2, 3) and abs(shares[0] - shares[3]) <= 1


def test_starts_are_listed_until_a_time_and_one_is_in_any_case() -> None:
    problem = small(0, (2, 2))
    jobs = problem.jobs()
    whole = constructive(problem, jobs, problem.start, 0.0)
    begun: list[ListSchedule] = []

    class Listed(ListSchedule):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            begun.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.plan.schedule.constructive.ListSchedule", Listed)
        found = constructive(problem, jobs, problem.start, 0.0, until=0.0)
    assert len(begun) == 1 and found.schedule is begun[0] and len(found.tried) == len(whole.tried)
