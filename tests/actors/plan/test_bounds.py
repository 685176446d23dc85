"""Lower bounds of steps, beside the best of all plans of tiny instances."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from actors.plan.costs.fetching import FetchedWeights
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.costs.topology import CrossNode, Topology
from actors.plan.schedule.bounds import rolling_bound, step_bound, within
from actors.plan.schedule.problem import PlanOptions, Problem
from actors.plan.types import ENCODED, Cluster, Item
from actors.planning.make_plan import make_plan
from ops.models.latte.config import LatteConfig
from ops.models.wan.config import WanConfig
from tests.actors.plan.options import counted

SHAPES = [(1, 32, 32), (1, 64, 32), (5, 64, 64), (17, 96, 32)]


def profile(source: random.Random) -> Profile:
    """Launches from nothing to all, weights fetched or not, one node's bags or dear ones over nodes, points that ran
    with noise."""
    made = Profile.from_flops(WanConfig(num_heads=4), launch_s=source.choice([2e-4, 5e-3, 0.1]))
    if source.random() < 0.3:
        made.count_fetched(FetchedWeights(num_bytes=1000, bytes_per_s=1000 / source.choice([0.01, 0.1, 1.0])))
    if source.random() < 0.3:
        made.cross_node = CrossNode(penalty=0.3, decay=1.0)
    for _ in range(source.choice([0, 0, 3])):
        part = Samples.of(source.randint(1, 3), source.choice(SHAPES), source.choice([20, 90]))
        degree = source.choice([1, 2])
        made.observe("dit", part, degree, made.seconds("dit", part, degree) * source.uniform(0.6, 1.6))
    return made


def items_of(source: random.Random, samples: int) -> list[Item]:
    items: list[Item] = []
    while left := samples - sum(item.batch for item in items):
        frames, height, width = source.choice(SHAPES)
        items.append(
            Item(
                id=f"i{len(items)}",
                batch=source.randint(1, left),
                frames=frames,
                height=height,
                width=width,
                text_tokens=source.choice([0, 20, 90]),
                expert=source.choice([0, 0, 1]),
                cached=ENCODED if source.random() < 0.7 else (),
            )
        )
    return items


def partitions(samples: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to put samples into cascades."""
    if not samples:
        yield []
        return
    first, rest = samples[0], samples[1:]
    for found in partitions(rest):
        yield [[first], *found]
        for number in range(len(found)):
            yield [*found[:number], [first, *found[number]], *found[number + 1 :]]


def least_makespan(items: Sequence[Item], made: Profile, cluster: Cluster) -> float:
    """The least of plans whose encodes are whole and come first: any samples in a cascade, on any workers."""
    topology = Topology(cluster, made.cross_node)
    everyone = range(cluster.num_workers)
    bags = [bag for k in (1, 2, 4) for bag in itertools.combinations(everyone, k)]
    of_sample = [item for item in items for _ in range(item.batch)]
    encodes = [(item, module) for item in items for module in ENCODED if module not in item.cached]
    known: dict[tuple, float] = {}
    ways = []
    for found in partitions(range(len(of_sample))):
        cascades = [[of_sample[n] for n in members] for members in found]
        if all(len({item.expert for item in cascade}) == 1 for cascade in cascades):
            ways.append(cascades)

    def seconds(cascade: list[Item], bag: tuple[int, ...]) -> float:
        key = (*sorted(item.id for item in cascade), bag)
        if key not in known:
            known[key] = made.on(topology, "dit", Samples.by_shape(Samples.of_item(i, 1) for i in cascade), bag)
        return known[key]

    least = float("inf")
    for homes in itertools.product(everyone, repeat=len(encodes)):
        begun, ready = [0.0] * cluster.num_workers, {item.id: 0.0 for item in items}
        for (item, module), home in zip(encodes, homes, strict=True):
            begun[home] += made.on(topology, module, [Samples.of_item(item, item.batch)], (home,))
            ready[item.id] = max(ready[item.id], begun[home])
        for cascades in ways:
            for order in itertools.permutations(cascades):
                for chosen in itertools.product(bags, repeat=len(order)):
                    free, last = list(begun), 0.0
                    for cascade, bag in zip(order, chosen, strict=True):
                        end = max(free[w] for w in bag)
                        end = max(end, *(ready[item.id] for item in cascade)) + seconds(cascade, bag)
                        for worker in bag:
                            free[worker] = end
                        last = max(last, end)
                        if last >= least:
                            break
                    least = min(least, last)
    return least


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_of_a_tiny_step_is_quicker_than_its_bound(seed: int) -> None:
    source = random.Random(seed)
    nodes = source.choice([(1,), (2,), (1, 1)])
    speed = tuple(source.choice([1.0, 1.0, 0.6]) for _ in range(sum(nodes)))
    made, cluster = profile(source), Cluster(nodes=nodes, speed=speed)
    items = items_of(source, source.randint(1, 3 if sum(nodes) > 1 else 4))
    problem = Problem([items], made, cluster, PlanOptions())
    bound = step_bound(problem, 0, within(problem, 0))
    assert 0 < bound <= least_makespan(items, made, cluster) * (1 + 1e-9)
    assert rolling_bound(problem) == pytest.approx(bound)


@pytest.mark.parametrize(
    ("items", "each", "limit", "split"), [(1, 37, 17.5, True), (37, 1, 17.5, True), (3, 10, 25.0, False)]
)
def test_a_cascade_of_as_many_samples_as_memory_allows_is_priced(
    items: int, each: int, limit: float, split: bool
) -> None:
    """Launches of a bag by slices are in no part that cascades have once: a sample costs less the more there are."""
    made = Profile.from_flops(LatteConfig(), launch_s=0.1)
    units = made.footprint("dit", [Samples.of(1, (17, 32, 32), 20)], 1).units
    made.needs.limits["dit", "solo"] = made.needs.limits["dit", "bag"] = limit * units
    clips = [
        Item(id=f"i{n}", batch=each, frames=17, height=32, width=32, text_tokens=20, cached=ENCODED)
        for n in range(items)
    ]
    (step,) = make_plan(
        [clips], made, Cluster(nodes=(1,)), counted(strategy="knapsack", budget_s=0.01, split=split)
    ).steps
    assert step.lower_bound_s <= step.makespan_s * (1 + 1e-9)


def test_of_degrees_that_a_limit_of_peers_hides_the_largest_cascade_is_priced_as_well() -> None:
    """Bags of three hide those of four, but not where memory has room for four alone."""
    made = Profile.from_flops(LatteConfig(), launch_s=0.1, degrees=(3, 4))
    units = made.footprint("dit", [Samples.of(1, (17, 32, 32), 20)], 1).units
    made.needs.limits["dit", "solo"] = made.needs.limits["dit", "bag"] = 3.3 * units
    bounds, cluster = list[float](), Cluster(nodes=(4,))
    for items, each in ((39, 1), (3, 13)):
        clips = [
            Item(id=f"i{n}", batch=each, frames=17, height=32, width=32, text_tokens=20, cached=ENCODED)
            for n in range(items)
        ]
        (step,) = make_plan([clips], made, cluster, counted(budget_s=0.01, bag_peers=2)).steps
        bounds.append(step.lower_bound_s)
    assert bounds[0] <= step.makespan_s * (1 + 1e-9)


def test_what_a_bound_takes_does_not_grow_with_the_texts_of_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Samples]()
    price = Problem._price
    monkeypatch.setattr(Problem, "_price", lambda self, module, part: asked.append(part) or price(self, module, part))
    made = Profile.from_flops(WanConfig(num_heads=4))
    items = [
        Item(id=f"i{n}", batch=1 + n % 4, frames=17, height=96, width=32, text_tokens=20 + n, cached=ENCODED)
        for n in range(200)
    ]
    problem = Problem([items], made, Cluster(nodes=(2,)), PlanOptions())
    step_bound(problem, 0, within(problem, 0))
    assert 0 < len(asked) < 100


def test_the_bound_of_pictures_that_share_launches_is_what_their_packs_take() -> None:
    """One worker: nothing but one pack for each expert is quickest, and it has the launches of one: the most of any."""
    made = Profile.from_flops(WanConfig(num_heads=4), launch_s=0.1)
    items = [
        Item(
            id=f"i{n}{expert}",
            batch=n,
            frames=1,
            height=32 * n,
            width=64,
            text_tokens=20,
            expert=expert,
            cached=ENCODED,
        )
        for n in (1, 2, 20)
        for expert in (0, 1)
    ]
    (step,) = make_plan([items], made, Cluster(nodes=(1,)), counted(budget_s=0.01)).steps
    assert step.makespan_s == pytest.approx(step.lower_bound_s)
    apart = sum(made.seconds("dit", Samples.of_item(item, item.batch), 1) for item in items)
    assert step.makespan_s == pytest.approx(apart - 4 * made.once("dit", Samples.of_item(items[0], 1), 1))
    ran = [Samples.of_item(item, item.batch) for item in items[2::2]]
    for part, seconds in [(part, made.seconds("dit", part, 1) / (2 + at)) for at, part in enumerate(ran)]:
        made.observe("dit", part, 1, seconds)
    (step,) = make_plan([items], made, Cluster(nodes=(1,)), counted(budget_s=0.01)).steps
    assert step.makespan_s == pytest.approx(step.lower_bound_s, rel=1e-4)


SIZES = {"frames": 17, "height": 64, "width": 64}


def bound_of(batches: Sequence[int], made: Profile, cluster: Cluster, split: bool = True) -> float:
    items = [Item(id=f"i{at}", batch=n, text_tokens=20, cached=ENCODED, **SIZES) for at, n in enumerate(batches)]
    return step_bound(Problem([items], made, cluster, PlanOptions(split=split)), 0, ("dit",))


def test_the_bound_has_the_samples_of_a_large_batch_apart_where_it_may_be_cut() -> None:
    """Strategies that deal single samples do it in any number, not in up to 16 pieces as others cut a batch."""
    measured = [
        {"module": "dit", "degree": 1, "batch": n, "seconds": seconds, "text_tokens": 20, **SIZES}
        for n, seconds in ((1, 1.0), (20, 40.0))
    ]
    made, more = (
        read_profile({"latency": measured, "extrapolate": extrapolate, "degrees": {"dit": [1]}})
        for extrapolate in (False, True)
    )
    item = Item(id="a", batch=20, text_tokens=20, cached=ENCODED, **SIZES)
    (step,) = make_plan([[item]], made, Cluster(nodes=(4,)), PlanOptions(strategy="knapsack", budget_s=0.0)).steps
    assert step.makespan_s == pytest.approx(5.0) and step.lower_bound_s <= 5.0 * (1 + 1e-9)
    one_slow = Cluster(nodes=(40,), speed=(0.5, *[1.0] * 39))
    assert bound_of([20], made, one_slow) == pytest.approx(1.0), "as quick as a sample on a quick worker"
    assert bound_of([20], made, one_slow, split=False) == pytest.approx(40.0)
    assert bound_of([20], more, one_slow, split=False) == pytest.approx(40.0)


def test_the_bound_knows_of_packs_that_noise_has_made_quick() -> None:
    """A pack of two clips that ran in less than one of them alone, and one of 11 that no cut of the batches has."""
    made = Profile.from_flops(WanConfig(num_heads=4))
    made.observe("dit", Samples.of(1, (17, 64, 64), 20), 1, 3.0)
    made.observe("dit", Samples.of(2, (17, 64, 64), 20), 1, 1.0)
    assert bound_of([1, 1], made, Cluster(nodes=(1,))) == pytest.approx(1.0)
    assert bound_of([1, 1], made, Cluster(nodes=(1,), speed=(2.0,))) == pytest.approx(0.5)
    made = Profile.from_flops(WanConfig(num_heads=4))
    for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 22):
        made.observe("dit", Samples.of(n, (17, 64, 64), 20), 1, 0.2 * n)
    made.observe("dit", Samples.of(11, (17, 64, 64), 20), 1, 1.1)
    assert bound_of([10, 12], made, Cluster(nodes=(1,))) <= 2 * 1.1
    made = Profile.from_flops(WanConfig(num_heads=4))
    for n, seconds in ((1, 0.1), (2, 4.0), (3, 6.0)):
        made.observe("dit", Samples.of(n, (17, 64, 64), 20), 1, seconds)
    assert bound_of([1, 2], made, Cluster(nodes=(1,)), split=False) <= 4.1, "one after the other"


def test_the_bound_waits_for_the_longest_encode_of_an_item() -> None:
    points = [
        {"module": module, "degree": 1, "batch": 1, "seconds": seconds, **SIZES}
        for module, seconds in (("text", 2.0), ("vae", 1.0), ("dit", 1.0))
    ]
    made = read_profile({"latency": points, "extrapolate": False})
    problem = Problem([[Item(id="a", batch=1, **SIZES)]], made, Cluster(nodes=(4,)), PlanOptions())
    assert step_bound(problem, 0, within(problem, 0)) == pytest.approx(3.0)
