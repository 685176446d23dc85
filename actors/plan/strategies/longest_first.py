"""Baseline: degrees for a few target times, each step listed by longest remaining path; the best one is kept."""

from __future__ import annotations

from collections.abc import Sequence

from actors.plan.schedule.allot import allot, list_by_tail
from actors.plan.schedule.listing import Lister
from actors.plan.schedule.problem import PlannedJob, Problem


def longest_first(
    problem: Problem,
    jobs: Sequence[PlannedJob],
    free: Sequence[float] | None = None,
    barrier: float = 0.0,
    targets: int = 12,
) -> tuple[float, Lister]:
    """Best of a few target times between the bound and three times it."""
    area = sum(job.area for job in jobs) / sum(problem.topology.speed)
    path = max((job.quickest + max((jobs[p].quickest for p in job.preds), default=0.0) for job in jobs), default=0.0)
    low = max(area, path, 1e-9)
    best: tuple[float, Lister] | None = None
    for number in range(targets):
        degrees = allot(problem, jobs, low * (1 + 2 * (number / targets) ** 2))
        result = list_by_tail(problem, jobs, degrees, free, barrier)
        if best is None or result[0] < best[0] - 1e-9:
            best = result
    assert best is not None
    return best
