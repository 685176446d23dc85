"""Constructive schedules: degrees for a target time, then jobs by their longest remaining path."""

from __future__ import annotations

from collections.abc import Sequence

from actors.plan.schedule.listing import ListSchedule
from actors.plan.schedule.problem import PlannedJob, Problem, StepContext


def allot(problem: Problem, jobs: Sequence[PlannedJob], target: float) -> list[int]:
    """Degree of every job: the fewest GPU-seconds with which encode + dit of its item stay within `target`.

    Where nothing does, the quickest degree. Bags over several nodes are charged their best cross-node factor.
    """
    largest = max(problem.cluster.nodes)
    span = problem.topology.best_span
    degrees = [0] * len(jobs)
    for index, job in enumerate(jobs):
        if job.module == "dit":
            quickest_encode = max((jobs[p].quickest for p in job.preds), default=0.0)
            degrees[index] = _cheapest_within(job, target - quickest_encode, largest, span)
    for index, job in enumerate(jobs):
        if job.module == "dit":
            left = target - job.seconds(degrees[index])
            for pred in job.preds:
                degrees[pred] = _cheapest_within(jobs[pred], left, largest, span)
    for index, job in enumerate(jobs):
        if not degrees[index]:
            degrees[index] = _cheapest_within(job, target, largest, span)
    return degrees


def _cheapest_within(job: PlannedJob, limit: float, largest: int, span: float) -> int:
    best = min(((k * s, s, k) for k, s in _effective(job, largest, span) if s <= limit), default=None)
    if best is None:
        return min((s, k) for k, s in _effective(job, largest, span))[1]
    return best[2]


def _effective(job: PlannedJob, largest: int, span: float) -> list[tuple[int, float]]:
    return [(k, s * span if k > largest else s) for k, s in job.modes]


def tails(jobs: Sequence[PlannedJob], degrees: Sequence[int]) -> list[float]:
    """Seconds from the start of each job to the end of its item's dit."""
    tail = [job.seconds(k) for job, k in zip(jobs, degrees)]
    for index, job in enumerate(jobs):
        for pred in job.preds:
            tail[pred] = max(tail[pred], jobs[pred].seconds(degrees[pred]) + tail[index])
    return tail


def list_by_tail(
    problem: Problem, jobs: Sequence[PlannedJob], degrees: Sequence[int], context: StepContext | None = None
) -> ListSchedule:
    """Schedule the jobs by decreasing tail."""
    tail = tails(jobs, degrees)
    schedule = ListSchedule(problem, jobs, context)
    for index in sorted(range(len(jobs)), key=lambda i: (-tail[i], i)):
        schedule.place(index, degrees[index])
    return schedule
