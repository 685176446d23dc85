"""Where GPUs sit in their nodes: how far they are apart, which are taken for a bag, and what islands cost."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import profile_json, read_profile
from actors.plan.costs.topology import CrossIsland, CrossNode, Topology
from actors.plan.schedule.check import check
from actors.plan.schedule.evaluator import cascade_seconds
from actors.plan.schedule.listing import ListSchedule
from actors.plan.schedule.problem import PlannedJob, PlanOptions, Problem, StepContext
from actors.plan.strategies.search.improve import draw_bag
from actors.plan.strategies.search.space import SearchResult
from actors.plan.types import Cascade, Cluster, GpuPlace, Item, Part, PlanError, hops_between, places_in
from actors.planning.make_plan import make_plan
from ops.models.wan.config import WanConfig
from tests.actors.plan.options import counted

ITEM = Item(id="a", batch=1, frames=13, height=720, width=1280, text_tokens=100)
PAIRS = Cluster(nodes=(8,), places=places_in((8,), islands="AABBCCDD", numa=(0, 0, 0, 0, 1, 1, 1, 1)))


def on_pci(numa: int | None, *bridges: str) -> GpuPlace:
    return GpuPlace(bridges=bridges, numa=numa)


@pytest.mark.parametrize(
    ("one", "other", "hops"),
    [
        # two downstream ports of one switch; a second switch below it; two root ports of a host bridge
        (on_pci(0, "pci15", "15:1", "16:0", "17:0"), on_pci(0, "pci15", "15:1", "16:0", "17:1"), 0),
        (on_pci(0, "pci15", "15:1", "16:0", "17:0"), on_pci(0, "pci15", "15:1", "16:0", "17:1", "18:0", "19:0"), 1),
        (on_pci(0, "pci15", "15:1", "16:0"), on_pci(0, "pci15", "15:2", "26:0"), 2),
        (on_pci(0, "pci15", "15:1"), on_pci(0, "pci25", "25:1"), 3),
        (on_pci(0, "pci15", "15:1"), on_pci(1, "pci95", "95:1"), 4),
        (on_pci(None, "pci00"), on_pci(None, "pci00"), 2),  # a virtual machine: all below one host bridge
        (on_pci(0), on_pci(0), 3),
        (on_pci(0), on_pci(1), 4),
        (on_pci(None), on_pci(1), 0),
    ],
)
def test_hops_are_the_classes_of_nvidia_smi(one: GpuPlace, other: GpuPlace, hops: int) -> None:
    assert hops_between(one, other) == hops_between(other, one) == hops


def bag(
    profile: Profile,
    cluster: Cluster,
    free: dict[int, float],
    degree: int,
    held: tuple[int, ...] = (),
    detour: float = 0.0,
) -> tuple[int, ...]:
    """Workers of a dit of one second where it ends first; `free`: busy until then, `held`: the workers that have its
    latents."""
    problem = Problem([[ITEM]], profile, cluster, PlanOptions())
    encode = PlannedJob("vae", 0, (0, "a"), 0, 1, ((len(held) or 1, 0.0),))
    dit = PlannedJob("dit", 0, (0, "a"), 0, 1, ((degree, 1.0),), preds=(0,), detours=((degree, detour),))
    workers = range(cluster.num_workers)
    schedule = ListSchedule(problem, [encode, dit], StepContext(tuple(free.get(worker, 0.0) for worker in workers)))
    if held:
        schedule.fix(0, held)
    else:
        schedule.end[0] = 0.0
    schedule.place(1, degree)
    return schedule.where[1]


def test_a_bag_takes_one_island_then_one_memory_node(h100: Profile) -> None:
    assert bag(h100, PAIRS, {}, 2) == (6, 7)
    assert bag(h100, PAIRS, {0: 5.0, 3: 5.0, 4: 5.0}, 2) == (6, 7), "the only whole pair"
    assert bag(h100, PAIRS, {7: 5.0}, 4) == (0, 1, 2, 3), "two pairs of one memory node, not three of both"
    assert bag(h100, PAIRS, {1: 5.0, 7: 5.0}, 3) == (4, 5, 6), "a pair, and one of its memory node"


def test_without_islands_pcie_decides(h100: Profile) -> None:
    numa = Cluster(nodes=(8,), places=places_in((8,), numa=(0, 0, 0, 0, 1, 1, 1, 1)))
    assert bag(h100, numa, {4: 5.0}, 4) == (0, 1, 2, 3)
    assert bag(h100, Cluster(nodes=(8,)), {4: 5.0}, 4) == (3, 5, 6, 7), "where nothing is known, by number"


@pytest.mark.parametrize("known", [places_in((8,), islands="AAAAAAAA", numa=(0, 0, 0, 0, 1, 1, 1, 1)), ()])
def test_where_all_are_as_near_the_best_fit_decides(h100: Profile, known: tuple[GpuPlace, ...]) -> None:
    cluster = Cluster(nodes=(8,), places=known)
    encoded = {worker: 0.1 * worker for worker in range(8)}
    assert bag(h100, cluster, encoded | {7: 5.0}, 2) == bag(h100, Cluster(nodes=(8,)), encoded | {7: 5.0}, 2)


def test_an_island_is_waited_for_only_where_leaving_it_costs_more(h100: Profile) -> None:
    busy = {1: 0.2, 3: 9.0, 5: 9.0, 7: 9.0}  # one free worker in every pair; the first is whole in 0.2 s
    assert bag(h100, PAIRS, busy, 2) == (4, 6), "costs nothing: the start counts"
    assert bag(h100, PAIRS, busy, 2, detour=0.1) == (4, 6)
    assert bag(h100, PAIRS, busy, 2, detour=0.3) == (0, 1)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["AAAAAAAA", "AABBCCDD", "AAAABBBB", "ABABABAB", "AAABBBCC"]),
    st.sampled_from([(0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 1, 1, 0, 0, 1, 1)]),
    st.integers(2, 7),
    st.sets(st.integers(0, 7), max_size=4),
)
def test_the_nearest_are_as_near_as_the_best_of_all_sets(
    islands: str, numa: tuple[int, ...], count: int, away: set[int]
) -> None:
    topology = Topology(Cluster(nodes=(8,), places=places_in((8,), islands=islands, numa=numa)), CrossNode())
    wished = [worker for worker in range(8) if worker not in away]
    if count > len(wished):
        return
    found = topology.near[0].nearest(wished, count)
    least = min(topology.near[0].apart(some) for some in combinations(wished, count))
    assert len(set(found)) == count and set(found) <= set(wished)
    assert topology.near[0].apart(found) == least


def test_a_bag_strays_only_where_fewer_islands_hold_it() -> None:
    topology = Topology(PAIRS, CrossNode())
    assert [topology.strays(some) for some in ((0, 1), (1, 2), (0, 1, 2), (0, 2, 4), (0, 1, 2, 3))] == [
        False,
        True,
        False,
        True,
        False,
    ]
    left = Topology(Cluster(nodes=(3,), places=tuple(PAIRS.places[w] for w in (0, 2, 4))), CrossNode())
    assert not left.strays((0, 1)), "after losses every island has one GPU"


def test_rails_are_those_of_the_gpus_that_are_there() -> None:
    """Worker 0 is lost: by position every later worker would have its neighbour's rail."""
    letters = CrossNode(rails_per_node="AABBCCDD")
    left = tuple(GpuPlace(index=gpu) for gpu in range(1, 8))
    assert "".join(Topology(Cluster(nodes=(7,), places=left), letters).rail) == "ABBCCDD"
    assert "".join(Topology(Cluster(nodes=(7,)), letters).rail) == "AABBCCD", "nobody knows the GPUs"
    own = tuple(replace(place, rail="XY"[number % 2]) for number, place in enumerate(left))
    assert "".join(Topology(Cluster(nodes=(7,), places=own), letters).rail) == "XYXYXYX", "the workers' own count"


def test_over_nodes_the_way_to_the_nic_counts_after_the_rails(h100: Profile) -> None:
    """One rail: the GPUs beside the NIC are taken, then those of one island."""
    hops = (3, 3, 0, 0)
    places = tuple(replace(place, nic_hops=hops[place.index or 0]) for place in places_in((4, 4), rails="AAAA"))
    problem = Problem([[ITEM]], h100, Cluster(nodes=(4, 4), places=places), PlanOptions())
    job = PlannedJob("dit", 0, (0, "a"), 0, 1, ((4, 1.0),))
    schedule = ListSchedule(problem, [job, job])
    schedule.put(0, 4, (0, 1))
    assert schedule.where[0] == (2, 3, 6, 7)
    islands = Cluster(nodes=(4, 4), places=places_in((4, 4), rails="AAAA", islands="ABBA"))
    schedule = ListSchedule(Problem([[ITEM]], h100, islands, PlanOptions()), [job])
    schedule.put(0, 4, (0, 1))
    assert schedule.where[0] in ((0, 3, 4, 7), (1, 2, 5, 6))


def test_over_nodes_equal_workers_are_chosen_by_what_they_hold(h100: Profile) -> None:
    """Bags of four, on two of three nodes and two of their rails."""
    nodes = (3, 3, 3)
    plain = Cluster(nodes=nodes, places=places_in(nodes, rails="ABC"))
    assert bag(h100, plain, {}, 4) == (0, 1, 3, 4)
    assert bag(h100, plain, {}, 4, held=(8,)) == (0, 2, 6, 8)
    assert bag(wan(), Cluster(nodes=nodes), {}, 4, held=(5,)) == (0, 1, 3, 5), "one rail for all"


def test_a_drawn_bag_of_a_node_is_near(h100: Profile) -> None:
    problem = Problem([[ITEM]], h100, PAIRS, PlanOptions())
    job = PlannedJob("dit", 0, (0, "a"), 0, 1, ((4, 1.0),))
    found = SearchResult(1.0, 1.0, [0], [4], [(0,)], [0.0], 0)
    for seed in range(10):
        drawn = draw_bag(ListSchedule(problem, [job]), 0, found, random.Random(seed))
        assert drawn in ((0, 1, 2, 3), (4, 5, 6, 7))


def seconds(profile: Profile, cluster: Cluster, workers: tuple[int, ...], item: Item = ITEM) -> float:
    """As the evaluator prices a whole item on these workers."""
    part = Part(item="a", first=0, count=item.batch)
    cascade = Cascade(
        id="a", module="dit", step=0, parts=(part,), degree=len(workers), workers=workers, start_s=0.0, end_s=0.0
    )
    return cascade_seconds(cascade, {(0, "a"): item}, profile, Topology(cluster, profile.cross_node))


def wan(exchange_gbps: float = 200.0) -> Profile:
    return Profile.from_flops(WanConfig(), tflops=400.0, exchange_gbps=exchange_gbps, degrees=(1, 2, 4))


def test_a_bag_across_islands_pays_what_the_cluster_file_says() -> None:
    """All bytes of its all-to-alls at 20 GB/s instead of 200."""
    profile, slow = wan(), replace(PAIRS, island_gbps=20.0)
    inside, across = seconds(profile, slow, (0, 1)), seconds(profile, slow, (1, 2))
    rows = profile.load_of("dit", Samples.of(1, (13, 720, 1280), 100), 2).sent
    assert profile.row_bytes * rows / 200e9 < inside < across
    assert across - inside == pytest.approx(profile.row_bytes * rows * (1 / 20e9 - 1 / 200e9))
    assert seconds(profile, slow, (0, 1, 2, 3)) == seconds(profile, PAIRS, (0, 2, 4, 6)), "no island holds four"
    assert seconds(profile, PAIRS, (1, 2)) == inside, "nothing is said of it"
    assert seconds(profile, replace(PAIRS, island_gbps=500.0), (1, 2)) == inside, "no quicker than inside"


def test_a_profile_may_say_what_islands_cost() -> None:
    profile = wan()
    profile.cross_island = CrossIsland(row_s=1e-6)
    rows = profile.load_of("dit", Samples.of(1, (13, 720, 1280), 100), 2).sent
    inside = seconds(profile, PAIRS, (0, 1))
    assert seconds(profile, replace(PAIRS, island_gbps=20.0), (1, 2)) == pytest.approx(inside + 1e-6 * rows)
    profile.cross_island = CrossIsland(penalty=0.25)
    assert seconds(profile, PAIRS, (1, 2)) == pytest.approx(1.25 * inside)


def test_a_profile_file_keeps_what_islands_cost() -> None:
    profile = Profile(degrees={"dit": (1, 2)}, cross_island=CrossIsland(penalty=0.25, row_s=1e-6))
    profile.measure(("dit", 1, 13, 720, 1280, 2), 3.0)
    again = read_profile(profile_json(profile))
    assert again.cross_island == profile.cross_island
    with pytest.raises(PlanError, match="penalty is -1"):
        read_profile(profile_json(profile) | {"cross_island": {"penalty": -1}})


@pytest.mark.parametrize("strategy", ["cascade", "static", "longest_first", "flexsp", "knapsack", "genetic"])
def test_plans_of_every_strategy_are_legal_where_islands_cost(strategy: str) -> None:
    """Their times are those of the evaluator, also of encodes that fill gaps."""
    profile = wan()
    profile.cross_island = CrossIsland(penalty=0.5)
    cluster = Cluster(nodes=(8, 8), places=places_in((8, 8), rails="AABBCCDD", islands="AABBCCDD"))
    steps = [
        [Item(id=f"{frames}", batch=2, frames=frames, height=480, width=832, text_tokens=60) for frames in sizes]
        for sizes in ((17, 33, 49, 81), (81, 65, 33))
    ]
    plan = make_plan(steps, profile, cluster, counted(strategy=strategy, budget_s=0.05))
    check(plan, steps, profile, cluster)


def test_a_search_keeps_bags_in_their_islands() -> None:
    """Four clips of two GPUs each, two at a time, on two pairs whose numbers alternate."""
    profile = wan()
    profile.cross_island = CrossIsland(penalty=0.5)
    cluster = Cluster(nodes=(4,), places=places_in((4,), islands="ABAB"))
    step = [Item(id=str(n), batch=1, frames=33, height=480, width=832, text_tokens=60) for n in range(4)]
    plan = make_plan([step], profile, cluster, counted(budget_s=0.05, degrees=(2,)))
    bags = {cascade.workers for cascade in plan.steps[0].cascades if cascade.module == "dit"}
    assert bags == {(0, 2), (1, 3)}
