"""A time that no plan of a single step can beat, proven by CP-SAT on the cluster as one pool of workers.

    python -m app.bench.planner_proof C-64gpu [SECONDS PER STEP]

The pool forgets nodes: bags of at most a node's size pay nothing for spanning nodes wherever they sit, larger ones what
it takes at best. Every legal plan of whole batches is a plan of the pool, whatever shares its bags take of the nodes.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from actors.plan.costs.profile_json import read_profile
from actors.plan.schedule.problem import PlanOptions, Problem
from actors.plan.types import Cluster, Item

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
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


def main(name: str, seconds: float) -> None:
    """Print the bound of every step of a published workload, and their mean."""
    profile = read_profile(CONFIGS / "profiles" / "hunyuan-13b-720p-h100.json")
    data = json.loads((CONFIGS / "bench" / f"{name}.json").read_text())
    bounds = []
    for number, entries in enumerate(data["steps"]):
        step = [Item(**entry) for entry in entries]
        problem = Problem([step], profile, Cluster.parse(data["cluster"]), PlanOptions(split=False))
        bound, reached = pool_bound(problem, seconds)
        bounds.append(bound)
        print(f"step {number}: no plan below {bound:.2f} s{', which the pool reaches' if reached else ''}", flush=True)
    print(f"mean {statistics.fmean(bounds):.2f} s")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 60.0)
