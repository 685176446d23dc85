"""Properties of every strategy on random workloads, clusters and speeds."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.plan.costs.handoff import Handoff
from actors.plan.costs.profile import Profile
from actors.plan.registry import STRATEGIES
from actors.plan.schedule.bounds import rolling_bound
from actors.plan.schedule.check import check
from actors.plan.schedule.listing import ListSchedule
from actors.plan.schedule.problem import PlannedJob, PlanOptions, Problem
from actors.plan.strategies import genetic
from actors.plan.strategies.search.space import useful_modes
from actors.plan.types import Cascade, Cluster, EarlyEncode, Item, Plan, PlanError, StepPlan
from actors.planning.make_plan import make_plan, rolling_cut
from actors.planning.options import LEAST_GAIN
from actors.run.dispatch import end_of
from actors.run.steps import early_encodes
from app.bench.planner import as_run
from ops.models.wan.config import WanConfig
from tests.actors.plan.options import counted

QUICK = tuple(name for name in STRATEGIES if name != "exact")
FLOPS = Profile.from_flops(WanConfig(num_heads=4))

items = st.builds(
    lambda batch, frames, side, text: (batch, frames, 32 * side, 32 * side, text),
    st.integers(1, 5),
    st.sampled_from([1, 5, 17, 33]),
    st.integers(1, 4),
    st.integers(0, 40),
)

workloads = st.lists(st.lists(items, min_size=1, max_size=6), min_size=1, max_size=3)
clusters = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(lambda nodes: Cluster(nodes=tuple(nodes)))


def named(steps: list[list[tuple[int, int, int, int, int]]]) -> list[list[Item]]:
    return [
        [
            Item(id=f"i{n}", batch=b, frames=f, height=h, width=w, text_tokens=t)
            for n, (b, f, h, w, t) in enumerate(step)
        ]
        for step in steps
    ]


@settings(max_examples=25, deadline=None)
@given(workloads, clusters, st.sampled_from(QUICK))
def test_every_plan_of_every_strategy_is_legal(steps: list, cluster: Cluster, strategy: str) -> None:
    workload = named(steps)
    options = counted(strategy=strategy, budget_s=0.01)
    plan = make_plan(workload, FLOPS, cluster, options)
    check(plan, workload, FLOPS, cluster)
    assert all(step.makespan_s >= step.lower_bound_s * (1 - 1e-9) for step in plan.steps)
    assert mean_seconds(plan) >= rolling_bound(Problem(workload, FLOPS, cluster, options)) * (1 - 1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_without_items_have_an_empty_plan(strategy: str) -> None:
    plan = make_plan([[], []], FLOPS, Cluster(nodes=(2,)), counted(strategy=strategy, budget_s=0.01))
    assert [step.cascades for step in plan.steps] == [(), ()]


def mean_seconds(plan: Plan) -> float:
    return statistics.fmean(step.makespan_s for step in plan.steps)


@pytest.mark.parametrize("seed", range(4))
def test_one_worker_plans_a_rolling_sequence_in_the_seconds_of_its_bound(seed: int) -> None:
    """It runs one after the other what takes least, and no plan is shorter. The transformer takes no time to launch:
    packs would save it, of which the bound knows."""
    source = random.Random(seed)
    steps = [[(source.randint(1, 3), 17, 32 * side, 64, 20) for side in source.sample(range(1, 6), 3)] for _ in "123"]
    workload, cluster = named(steps), Cluster(nodes=(1,))
    options = counted(budget_s=0.02, lookahead=1)
    made = Profile.from_flops(WanConfig(num_heads=4))
    dit = made.models["dit"]
    made.models["dit"] = replace(dit, coefficients=(0.0, *dit.coefficients[1:]))
    plan = make_plan(workload, made, cluster, options)
    assert mean_seconds(plan) == pytest.approx(rolling_bound(Problem(workload, made, cluster, options)))


def test_the_bound_of_a_rolling_sequence_knows_that_dits_of_two_steps_do_not_overlap() -> None:
    """One clip per step leaves most workers idle: the work shared by all of them is less than what is reached."""
    workload, cluster = named([[(1, 1, 32, 32, 0)]] * 3), Cluster(nodes=(4,))
    options = counted(budget_s=0.02, lookahead=1, degrees=(1,))
    plan = make_plan(workload, FLOPS, cluster, options)
    shared = (
        sum(c.seconds * c.degree for step in plan.steps for c in step.cascades) / cluster.num_workers / len(workload)
    )
    assert mean_seconds(plan) == pytest.approx(rolling_bound(Problem(workload, FLOPS, cluster, options)))
    assert mean_seconds(plan) > 1.5 * shared


@pytest.mark.parametrize("workers", [1, 3])
def test_steps_planned_one_by_one_go_on_from_what_earlier_ones_have_encoded(workers: int) -> None:
    """As `heddle bench planner` does it: no encode is planned twice, and what is known of later steps fills gaps."""
    workload, cluster = named([[(2, 17, 96, 64, 20), (1, 33, 64, 64, 20)]] * 4), Cluster(nodes=(workers,))
    ahead, alone = (as_run(workload, FLOPS, cluster, counted(lookahead=lookahead)) for lookahead in (1, 0))
    bound = rolling_bound(Problem(workload, FLOPS, cluster, PlanOptions()))
    seconds, without = (sum(step.makespan_s for step in steps) for steps in (ahead, alone))
    assert len(workload) * bound * (1 - 1e-9) <= seconds <= without * (1 + 1e-9)
    encodes = [c for step in ahead[1:] for c in step.cascades if c.module == "vae"]
    if workers == 3:
        assert seconds < without and len(encodes) < sum(c.module == "vae" for step in alone[1:] for c in step.cascades)


@settings(max_examples=15, deadline=None)
@given(workloads, st.integers(2, 4), st.randoms(use_true_random=False))
def test_plans_on_workers_of_unequal_speed_are_legal(steps: list, workers: int, source: random.Random) -> None:
    workload = named(steps)
    cluster = Cluster(nodes=(workers,), speed=tuple(source.choice([0.5, 0.8, 1.0]) for _ in range(workers)))
    plan = make_plan(workload, FLOPS, cluster, counted(budget_s=0.01))
    check(plan, workload, FLOPS, cluster)


@settings(max_examples=10, deadline=None)
@given(workloads, clusters, st.integers(0, 3))
def test_same_input_and_seed_give_the_same_plan(steps: list, cluster: Cluster, seed: int) -> None:
    def times() -> list:
        plan = make_plan(named(steps), FLOPS, cluster, counted(budget_s=0.005), seed=seed)
        return [step.cascades for step in plan.steps]

    assert times() == times()


@settings(max_examples=15, deadline=None)
@given(workloads, clusters)
def test_cascade_is_never_worse_than_its_starting_plan(steps: list, cluster: Cluster) -> None:
    workload = named(steps[:1])
    start, searched = (
        make_plan(workload, FLOPS, cluster, counted(budget_s=budget)).steps[0].makespan_s for budget in (0.0, 0.02)
    )
    assert searched <= start * (1 + 1e-9)


@settings(max_examples=10, deadline=None)
@given(st.lists(items, min_size=1, max_size=5), st.integers(1, 4))
def test_adding_a_worker_never_makes_the_plan_slower_by_more_than_one_percent(step: list, workers: int) -> None:
    workload = named([step])
    fewer, more = (
        make_plan(workload, FLOPS, Cluster(nodes=(n,)), counted(budget_s=0.05)).steps[0].makespan_s
        for n in (workers, workers + 1)
    )
    assert more <= 1.01 * fewer


@settings(max_examples=10, deadline=None)
@given(workloads, clusters)
def test_what_runs_in_a_step_is_complete_and_in_the_order_of_starts(steps: list, cluster: Cluster) -> None:
    workload = named(steps)
    plan = make_plan(workload, FLOPS, cluster, counted(budget_s=0.01))
    executed = rolling_cut(plan)
    assert {c.id for c in plan.steps[0].cascades} <= {c.id for c in executed if c.step == 0}
    assert [c.start_s for c in executed] == sorted(c.start_s for c in executed)


@settings(max_examples=15, deadline=None)
@given(workloads, clusters)
def test_what_outlasts_a_step_is_the_last_of_its_workers_and_the_next_plan_waits_for_it(
    steps: list, cluster: Cluster
) -> None:
    """And what a step takes longer than one planned alone is repaid by encodes of later steps, or less than the gain
    that a run asks for before it packs or cuts a batch."""
    workload = named(steps)
    options = counted(budget_s=0.02, replans=True, least_gain=LEAST_GAIN)
    plan = make_plan(workload, FLOPS, cluster, options)
    check(plan, workload, FLOPS, cluster)
    executed = rolling_cut(plan)
    end = end_of(executed, 0)
    for worker in range(cluster.num_workers):
        mine = [c for c in executed if worker in c.workers]
        assert all(c.end_s <= end + 1e-6 for c in mine[:-1])
    done = [one for c in executed if c.step > 0 for one in early_encodes(c, end)]
    following = workload[1:2]
    after = make_plan(following, FLOPS, cluster, options, first_step=1, done=done)
    check(after, following, FLOPS, cluster, done=done)
    alone = make_plan(workload[:1], FLOPS, cluster, options)
    repaid = sum(c.seconds * c.degree for c in executed if c.step > 0) / cluster.num_workers
    assert plan.steps[0].makespan_s - repaid <= alone.steps[0].makespan_s * (1 + options.least_gain) + 1e-9


@pytest.mark.parametrize("strategy", ["cascade", "knapsack", "longest_first"])
def test_a_plan_counts_on_workers_that_are_still_at_an_early_encode(strategy: str) -> None:
    workload, cluster = named([[(2, 17, 64, 64, 20), (1, 5, 64, 64, 20)]]), Cluster(nodes=(2,))
    done = [EarlyEncode(item=workload[0][0].id, module="vae", workers=(1,), end_s=3.0)]
    plan = make_plan(workload, FLOPS, cluster, counted(strategy=strategy, budget_s=0.01), done=done)
    check(plan, workload, FLOPS, cluster, done=done)
    assert min(c.start_s for step in plan.steps for c in step.cascades if 1 in c.workers) >= 3.0
    idle = [replace(done[0], end_s=0.0)]
    free = make_plan(workload, FLOPS, cluster, counted(strategy=strategy, budget_s=0.01), done=idle)
    with pytest.raises(PlanError, match="before"):
        check(free, workload, FLOPS, cluster, done=done)


@pytest.mark.parametrize("strategy", QUICK)
@pytest.mark.parametrize("over_s", [0.0, 2.0])
def test_every_piece_of_a_cut_item_that_ran_early_is_waited_for(strategy: str, over_s: float) -> None:
    """Each on another worker, from which its rows take a while; the last of them may end before the others."""
    workload, cluster = named([[(2, 17, 64, 64, 20), (1, 5, 64, 64, 20)]]), Cluster(nodes=(3,))
    slow = Profile.from_flops(WanConfig(num_heads=4))
    slow.handoff = Handoff(latency_s=0.5)
    piece = EarlyEncode(item="i0", module="text", workers=(0,), end_s=over_s, first=0, count=1)
    done = [piece, replace(piece, workers=(1,), end_s=0.0, first=1)]
    plan = make_plan(workload, slow, cluster, counted(strategy=strategy, budget_s=0.01), done=done)
    check(plan, workload, slow, cluster, done=done)
    assert not [c for c in plan.steps[0].cascades if c.module == "text" and c.item == "i0"]
    elsewhere = [c for c in plan.steps[0].cascades if c.module == "dit" and c.item == "i0" and 0 not in c.workers]
    assert all(c.start_s >= over_s + 0.5 for c in elsewhere if any(part.first == 0 for part in c.parts))


def test_ten_thousand_random_plans_drain_whatever_bags_overlap() -> None:
    """Workers take their cascades in the order of `rolling_cut`; one runs when all its workers stand at it."""
    source = random.Random(0)
    for _ in range(10_000):
        workers = source.randint(1, 6)
        cascades = tuple(
            Cascade(
                id=f"c{n}",
                module=source.choice(("vae", "dit")),
                step=0,
                parts=(),
                degree=len(bag),
                workers=bag,
                start_s=float(source.randint(0, 3)),
                end_s=9.0,
            )
            for n in range(source.randint(1, 10))
            for bag in [tuple(source.sample(range(workers), source.randint(1, workers)))]
        )
        step = StepPlan(step=0, cascades=cascades, makespan_s=9.0, lower_bound_s=0.0, planning_s=0.0, idle_ratio=0.0)
        executed = rolling_cut(Plan(strategy="cascade", steps=(step,)))
        assert len(executed) == len(cascades)
        queues = {w: [c for c in executed if w in c.workers] for w in range(workers)}
        while any(queues.values()):
            ready = [c for c in executed if all(queues[w] and queues[w][0] is c for w in c.workers)]
            assert ready, f"workers wait for each other: {queues}"
            for cascade in ready:
                for worker in cascade.workers:
                    queues[worker].pop(0)


SPEEDS = st.one_of(st.just(()), st.lists(st.sampled_from([1.0, 0.6, 0.8, 1.5]), min_size=8, max_size=8).map(tuple))


@settings(max_examples=8, deadline=None)
@given(st.lists(items, min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 2), SPEEDS)
def test_exact_is_not_above_cascade_and_cascade_not_above_its_start(
    step: list, size: int, nodes: int, speeds: tuple[float, ...]
) -> None:
    workload, cluster = named([step]), Cluster(nodes=(size,) * nodes, speed=speeds[: size * nodes])
    start, cascade, exact = (
        make_plan(workload, FLOPS, cluster, counted(strategy=name, budget_s=budget, proof_s=0.5)).steps[0].makespan_s
        for name, budget in (("cascade", 0.0), ("cascade", 0.02), ("exact", 0.02))
    )
    assert exact <= cascade * (1 + 1e-9) and cascade <= start * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_exact_finds_the_optimum_of_workers_of_unequal_speed(h100: Profile, seed: int) -> None:
    """Encoded batches, of which some can only run in bags: all orders, degrees and sets of workers are tried."""
    source = random.Random(seed)
    shapes = source.sample([(6, 5), (6, 9), (1, 69), (1, 77), (2, 57), (3, 41)], 3)
    step = [
        Item(id=f"i{n}", batch=b, frames=f, height=1280, width=720, cached=("vae",)) for n, (b, f) in enumerate(shapes)
    ]
    cluster = Cluster(nodes=(6,), speed=tuple(source.choice([1.0, 0.8, 0.6]) for _ in range(6)))
    options = counted(strategy="exact", budget_s=0.0, split=False)
    problem = Problem([step], h100, cluster, options)
    plan = make_plan([step], h100, cluster, options)
    check(plan, [step], h100, cluster)
    assert plan.steps[0].makespan_s == pytest.approx(best_by_worker(problem), rel=1e-3)


def best_by_worker(problem: Problem) -> float:
    """The shortest of all schedules of jobs that wait for nothing: every order, and every bag for every job."""
    jobs, workers = problem.jobs(), range(problem.topology.num_workers)
    bags = [
        [(bag, job.on(problem.topology, bag)) for k, _ in job.modes for bag in itertools.combinations(workers, k)]
        for job in jobs
    ]
    best = math.inf

    def extend(left: frozenset[int], free: tuple[float, ...]) -> None:
        nonlocal best
        if not left:
            best = min(best, max(free))
        for job in left:
            for bag, seconds in bags[job]:
                end = max(free[w] for w in bag) + seconds
                if end < best:
                    extend(left - {job}, tuple(end if w in bag else at for w, at in enumerate(free)))

    extend(frozenset(range(len(jobs))), (0.0,) * len(workers))
    return best


def test_genetic_places_the_few_fittest_of_a_pool_that_knows_no_slow_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(nodes=(3, 3), speed=(1.0, 0.5, 1.0, 1.0, 1.0, 1.0))
    ends: list[float] = []  # of what was placed for a step, the fittest first
    place = genetic.list_by_tail

    def placing(problem: Problem, jobs: Sequence[PlannedJob], degrees: Sequence[int]) -> ListSchedule:
        schedule = place(problem, jobs, degrees)
        ends.append(schedule.step_end)
        return schedule

    monkeypatch.setattr(genetic, "list_by_tail", placing)
    fittest = taken = 0.0
    for seed in range(4):
        ends.clear()
        step = [(1 + (n + seed) % 4, (5, 17, 33)[n % 3], 64, 64, 10) for n in range(6)]
        plan = make_plan(named([step]), FLOPS, cluster, counted(strategy="genetic", budget_s=0.02))
        assert len(ends) >= 4 and plan.steps[0].makespan_s == pytest.approx(min(ends))
        fittest, taken = fittest + ends[0], taken + min(ends)
    assert taken < 0.99 * fittest


@pytest.mark.parametrize("strategy", ["cascade", "genetic"])
def test_a_search_that_counts_its_work_looks_at_no_clock(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = [(1 + n % 4, (5, 17, 33)[n % 3], 64, 32 + 32 * (n % 2), 10) for n in range(8)]
    workload, cluster = named([step]), Cluster(nodes=(4,))

    def cascades(options: PlanOptions) -> tuple[Cascade, ...]:
        return make_plan(workload, FLOPS, cluster, options).steps[0].cascades

    plain = cascades(counted(strategy=strategy, budget_s=0.1))
    hours = itertools.count(0.0, 3600.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(hours))
    assert cascades(counted(strategy=strategy, budget_s=0.1)) == plain
    assert cascades(PlanOptions(strategy=strategy, budget_s=0.1)) != plain, "it never had to end"


def test_finished_encodes_are_not_planned_again() -> None:
    workload = named([[(2, 17, 64, 64, 10), (1, 33, 64, 64, 10)], [(1, 5, 64, 64, 10)]])
    done = [EarlyEncode(item="i0", module="vae", workers=(1,)), EarlyEncode(item="i0", module="text", workers=(0,))]
    plan = make_plan(workload, FLOPS, Cluster(nodes=(2,)), counted(budget_s=0.01), first_step=5, done=done)
    check(plan, workload, FLOPS, Cluster(nodes=(2,)), done=done)
    assert {c.module for c in plan.steps[0].cascades if c.item == "i0"} == {"dit"}
    assert plan.steps[0].step == 5
    gone = [*done, EarlyEncode(item="i1", module="vae", workers=(0, 2))]
    with pytest.raises(PlanError, match=r"vae of item 'i1' is done on worker 2, and the cluster has workers 0 to 1\."):
        make_plan(workload, FLOPS, Cluster(nodes=(2,)), counted(budget_s=0.01), first_step=5, done=gone)


@pytest.mark.parametrize("seed", range(6))
def test_brute_force_agrees_on_small_instances(h100: Profile, seed: int) -> None:
    source = random.Random(seed)
    shapes = source.sample([(6, 5), (6, 9), (1, 69), (1, 77), (2, 57), (3, 41)], 2)
    step = [Item(id=f"i{n}", batch=b, frames=f, height=1280, width=720) for n, (b, f) in enumerate(shapes)]
    cluster = Cluster(nodes=(8,))
    best = brute_force(Problem([step], h100, cluster, PlanOptions(split=False)))
    found = make_plan([step], h100, cluster, counted(budget_s=0.3, split=False)).steps[0].makespan_s
    proven = make_plan([step], h100, cluster, counted(strategy="exact", budget_s=0.3)).steps[0].makespan_s
    assert found == pytest.approx(best, rel=1e-6)
    assert proven == pytest.approx(best, rel=1e-3)


def brute_force(problem: Problem) -> float:
    """All orders and degrees of up to four jobs on one node, workers as a sorted list of free times."""
    jobs = problem.jobs()
    best = float("inf")
    modes = [[(k, s) for k, _, s in useful_modes(problem, job)] for job in jobs]
    for order in itertools.permutations(range(len(jobs))):
        if any(order.index(p) > order.index(i) for i, job in enumerate(jobs) for p in job.preds):
            continue
        for choice in itertools.product(*modes):
            free, end = [0.0] * problem.topology.num_workers, [0.0] * len(jobs)
            for index in order:
                degree, seconds = choice[index]
                start = max([free[degree - 1]] + [end[p] for p in jobs[index].preds])
                end[index] = start + seconds
                usable = sum(time <= start + 1e-12 for time in free)
                free[usable - degree : usable] = [end[index]] * degree  # best fit: those that were free last
                free.sort()
            best = min(best, max(end))
    return best
