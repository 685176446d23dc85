"""Measured handoffs become a cost of the plan, when they matter."""

from __future__ import annotations

import math

import numpy as np
import pytest

from actors.messages import Span
from actors.plan.costs.handoff import Handoff
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.schedule.listing import ListSchedule
from actors.plan.schedule.problem import PlanOptions, Problem, StepContext
from actors.plan.strategies.search.step_jobs import StepsAhead, later_jobs, own_jobs
from actors.plan.types import ENCODED, Cluster, EarlyEncode, Item
from actors.planning.actor import fetches
from actors.planning.make_plan import make_plan
from ops.models.wan.config import WanConfig

GIB = 2**30


def observed(dit_s: float, handoffs: list[tuple[int, float]]) -> Handoff:
    profile = Profile.from_flops(WanConfig(num_layers=2, num_heads=4, head_dim=16, ffn_dim=128, freq_dim=32))
    for _ in range(3):
        profile.observe("dit", Samples.of(1, (1, 64, 64)), 1, dit_s)
    for num_bytes, seconds in handoffs:
        profile.observe_handoff(num_bytes, seconds)
    return profile.handoff


def test_latency_and_bandwidth_are_found_through_outliers() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.choice([2**20, 2**28], size=40)
    seconds = 0.02 + sizes / (2.0 * GIB) * rng.uniform(0.95, 1.05, 40)
    seconds[::9] += 3.0  # a host that was busy with something else
    found = observed(1.0, list(zip(sizes.tolist(), seconds.tolist())))
    assert found.latency_s == pytest.approx(0.02, rel=0.2)
    assert found.gib_per_s == pytest.approx(2.0, rel=0.2)


def test_handoffs_of_one_size_are_a_latency() -> None:
    assert observed(1.0, [(1000, 0.05)] * 10) == Handoff(latency_s=0.05)


def test_handoffs_below_a_percent_of_a_cascade_cost_nothing() -> None:
    assert observed(10.0, [(1000, 0.05)] * 10) == Handoff()


def test_few_handoffs_change_nothing() -> None:
    profile = Profile(handoff=Handoff(latency_s=0.5), extrapolate=False)
    for _ in range(5):
        profile.observe_handoff(1000, 0.1)
    assert profile.handoff == Handoff(latency_s=0.5)


@pytest.mark.parametrize("channels", [16, 48, 128])
def test_what_is_handed_over_has_the_channels_of_the_model(channels: int) -> None:
    """A second for each 1,000 bytes: of 5 by 4 by 6 places of 4 bytes a channel."""
    profile = Profile.from_flops(WanConfig(num_heads=4, in_channels=channels, out_channels=channels))
    profile.handoff = Handoff(gib_per_s=1000 / GIB)
    clip = Item(id="a", batch=1, frames=20, height=32, width=48)
    assert profile.handoff_seconds(clip, 1) == pytest.approx(5 * 4 * 6 * 4 * channels / 1000)


def test_impossible_measurements_are_refused() -> None:
    for num_bytes, seconds in ((1, float("nan")), (1, -0.1), (-1, 0.1)):
        with pytest.raises(ValueError, match="handoff of"):
            Profile().observe_handoff(num_bytes, seconds)


def span(cascade: str, fetch_s: float | None, num_bytes: int = 8) -> Span:
    return Span(
        name="", module="dit", cascade=cascade, step=0, start=0, end=1, fetched_bytes=num_bytes, fetch_s=fetch_s
    )


def test_a_bag_counts_once_with_its_quickest_rank() -> None:
    spans = [span("a", 0.4), span("a", 0.1), span("a", None), span("b", None), span("c", 0.3, 16)]
    assert fetches(spans) == [(8, 0.1), (16, 0.3)]


@pytest.mark.parametrize("of_horizon", [True, False], ids=["in an earlier step of this plan", "in a step before it"])
def test_what_was_encoded_early_is_handed_over_like_anything_else(of_horizon: bool) -> None:
    """The search places a DiT cascade where its encode ran, or has it wait for the handoff, as the evaluator does."""
    sizes = {"batch": 1, "frames": 17, "height": 64, "width": 64}
    points = [{"module": module, "degree": 1, "seconds": 1.0, **sizes} for module in ("vae", "dit")]
    profile = read_profile({"latency": points, "extrapolate": False, "handoff": {"latency_s": 5.0}})
    item, cluster = Item(id="x", **sizes), Cluster(nodes=(2,))
    early = () if of_horizon else (EarlyEncode(item="x", module="vae", workers=(1,), end_s=2.0),)
    problem = Problem([[item]], profile, cluster, PlanOptions(), done=early)
    context = StepContext((0.0, 4.0), 0.0, {((0, "x"), "vae", 0, 1): (2.0, (1,))}) if of_horizon else problem.start
    elsewhere, free = (ListSchedule(problem, own_jobs(problem, context, 0), context) for _ in range(2))
    elsewhere.fix(0, (0,))
    assert elsewhere.begin == [7.0], "its end and the handoff"
    free.place(0, 1)
    assert free.where == {0: (1,)} and free.begin == [max(2.0, context.free_s[1])], "although the other is free before"


@pytest.mark.parametrize("nodes", [(2,), (3,), (2, 2)])
@pytest.mark.parametrize("latency_s", [0.001, 0.01, 0.1, 1.0])
def test_a_plan_without_search_pays_no_handoff_that_costs_more_than_it_gains(
    nodes: tuple[int, ...], latency_s: float
) -> None:
    """Text and latents of a clip on two workers are encoded at the same time, and one of them is handed over: never
    where one worker that does all is quicker."""
    profile, cluster = Profile.from_flops(WanConfig(num_heads=4)), Cluster(nodes=nodes)
    profile.handoff = Handoff(latency_s=latency_s)
    for sizes in ([1], [1, 2], [2, 1, 3]):
        items = [
            Item(id=f"i{n}", batch=1, frames=1, height=32 * side, width=64, text_tokens=40)
            for n, side in enumerate(sizes)
        ]
        options = PlanOptions(budget_s=0.0, degrees=(1,))
        plan = make_plan([items], profile, cluster, options)
        alone = [make_plan([[item]], profile, Cluster(nodes=(1,)), options).steps[0].makespan_s for item in items]
        least = max(alone) if len(items) <= cluster.num_workers else sum(alone)
        assert plan.steps[0].makespan_s <= least * (1 + 1e-9)


@pytest.mark.parametrize("latency_s", [0.001, 0.1, 1.0])
def test_encodes_that_run_ahead_do_not_hold_up_the_next_step_by_their_handoffs(latency_s: float) -> None:
    profile, cluster = Profile.from_flops(WanConfig(num_heads=4)), Cluster(nodes=(2, 2))
    profile.handoff = Handoff(latency_s=latency_s)
    sides = [[1, 2, 3], [3, 1], [2, 2, 1]]
    steps = [
        [
            Item(id=f"i{n}", batch=1, frames=17, height=32 * side, width=64, text_tokens=40)
            for n, side in enumerate(step)
        ]
        for step in sides
    ]
    ahead, alone = (
        sum(step.makespan_s for step in make_plan(steps, profile, cluster, options).steps)
        for options in (PlanOptions(budget_s=0.0, lookahead=1), PlanOptions(budget_s=0.0, lookahead=0))
    )
    assert ahead <= alone * 1.1


SIZES = {"batch": 1, "frames": 17, "height": 64, "width": 64}


def priced(latency_s: float, dit_s: float) -> Profile:
    """Encodes of a second, VAE's on two workers, too."""
    seconds = {("text", 1): 1.0, ("vae", 1): 1.0, ("vae", 2): 1.0, ("dit", 1): dit_s}
    points = [
        {"module": module, "degree": degree, "seconds": took, **SIZES} for (module, degree), took in seconds.items()
    ]
    return read_profile({"latency": points, "extrapolate": False, "handoff": {"latency_s": latency_s}})


@pytest.mark.parametrize(("latency_s", "ahead"), [(0.5, 2), (7.5, 2), (8.5, 1), (9.5, 0)])
def test_encodes_run_ahead_where_their_handoffs_are_over_by_the_end_of_the_step(latency_s: float, ahead: int) -> None:
    """Beside a dit of 10 s on the first of two workers, after which there is no gap."""
    steps = [[Item(id="x", cached=ENCODED, **SIZES)], [Item(id="y", **SIZES)]]
    problem = Problem(steps, priced(latency_s, dit_s=10.0), Cluster(nodes=(2,)), PlanOptions())
    schedule = ListSchedule(problem, own_jobs(problem, problem.start, 0), problem.start)
    schedule.place(0, 1)
    schedule.fill(math.inf, later_jobs(problem, problem.start, 0, StepsAhead((1,))))
    assert [schedule.end[placed.job] for placed in schedule.placed] == [10.0, 1.0, 2.0][: 1 + ahead]


def test_an_encode_goes_to_the_one_of_its_item_that_ran_before_also_on_another_node() -> None:
    early = (EarlyEncode(item="x", module="text", workers=(1,), end_s=0.0),)
    problem = Problem(
        [[Item(id="x", **SIZES)]], priced(5.0, dit_s=1.0), Cluster(nodes=(1, 1)), PlanOptions(), done=early
    )

    def placed(degree: int, together: bool) -> dict[int, tuple[int, ...]]:
        schedule = ListSchedule(problem, own_jobs(problem, problem.start, 0), problem.start, together=together)
        schedule.place(0, degree)
        return schedule.where

    assert placed(1, together=False) == {0: (0,)} and placed(1, together=True) == {0: (1,)}
    assert placed(2, together=True) == {0: (0, 1)}, "no node has two"


def test_an_encode_that_is_no_hurry_for_its_dit_goes_where_it_ends_first() -> None:
    """Its dit waits for a text of worker 0 longer than for latents of worker 1 with their handoff."""
    early = (EarlyEncode(item="x", module="text", workers=(0,), end_s=10.0),)
    problem = Problem(
        [[Item(id="x", **SIZES)]], priced(5.0, dit_s=1.0), Cluster(nodes=(1, 1)), PlanOptions(), done=early
    )
    context = StepContext((3.0, 0.0), 0.0, {})
    schedule = ListSchedule(problem, own_jobs(problem, context, 0), context, together=True)
    schedule.place(0, 1)
    assert schedule.where == {0: (1,)}
