"""Baseline: degrees for a few target times, each listed by longest remaining path; the best schedule is kept."""

from __future__ import annotations

from collections.abc import Sequence

from actors.plan.schedule.constructive import allot, list_by_tail
from actors.plan.schedule.evaluator import to_cascades
from actors.plan.schedule.listing import ListSchedule
from actors.plan.schedule.problem import PlannedJob, Problem
from actors.plan.schedule.strategy import Strategy, one_by_one
from actors.plan.types import Cascade

TARGETS = 12  # target times between the bound and three times it


class LongestFirst:
    """Every step alone, in milliseconds."""

    name = "longest_first"

    def plan(self, problem: Problem, seed: int) -> list[Cascade]:
        return one_by_one(problem, lambda step: _plan_step(problem, step))


def _plan_step(problem: Problem, step: int) -> list[Cascade]:
    jobs = problem.jobs(steps=[step])
    return to_cascades(problem, jobs, _best_of_targets(problem, jobs).placed) if jobs else []


def _best_of_targets(problem: Problem, jobs: Sequence[PlannedJob]) -> ListSchedule:
    area = sum(job.area for job in jobs) / sum(problem.topology.speed)
    path = max((job.quickest + max((jobs[p].quickest for p in job.preds), default=0.0) for job in jobs), default=0.0)
    low = max(area, path, 1e-9)
    best: tuple[float, ListSchedule] | None = None
    for number in range(TARGETS):
        degrees = allot(problem, jobs, low * (1 + 2 * (number / TARGETS) ** 2))
        schedule = list_by_tail(problem, jobs, degrees)
        last = max((schedule.end[i] for i, job in enumerate(jobs) if job.module == "dit"), default=0.0)
        if best is None or last < best[0] - 1e-9:
            best = (last, schedule)
    assert best is not None
    return best[1]


STRATEGY: type[Strategy] = LongestFirst
