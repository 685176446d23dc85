"""`heddle bench communicators`: what the limit of a worker's open bags (`planner.bag_peers`) costs and saves.

Steps of Koala-like items are planned as a run plans them, one after the other, at the degrees that a run has by
default, and the controller's own account says which bags are open. Seconds are those of a run's own cost model on
H100s. Connections are counted in the plans that a run would execute. Plans have no price for them: workers connect in
the background while they compute. The last column is what is left of the comparison if none of that were hidden, and
all of a step's connections came one after the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from actors.config import PlannerConfig
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.schedule.problem import PlanOptions
from actors.plan.types import Cluster
from actors.planning.make_plan import rolling_cut
from actors.planning.memory import PEER_GIB
from actors.planning.options import profile_of
from actors.run.communicators import Communicators
from app.bench.planner import checked_plan
from app.bench.workload import CONFIGS, PROFILE
from app.inputs.items import batches_of, items_from_buckets
from app.settings.config import RunConfig
from ops.geometry import Geometry

# model, its config, clusters; of every 8 GPUs a step has 8 items
CASES = (("1.3B", "wan2.1-1.3b", ("1x8", "2x8", "4x8")), ("14B", "wan2.1-14b", ("4x8",)))


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
    connect: Annotated[float, typer.Option(help="Seconds of a connection, for the last column.", min=0.0)] = 1.0,
) -> None:
    """Two rows per model and cluster: without and with the limit. Equal degrees make equal plans, found once."""
    cases = [f"{model}:{spec}" for model, _, specs in CASES for spec in specs]
    chosen = only.split(",") if only else cases
    if unknown := set(chosen) - set(cases):
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))}; the cases are {', '.join(cases)}.", param_hint="--only"
        )
    print(
        "| model, cluster, limit | degrees | distinct bags | bags of a GPU, most | GiB, most | made per step "
        f"| mean step, s | against no limit | with {connect:g} s for each connection, none hidden |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for model, config, clusters in CASES:
        for spec in clusters:
            if f"{model}:{spec}" not in chosen:
                continue
            cluster = Cluster.parse(spec)
            free = planned_bags(config, cluster, steps, budget, 0)
            degrees = [k for k in profile_of_run(config).degrees["dit"] if k <= cluster.num_workers]
            larger = any(peers + 1 < degree for degree in degrees)
            bound = planned_bags(config, cluster, steps, budget, peers) if larger else free
            reference = figures(free, 0)
            for most, planned in ((0, free), (peers, bound)):
                found = figures(planned, most)
                connected = (found.seconds + connect * found.made) / (reference.seconds + connect * reference.made)
                print(
                    f"| {model}, {spec}, {most or 'none'} | {', '.join(map(str, degrees))} | {found.distinct} "
                    f"| {found.bags} | {found.gib:.1f} | {found.made:.2f} | {found.seconds:.2f} "
                    f"| {found.seconds / reference.seconds:.4f} | {connected:.4f} |",
                    flush=True,
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class BagFigures:
    """Some steps: different bags, the most bags and GiB of one GPU at a time, connections and seconds of a step."""

    distinct: int
    bags: int
    gib: float
    made: float
    seconds: float


def figures(planned: Sequence[PlannedBags], most: int) -> BagFigures:
    """Count with at most `most` peers of a worker's bags; 0: no limit."""
    account, bags, made = Communicators(most), 0, 0
    for step in planned:
        made += account.step(step.bags).made
        bags = max(bags, *(account.bags(worker) for bag in step.bags for worker in bag))
    return BagFigures(
        distinct=len({bag for step in planned for bag in step.bags if len(bag) > 1}),
        bags=bags,
        gib=PEER_GIB * account.most_seen,
        made=made / len(planned),
        seconds=statistics.fmean(step.seconds for step in planned),
    )


def profile_of_run(config: str) -> Profile:
    """What a run of this model on H100s plans with before it has measured anything, its degrees among it."""
    model = RunConfig.load(CONFIGS / "models" / f"{config}.yaml", ["run.name=bench"]).model
    profile = profile_of(PlannerConfig(), model, Geometry(), "H100")
    profile.cross_node = read_profile(PROFILE).cross_node
    return profile


def planned_bags(config: str, cluster: Cluster, steps: int, budget_s: float, most: int) -> list[PlannedBags]:
    """Plan `steps` steps of the buckets of Koala-36M, drawn equally often."""
    settings = RunConfig.load(CONFIGS / "data" / "koala36m.yaml", ["run.name=bench"])
    shape = RunConfig.load(CONFIGS / "models" / f"{config}.yaml", ["run.name=bench"]).model
    settings = replace(settings, data=replace(settings.data, items_per_step=cluster.num_workers))
    profile = profile_of_run(config)
    options = PlanOptions(budget_s=budget_s, counted=True, bag_peers=most)
    found = []
    for number, items in enumerate(
        items_from_buckets(settings, shape, batches_of(settings, Geometry(), profile), steps, 0)
    ):
        plan = checked_plan([items], profile, cluster, options, number)
        bags = [tuple(sorted(cascade.workers)) for cascade in rolling_cut(plan)]
        found.append(PlannedBags(seconds=plan.steps[0].makespan_s, bags=bags))
    return found
