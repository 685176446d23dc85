"""A time that no plan of a single step can beat, proven by CP-SAT on the cluster as one pool of workers.

    python -m app.bench.planner_proof C-64gpu [SECONDS PER STEP]
    python -m app.bench.planner_proof C-64gpu [SECONDS PER STEP] --rolling

With `--rolling` of consecutive steps: encodes of all but the first may have run before, but no DiT cascade of a step
begins before the last one of the step before has ended, so each window has room for the DiT cascades of its step.
Batches are not cut, and items do not share a cascade.

The pool forgets nodes: bags of at most a node's size pay nothing for spanning nodes wherever they sit, larger ones what
it takes at best. Every legal plan of whole batches is a plan of the pool, whatever shares its bags take of the nodes.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace

from actors.plan.costs.profile_json import read_profile
from actors.plan.schedule.problem import PlanOptions, Problem
from app.bench.workload import PROFILE, published_set

TICK_S = 0.01  # durations are rounded down to it, so the bound holds


def pool_bound(problem: Problem, seconds: float) -> tuple[float, bool]:
    """(proven lower bound of the step's makespan in seconds, whether a schedule of the pool reaches it)."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    jobs = problem.jobs()
    workers = problem.topology.num_workers
    horizon = int(sum(max(s for _, s in job.modes) for job in jobs) / TICK_S)
    intervals: list[cp_model.IntervalVar] = []
    demands: list[int] = []
    energy: list[cp_model.LinearExprT] = []
    ends: list[cp_model.IntVar] = []
    makespan = model.new_int_var(0, horizon, "")
    for job in jobs:
        start, end = model.new_int_var(0, horizon, ""), model.new_int_var(0, horizon, "")
        chosen = []
        for degree, length in job.at_best(problem.topology):
            ticks = int(length / TICK_S)
            chosen.append(model.new_bool_var(""))
            intervals.append(model.new_optional_interval_var(start, ticks, end, chosen[-1], ""))
            demands.append(degree)
            energy.append(degree * ticks * chosen[-1])
        model.add_exactly_one(chosen)
        for pred in job.preds:
            model.add(start >= ends[pred])
        ends.append(end)
        model.add(makespan >= end)
    model.add_cumulative(intervals, demands, workers)
    model.add(makespan * workers >= sum(energy))
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.use_overload_checker_in_cumulative = True
    solver.parameters.use_timetable_edge_finding_in_cumulative = True
    status = solver.solve(model)
    return solver.best_objective_bound * TICK_S, status == cp_model.OPTIMAL


def rolling_proof(areas: Sequence[float], dits: Sequence[float]) -> float:
    """Mean seconds per step that no consecutive plans of these steps beat. `areas`: what all cascades of a step take of
    the whole cluster at least; `dits`: seconds that its window has at least. All work of the first steps is done when
    the last of them ends, and those after it need their windows."""
    ends = [sum(areas[:count]) + sum(dits[count:]) for count in range(len(areas) + 1)]
    return max(ends) / len(areas)


def main(name: str, seconds: float, rolling: bool) -> None:
    """Print the bound of every step of a published workload, and their mean; of consecutive steps what follows for
    them."""
    profile, options = read_profile(PROFILE), PlanOptions(split=False)
    steps, cluster = published_set(name)
    bounds, areas = [], []
    for number, step in enumerate(steps):
        whole = Problem([step], profile, cluster, options)
        areas.append(sum(job.area for job in whole.jobs()) / cluster.num_workers)
        encoded = [replace(item, cached=("vae",)) for item in step]
        problem = Problem([encoded], profile, cluster, options) if rolling and number else whole
        bound, reached = pool_bound(problem, seconds)
        bounds.append(bound)
        print(f"step {number}: no plan below {bound:.2f} s{', which the pool reaches' if reached else ''}", flush=True)
    mean = rolling_proof(areas, bounds) if rolling else statistics.fmean(bounds)
    print(f"mean {mean:.2f} s")


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if word != "--rolling"]
    main(given[0], float(given[1]) if len(given) > 1 else 60.0, "--rolling" in sys.argv)
