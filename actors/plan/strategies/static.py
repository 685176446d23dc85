"""Baseline: fixed data parallel groups of one sequence-parallel degree, as Megatron and DeepSpeed users run today."""

from __future__ import annotations

from collections.abc import Sequence

from actors.plan.schedule.evaluator import to_cascades
from actors.plan.schedule.problem import Placement, PlannedJob, Problem
from actors.plan.schedule.strategy import Strategy, concatenated
from actors.plan.types import Cascade, PlanError


class Static:
    """One degree for all steps: the options' one, or with 0 the one with the shortest total time."""

    name = "static"

    def plan(self, problem: Problem, seed: int) -> list[Cascade]:
        wanted = problem.options.static_degree
        if not problem.items:  # nothing has a degree
            return []
        best: tuple[float, list[list[Cascade]]] | None = None
        for degree in [wanted] if wanted else _legal(problem):
            plans = [plan for step in problem.numbers if (plan := static_step(problem, step, degree)) is not None]
            if len(plans) < len(problem.numbers):
                continue
            total = sum(max((c.end_s for c in plan), default=0.0) for plan in plans)
            if best is None or total < best[0]:
                best = (total, plans)
        if best is None:
            raise PlanError(
                f"static: no single degree can run every item{f' (asked: {wanted})' if wanted else ''}. "
                f"Use strategy cascade, which gives each item its own degree."
            )
        return concatenated(best[1])


def _legal(problem: Problem) -> list[int]:
    """Degrees at which some whole batch can run its dit."""
    return sorted(
        {
            k
            for key in problem.items
            if problem.needs(key, "dit")
            for k, _ in problem.modes("dit", problem.items[key], problem.items[key].batch)
        }
    )


def static_step(problem: Problem, step: int, degree: int) -> list[Cascade] | None:
    """Items dealt round-robin to groups of `degree` workers, every module at that degree. None if some item cannot.

    An encoder that cannot run at the degree runs at its largest smaller one, on the first workers of the group.
    """
    groups = _groups(problem, degree)
    if not groups:
        return None
    jobs = problem.jobs(steps=[step])
    items = [key for key in problem.items if key[0] == step]
    placed: list[Placement] = []
    for number, key in enumerate(items):
        group = groups[number % len(groups)]
        for index, job in enumerate(jobs):
            if job.item == key:
                size = _degree_for(job, degree)
                if size is None:
                    return None
                placed.append(Placement(index, group[:size]))
    return to_cascades(problem, jobs, placed)


def _degree_for(job: PlannedJob, degree: int) -> int | None:
    legal = [k for k, _ in job.modes]
    if degree in legal:
        return degree
    if job.module == "dit":
        return None
    return max((k for k in legal if k < degree), default=None)


def _groups(problem: Problem, degree: int) -> list[tuple[int, ...]]:
    """Consecutive workers, within nodes where they fit; what does not fill a group stays idle."""
    nodes: Sequence[Sequence[int]] = problem.topology.workers
    if degree > max(len(workers) for workers in nodes):
        nodes = [list(range(problem.topology.num_workers))]
    return [tuple(workers[i : i + degree]) for workers in nodes for i in range(0, len(workers) - degree + 1, degree)]


STRATEGY: type[Strategy] = Static
