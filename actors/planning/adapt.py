"""What a run does when its pool no longer fits the planner's settings: the nearest that do. Pure.

A fixed topology, static degree or list of degrees is chosen for a number of workers; a pool that grows or shrinks
should not end the run because of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from actors.plan.costs.profile import Profile
from actors.plan.schedule.balance import parse_topology
from actors.plan.schedule.problem import PlanOptions, Problem
from actors.plan.types import Cluster, Item, PlanError
from ops.counted import counted


def adapted(
    options: PlanOptions, steps: Sequence[Sequence[Item]], profile: Profile, cluster: Cluster
) -> tuple[PlanOptions, tuple[str, ...]]:
    """(options that these workers can follow, one sentence for each that had to change). Where no degree would help,
    an option stays as it is, and planning says why there is no plan."""
    told = []
    if options.degrees:
        degrees = _degrees(options, steps, profile, cluster)
        if degrees != options.degrees:
            told.append(
                f"planner.degrees {list(options.degrees)} do not fit {_size(cluster)}: {list(degrees)} are used"
            )
            options = replace(options, degrees=degrees)
    if options.strategy == "static" and options.static_degree:
        degree = _static_degree(options, steps, profile, cluster)
        if degree != options.static_degree:
            told.append(
                f"planner.static_degree {options.static_degree} does not fit {_size(cluster)}: {degree} is used"
            )
            options = replace(options, static_degree=degree)
    if options.strategy in ("knapsack", "knapformer") and options.topology:
        topology = _topology(options.topology, cluster.num_workers)
        if topology != options.topology:
            used = topology or "one that the planner chooses"
            told.append(f"planner.topology {options.topology} does not fit {_size(cluster)}: {used} is used")
            options = replace(options, topology=topology)
    return options, tuple(told)


def _size(cluster: Cluster) -> str:
    return counted(cluster.num_workers, "worker")


def _nearest(legal: Iterable[int], wanted: Iterable[int]) -> int | None:
    """The legal degree with the smallest ratio to one of the wanted ones, the smaller of two."""
    wanted = tuple(wanted)
    return min(legal, key=lambda k: (min(abs(math.log(k / w)) for w in wanted), k), default=None)


def _degrees(
    options: PlanOptions, steps: Sequence[Sequence[Item]], profile: Profile, cluster: Cluster
) -> tuple[int, ...]:
    """The allowed degrees, and the nearest legal one for every item that none of them can run."""
    free = Problem(steps, profile, cluster, replace(options, degrees=()))
    degrees = options.degrees
    for key, item in free.items.items():
        if free.needs(key, "dit"):
            pieces = free.pattern(key, "dit", None)
            legal = set.intersection(*({k for k, _ in free.modes("dit", item, count)} for count in set(pieces)))
            if legal.isdisjoint(degrees) and (nearest := _nearest(legal, options.degrees)) is not None:
                degrees = tuple(sorted({*degrees, nearest}))
    return degrees


def _static_degree(options: PlanOptions, steps: Sequence[Sequence[Item]], profile: Profile, cluster: Cluster) -> int:
    """The static degree, or the nearest at which every item can run."""
    problem = Problem(steps, profile, cluster, options)
    legal: set[int] | None = None
    for key, item in problem.items.items():
        if problem.needs(key, "dit"):
            for count in set(problem.pattern(key, "dit", None)):
                own = {k for k, _ in problem.modes("dit", item, count)}
                legal = own if legal is None else legal & own
    return _nearest(legal or (), [options.static_degree]) or options.static_degree


def _topology(spec: str, num_workers: int) -> str:
    """The topology, or as many of its bags as these workers hold: larger ones first, the smallest size for what is
    left over. A topology that even then leaves workers over is left out, so that one is chosen."""
    try:
        parse_topology(spec, num_workers)
        return spec
    except PlanError:
        pass
    counts = {int(size): int(count) for size, count in (term.strip()[1:].split("n") for term in spec.split("+"))}
    replicas = max(1, num_workers // sum(size * count for size, count in counts.items()))
    left, bags = num_workers, dict.fromkeys(counts, 0)
    for size in sorted(counts, reverse=True):
        bags[size] = min(left // size, counts[size] * replicas)
        left -= size * bags[size]
    smallest = min(counts)
    bags[smallest] += left // smallest
    left %= smallest
    return "" if left else "+".join(f"g{size}n{count}" for size, count in sorted(bags.items()) if count)
