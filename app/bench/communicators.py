"""`heddle bench communicators`: what the limit of a worker's open bags (`planner.bag_peers`) costs and saves.

Steps of Koala-like items are planned as a run plans them, one after the other, and the controller's own account says
which bags are open. Seconds are those of the cost model on GPUs of 400 TFLOP/s; connections are counted in the plans
that a run would execute.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.schedule.check import check
from actors.plan.schedule.problem import PlanOptions
from actors.plan.types import Cluster
from actors.planning.make_plan import make_plan, rolling_cut
from actors.planning.memory import PEER_GIB
from actors.run.communicators import Communicators
from app.bench.planner import CONFIGS
from app.inputs.items import batches_of, items_from_buckets
from app.settings.config import RunConfig
from ops.geometry import Geometry

# model, its config, clusters; of every 8 GPUs a step has 8 items. Degrees are those that divide the heads.
CASES = (("1.3B", "wan2.1-1.3b", ("1x8", "2x8", "4x8")), ("14B", "wan2.1-14b", ("4x8",)))
DEGREES = {"1.3B": (1, 2, 3, 4, 6, 12), "14B": (1, 2, 4, 5, 8, 10, 20)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBags:
    """A step as a run would execute it: its seconds, and the bags of its cascades in their order."""

    seconds: float
    bags: list[tuple[int, ...]]


def run(
    steps: Annotated[int, typer.Option(help="Planned steps of each case.", min=1)] = 1000,
    budget: Annotated[float, typer.Option(help="Seconds of counted search per step.")] = 0.02,
    peers: Annotated[int, typer.Option(help="The limit: planner.bag_peers.", min=1)] = 11,
    only: Annotated[str, typer.Option(help="Cases to plan, as 1.3B:2x8,14B:4x8; empty: all.")] = "",
) -> None:
    """Two rows per model and cluster: without and with the limit. Equal degrees make equal plans, found once."""
    cases = [f"{model}:{spec}" for model, _, specs in CASES for spec in specs]
    chosen = only.split(",") if only else cases
    if unknown := set(chosen) - set(cases):
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))}; the cases are {', '.join(cases)}.", param_hint="--only"
        )
    print(
        "| model, cluster, limit | distinct bags | bags of a GPU, most | GiB, most | made per step "
        "| mean step, s | against no limit |"
    )
    print("|---|---|---|---|---|---|---|")
    for model, config, clusters in CASES:
        for spec in clusters:
            if f"{model}:{spec}" not in chosen:
                continue
            cluster = Cluster.parse(spec)
            free = planned_bags(model, config, cluster, steps, budget, 0)
            larger = any(peers + 1 < degree <= cluster.num_workers for degree in DEGREES[model])
            bound = planned_bags(model, config, cluster, steps, budget, peers) if larger else free
            reference = statistics.fmean(step.seconds for step in free)
            for most, planned in ((0, free), (peers, bound)):
                print(f"| {model}, {spec}, {most or 'none'} | {_figures(planned, most, reference)} |", flush=True)


def _figures(planned: Sequence[PlannedBags], most: int, reference_s: float) -> str:
    account, bags, made = Communicators(most), 0, 0
    for step in planned:
        made += account.step(step.bags).made
        bags = max(bags, *(account.bags(worker) for bag in step.bags for worker in bag))
    seconds = statistics.fmean(step.seconds for step in planned)
    distinct = {bag for step in planned for bag in step.bags if len(bag) > 1}
    return (
        f"{len(distinct)} | {bags} | {PEER_GIB * account.most_seen:.1f} | {made / len(planned):.2f} | {seconds:.2f} "
        f"| {seconds / reference_s:.4f}"
    )


def planned_bags(
    model: str, config: str, cluster: Cluster, steps: int, budget_s: float, most: int
) -> list[PlannedBags]:
    """Plan so many steps of the buckets of Koala-36M, drawn equally often."""
    settings = RunConfig.load(CONFIGS / "data" / "koala36m.yaml", ["run.name=bench"])
    shape = RunConfig.load(CONFIGS / "models" / f"{config}.yaml", ["run.name=bench"]).model
    settings = replace(settings, data=replace(settings.data, items_per_step=cluster.num_workers))
    profile = Profile.from_flops(
        shape.dit, shape.vae, geometry=Geometry(), tflops=400.0, degrees=DEGREES[model], exchange_gbps=200.0
    )
    profile.cross_node = read_profile(CONFIGS / "profiles" / "hunyuan-13b-720p-h100.json").cross_node
    options = PlanOptions(budget_s=budget_s, counted=True, bag_peers=most)
    found = []
    for number, items in enumerate(
        items_from_buckets(settings, shape, batches_of(settings, Geometry(), profile), steps, 0)
    ):
        plan = make_plan([items], profile, cluster, options, first_step=number)
        check(plan, [items], profile, cluster)
        bags = [tuple(sorted(cascade.workers)) for cascade in rolling_cut(plan)]
        found.append(PlannedBags(seconds=plan.steps[0].makespan_s, bags=bags))
    return found
