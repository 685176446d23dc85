"""The one evaluator: start and end of every cascade from order, degrees, workers and predecessors.

Every strategy, `heddle plan` and the runtime's predicted timeline use these rules:
a worker does one thing at a time, in list order; a dit cascade starts after the encodes of its samples (plus the
handoff, if its bag holds none of their workers) and after the last dit cascade of the step before (the update barrier);
encode cascades of any step start as soon as their workers are free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.topology import Topology
from actors.plan.schedule.problem import ItemKey, Placement, PlannedJob, Problem
from actors.plan.types import Cascade, Item, Module, Part


def to_cascades(problem: Problem, jobs: Sequence[PlannedJob], placed: Sequence[Placement]) -> list[Cascade]:
    """Timed cascades of a decision, in its order."""
    serial: dict[tuple[ItemKey, Module, int], int] = {}
    numbers: dict[tuple[ItemKey, Module], int] = {}
    for job in jobs:
        serial[job.item, job.module, job.first] = numbers.setdefault((job.item, job.module), 0)
        numbers[job.item, job.module] += 1
    order = []
    for decision in placed:
        job = jobs[decision.job]
        order.append(
            Cascade(
                id=f"{job.item[1]}/{job.module}/{serial[job.item, job.module, job.first]}",
                module=job.module,
                step=job.step,
                degree=len(decision.workers),
                parts=(Part(item=job.item[1], first=job.first, count=job.count),),
                workers=decision.workers,
                start_s=0.0,
                end_s=0.0,
            )
        )
    return simulate(problem, order)


def simulate(problem: Problem, order: Iterable[Cascade]) -> list[Cascade]:
    """Time cascades in list order; their own start_s and end_s are ignored. Starts are as early as the rules allow."""
    items, profile, topology = problem.items, problem.profile, problem.topology
    free = list(problem.busy_s)
    encoded: dict[tuple[ItemKey, int], list[tuple[float, tuple[int, ...]]]] = {}
    for (key, _), results in problem.finished.items():
        for result in results:
            for sample in result.samples(items[key]):
                encoded.setdefault((key, sample), []).append((result.end_s, result.workers))
    step_end: dict[int, float] = {}
    timed = []
    for cascade in order:
        start = max(free[worker] for worker in cascade.workers)
        if cascade.module == "dit":
            start = max([start] + [end for step, end in step_end.items() if step < cascade.step])
            bag = set(cascade.workers)
            for part in cascade.parts:
                key = (cascade.step, part.item)
                for sample in range(part.first, part.first + part.count):
                    for end, workers in encoded.get((key, sample), ()):
                        start = max(start, end + profile.wait_for_inputs(items[key], part.count, bag, workers))
        end = start + cascade_seconds(cascade, items, profile, topology)
        for worker in cascade.workers:
            free[worker] = end
        if cascade.module == "dit":
            step_end[cascade.step] = max(step_end.get(cascade.step, 0.0), end)
        else:
            for part in cascade.parts:
                for sample in range(part.first, part.first + part.count):
                    encoded.setdefault(((cascade.step, part.item), sample), []).append((end, cascade.workers))
        timed.append(replace(cascade, start_s=start, end_s=end))
    return timed


def cascade_seconds(cascade: Cascade, items: Mapping[ItemKey, Item], profile: Profile, topology: Topology) -> float:
    """Predicted duration on its workers. Equal-shaped parts are priced as one batch, unequal ones as a pack."""
    parts = Samples.by_shape(Samples.of_item(items[cascade.step, part.item], part.count) for part in cascade.parts)
    return profile.on(topology, cascade.module, parts, cascade.workers)
