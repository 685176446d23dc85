"""CP-SAT: the proven optimum of a small step, the yardstick of the other strategies.

Optional intervals per degree and set of nodes, one cumulative per node. A bag over several nodes takes equal shares on
common rails, as in the search space of `cascade`; batches keep the given cut.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import combinations

from actors.plan.schedule.evaluator import to_cascades
from actors.plan.schedule.figures import end_with_credit
from actors.plan.schedule.listing import EPS, ListSchedule
from actors.plan.schedule.problem import PlannedJob, Problem, StepContext
from actors.plan.schedule.strategy import Strategy, one_by_one
from actors.plan.strategies.knapsack import knapsack_step
from actors.plan.strategies.search.improve import realise
from actors.plan.strategies.search.space import SearchResult, useful_modes
from actors.plan.strategies.search.step import plan_step
from actors.plan.strategies.search.step_jobs import StepsAhead
from actors.plan.types import Cascade, PlanError

log = logging.getLogger(__name__)
RESOLUTION = 40_000  # ticks of a step's serial length; durations are rounded up, the evaluator then uses the exact ones


class Exact:
    """Every step alone, or the plan of knapsack where packed bags, which are not in its space, end earlier."""

    name = "exact"

    def plan(self, problem: Problem, seed: int) -> list[Cascade]:
        return one_by_one(problem, lambda step: _plan_step(problem, step, seed))


def _plan_step(problem: Problem, step: int, seed: int) -> list[Cascade]:
    idle = StepContext.idle(problem.topology.num_workers)
    start = plan_step(problem, idle, step, StepsAhead(), seed, problem.options.budget_s).schedule
    if not start.jobs:
        return []
    best = improve_exactly(problem, start.jobs, start, seed)
    found = to_cascades(problem, start.jobs, best.placed)
    try:
        packed = knapsack_step(problem, step)
    except PlanError:  # knapsack has no legal plan here
        return found
    return packed if end_with_credit(problem, packed, step) < end_with_credit(problem, found, step) else found


def improve_exactly(problem: Problem, jobs: Sequence[PlannedJob], start: ListSchedule, seed: int) -> ListSchedule:
    """The proven optimum, or the best found in the larger of budget and `proof_s`; never worse than `start`."""
    nodes = [tuple(sorted({problem.topology.node[w] for w in start.where[i]})) for i in range(len(jobs))]
    degrees = [len(start.where[i]) for i in range(len(jobs))]
    hint = SearchResult(max(start.end), 0.0, [p.job for p in start.placed], degrees, nodes, list(start.begin), 0)
    budget_s = max(problem.options.proof_s, problem.options.budget_s)
    found, _ = solve(problem, jobs, hint, budget_s, seed)
    best = realise(problem, jobs, start.context, found, budget_s)
    return best if max(best.end) < max(start.end) - EPS else start


def solve(
    problem: Problem, jobs: Sequence[PlannedJob], hint: SearchResult | None, budget_s: float, seed: int
) -> tuple[SearchResult, bool]:
    """(best schedule, proven optimal). PlanError when the budget ends without any schedule and there is no hint."""
    from ortools.sat.python import cp_model

    if not problem.topology.uniform:
        raise PlanError("exact needs workers of equal speed. Use strategy cascade for a cluster with speed factors.")
    model = cp_model.CpModel()
    serial = sum(job.quickest for job in jobs)
    ticks = RESOLUTION / serial
    horizon = 3 * RESOLUTION + len(jobs)
    sizes = problem.cluster.nodes
    per_node: list[list[tuple[cp_model.IntervalVar, int]]] = [[] for _ in sizes]
    starts: list[cp_model.IntVar] = []
    ends: list[cp_model.IntVar] = []
    choices: list[list[tuple[cp_model.IntVar, int, tuple[int, ...]]]] = []
    for job in jobs:
        start, end = model.new_int_var(0, horizon, ""), model.new_int_var(0, horizon, "")
        options = []
        for degree, count, seconds in useful_modes(problem, job):
            for nodes in combinations(range(len(sizes)), count):
                if all(sizes[n] >= degree // count for n in nodes):
                    present = model.new_bool_var("")
                    interval = model.new_optional_interval_var(start, int(-(-seconds * ticks // 1)), end, present, "")
                    for node in nodes:
                        per_node[node].append((interval, degree // count))
                    options.append((present, degree, nodes))
        if not options:
            raise PlanError(f"item {job.item[1]!r}: no degree fits equal shares of the nodes {sizes}; use cascade.")
        model.add_exactly_one(present for present, _, _ in options)
        for pred in job.preds:
            model.add(start >= ends[pred])
        starts.append(start)
        ends.append(end)
        choices.append(options)
    for node, size in enumerate(sizes):
        model.add_cumulative([i for i, _ in per_node[node]], [k for _, k in per_node[node]], size)
    makespan = model.new_int_var(0, horizon, "")
    for index, job in enumerate(jobs):
        if job.module == "dit" or not any(j.module == "dit" for j in jobs):
            model.add(makespan >= ends[index])
    if hint is not None:
        model.add(makespan <= int(hint.makespan * ticks) + len(jobs) + 1)
        for index, options in enumerate(choices):
            for present, degree, nodes in options:
                model.add_hint(present, degree == hint.degree[index] and nodes == tuple(sorted(hint.nodes[index])))
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # with one worker and deterministic time the answer does not depend on the load
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = budget_s
    solver.parameters.max_time_in_seconds = problem.options.clock_end(budget_s)
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        if hint is None:
            raise PlanError(
                f"exact found no plan of {len(jobs)} cascades within its budget. Raise the budget or use cascade."
            )
        log.info("exact: no improvement on the starting plan within the budget")
        return hint, False
    order = sorted(range(len(jobs)), key=lambda i: (solver.value(starts[i]), i))
    picked = [next(option for option in options if solver.value(option[0])) for options in choices]
    last, begin = solver.value(makespan) / ticks, [solver.value(start) / ticks for start in starts]
    found = SearchResult(last, last, order, [p[1] for p in picked], [p[2] for p in picked], begin, 0)
    return found, status == cp_model.OPTIMAL


STRATEGY: type[Strategy] = Exact
