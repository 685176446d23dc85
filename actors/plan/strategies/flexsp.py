"""Baseline FlexSP: every item gets its own degree for the whole step, all groups start together, one wave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from actors.plan.schedule.evaluator import to_cascades
from actors.plan.schedule.listing import ListSchedule
from actors.plan.schedule.problem import ItemKey, PlannedJob, Problem
from actors.plan.schedule.strategy import Strategy, one_by_one
from actors.plan.types import Cascade

Times = Mapping[ItemKey, Mapping[int, float]]  # seconds of an item by size of its group


class FlexSp:
    """The optimum of the form: the smallest target time whose cheapest degrees fit the cluster."""

    name = "flexsp"

    def plan(self, problem: Problem, seed: int) -> list[Cascade]:
        return one_by_one(problem, lambda step: groups_step(problem, step, _optimum))


def groups_step(
    problem: Problem, step: int, choose: Callable[[Problem, Times], Mapping[ItemKey, int]]
) -> list[Cascade]:
    """Items on fixed groups of the chosen degrees. More of them than fit in one wave go to the groups that are free
    first."""
    jobs = problem.jobs(steps=[step])
    times = {key: _times(problem, jobs, key) for key in dict.fromkeys(job.item for job in jobs)}
    chosen = choose(problem, times)
    schedule = ListSchedule(problem, jobs)
    # Largest first: groups of one size pack nodes without holes when the larger ones are placed before the smaller.
    for key in sorted(times, key=lambda key: (-chosen[key], -times[key][chosen[key]], key)):
        for index, job in enumerate(jobs):
            if job.item == key:
                schedule.place(index, _degree_of(job, chosen[key]))
    return to_cascades(problem, jobs, schedule.placed)


def _times(problem: Problem, jobs: Sequence[PlannedJob], key: ItemKey) -> dict[int, float]:
    """Seconds of an item by group size: its modules one after the other, an encoder at its best degree within it."""
    own = [job for job in jobs if job.item == key]
    legal = [{k for k, _ in job.modes} for job in own if job.module == "dit"]
    # pieces of a batch may have no degree in common: then each takes the nearest of its own
    sizes = sorted(set.intersection(*legal) or set.union(*legal)) if legal else [1]
    seconds = [dict(job.at_best(problem.topology)) for job in own]
    return {size: sum(of[_degree_of(job, size)] for job, of in zip(own, seconds, strict=True)) for size in sizes}


def _degree_of(job: PlannedJob, size: int) -> int:
    """The job's degree within a group: the size itself, or the next legal one, for dit; the quickest degree that fits
    for encoders."""
    if job.module == "dit":
        own = [k for k, _ in job.modes]
        return max((k for k in own if k <= size), default=min(own))
    fitting = [(s, k) for k, s in job.modes if k <= size]
    return min(fitting)[1] if fitting else min(k for k, _ in job.modes)


def _optimum(problem: Problem, times: Times) -> dict[ItemKey, int]:
    """Smallest feasible target time by trying every candidate time in ascending order."""
    workers = problem.topology.num_workers
    smallest = {key: min(sizes) for key, sizes in times.items()}
    if sum(smallest.values()) > workers:  # several waves: keep groups at their cheapest size
        return {key: min((k * s, k) for k, s in sizes.items())[1] for key, sizes in times.items()}
    for target in sorted({s for sizes in times.values() for s in sizes.values()}):
        chosen = {key: min((k for k, s in sizes.items() if s <= target), default=0) for key, sizes in times.items()}
        if all(chosen.values()) and sum(chosen.values()) <= workers and _packs(problem, list(chosen.values())):
            return chosen
    return smallest


def _packs(problem: Problem, sizes: Sequence[int]) -> bool:
    """Whether groups fit into nodes side by side (first fit by decreasing size; larger ones take whole nodes)."""
    room = sorted(problem.cluster.nodes, reverse=True)
    for size in sorted(sizes, reverse=True):
        left = size
        for node in range(len(room)):
            if room[node] >= left:
                room[node] -= left
                left = 0
                break
            if size > max(problem.cluster.nodes) and room[node]:
                left -= room[node]
                room[node] = 0
        if left:
            return False
    return True


STRATEGY: type[Strategy] = FlexSp
