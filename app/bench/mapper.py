"""`heddle bench mapper`: what each rule of the mapper is worth, as Arachne's ablation (section V-D, Table III).

Every set is planned five times by the same counted search, with all rules, without one of them, or by number. Where
bags keep to nodes the search knows the rules, and finds degrees and order that suit them; else workers are chosen
afterwards. A bag over nodes takes longer without common rails, by the profile's factor; a DiT cascade waits for latents
that none of its workers holds.
"""

from __future__ import annotations

import statistics
from typing import Annotated

import typer

from actors.plan.costs.handoff import Handoff
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.schedule.check import check
from actors.plan.schedule.figures import assemble
from actors.plan.schedule.problem import Mapper, PlanOptions, Problem
from actors.plan.strategies.cascade import plan_horizon
from actors.plan.types import Cluster, Item
from app.bench.workload import PROFILE, published_set

MAPPERS = {
    "all rules": Mapper(),
    "without producers": Mapper(producers=False),
    "without rails": Mapper(rails=False),
    "without nodes": Mapper(nodes=False),
    "by number": Mapper(nodes=False, rails=False, producers=False),
}
SETS = ("A-16gpu", "B-32gpu", "C-32gpu")


def run(
    budget: Annotated[float, typer.Option(help="Seconds of counted search per step.")] = 0.2,
    handoff: Annotated[float, typer.Option(help="Seconds that latents from other workers take.")] = 0.5,
    every: Annotated[int, typer.Option(help="Plan one step of every N.", min=1)] = 1,
) -> None:
    """Mean seconds of a single step by set and mapper."""
    profile = read_profile(PROFILE)
    profile.handoff = Handoff(latency_s=handoff)
    print(f"| set | {' | '.join(MAPPERS)} |\n|---|{'---|' * len(MAPPERS)}")
    for name in SETS:
        steps, cluster = published_set(name, every)
        means = [mean_step_s(steps, profile, cluster, mapper, budget) for mapper in MAPPERS.values()]
        print(f"| {name} | {' | '.join(f'{seconds:.2f}' for seconds in means)} |", flush=True)


def mean_step_s(steps: list[list[Item]], profile: Profile, cluster: Cluster, mapper: Mapper, budget_s: float) -> float:
    """Mean makespan of the steps, each planned alone. The search's own plan counts, also where knapsack's is better."""
    options = PlanOptions(budget_s=budget_s, counted=True, mapper=mapper)
    makespans = []
    for step in steps:
        problem = Problem([step], profile, cluster, options)
        plan = assemble(problem, plan_horizon(problem, 0, budget_s), 0.0)
        check(plan, [step], profile, cluster)
        makespans.append(plan.steps[0].makespan_s)
    return statistics.fmean(makespans)
