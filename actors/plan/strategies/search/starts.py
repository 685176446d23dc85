"""Constructive plans of a step: what a search starts from, and what a step is given without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.plan.schedule.allot import allot, list_by_tail, tails
from actors.plan.schedule.listing import ListSchedule
from actors.plan.schedule.problem import PlannedJob, Problem, StepContext
from actors.plan.strategies.search.clock import deadline
from actors.plan.strategies.search.score import fill_gaps, score

TARGETS_OF_PATH = (1.0, 1.2)  # target times, as multiples of the longest path
TARGETS_OF_AREA = (0.5, 0.7, 1.0, 1.25, 1.6, 2.2)  # and of the jobs' area over all workers
ENCODE_SHARES = (0.12, 0.2, 0.3)  # of the area: seconds that an encode may take while nodes encode side by side
FILL_S = 0.05  # budget for filling the gaps of the best schedule

Start = tuple[list[int], list[int]]  # order of jobs, degree of every job


@dataclass(frozen=True, slots=True)
class ConstructiveStarts:
    """The best constructive schedule with its score, and all orders and degrees that were tried."""

    score: float
    schedule: ListSchedule
    tried: list[Start]


def rough_schedule(problem: Problem, jobs: Sequence[PlannedJob], context: StepContext) -> ListSchedule:
    """Some legal plan, in a millisecond: a run plans the step again before it is executed."""
    degrees = allot(problem, jobs, sum(job.area for job in jobs) / sum(problem.topology.speed))
    return list_by_tail(problem, jobs, degrees, context)


def constructive(problem: Problem, jobs: Sequence[PlannedJob], context: StepContext) -> ConstructiveStarts:
    """Allotments for a few target times, own jobs only first; encodes of later steps then fill the best one's gaps."""
    own = [i for i, job in enumerate(jobs) if not job.optional]
    ahead = [i for i, job in enumerate(jobs) if job.optional]
    tried = [*_by_targets(problem, jobs, own), *side_by_side(problem, jobs, own)]
    best: tuple[float, ListSchedule] | None = None
    for order, degrees in tried:
        schedule = ListSchedule(problem, jobs, context)
        for index in order:
            schedule.place(index, degrees[index])
        reached = score(schedule)
        if best is None or reached < best[0] - 1e-9:
            best = (reached, schedule)
    assert best is not None
    reached, schedule = best
    if ahead:
        fill_gaps(schedule, deadline(time.perf_counter(), FILL_S))
        degrees = [len(schedule.where[i]) if i in schedule.where else job.modes[0][0] for i, job in enumerate(jobs)]
        tried.insert(0, ([placed.job for placed in schedule.placed], degrees))
        reached = score(schedule)
    return ConstructiveStarts(
        reached, schedule, [(order + [i for i in ahead if i not in order], degrees) for order, degrees in tried]
    )


def _by_targets(problem: Problem, jobs: Sequence[PlannedJob], own: Sequence[int]) -> list[Start]:
    area = max(sum(jobs[i].area for i in own) / sum(problem.topology.speed), 1e-9)
    path = max(
        (jobs[i].quickest + max((jobs[p].quickest for p in jobs[i].preds), default=0.0) for i in own), default=0.0
    )
    found = []
    for target in sorted({*(share * path for share in TARGETS_OF_PATH), *(share * area for share in TARGETS_OF_AREA)}):
        degrees = allot(problem, jobs, target)
        found.append((sorted(own, key=_by_tail(jobs, degrees)), degrees))
    return found


def side_by_side(problem: Problem, jobs: Sequence[PlannedJob], own: Sequence[int] | None = None) -> list[Start]:
    """Nodes encode all items side by side, then run their dits, longest or shortest first."""
    own = range(len(jobs)) if own is None else own
    area = max(sum(jobs[i].area for i in own) / sum(problem.topology.speed), 1e-9)
    found = []
    for share in ENCODE_SHARES:
        whole = _whole_nodes(problem, jobs, share * area)
        length = [job.seconds(k) for job, k in zip(jobs, whole)]
        for sign in (-1, 1):
            order = sorted(own, key=lambda i: (jobs[i].module == "dit", sign * length[i], i))
            found.append((order, whole))
    return found


def _by_tail(jobs: Sequence[PlannedJob], degrees: Sequence[int]) -> Callable[[int], tuple[float, int]]:
    tail = tails(jobs, degrees)
    return lambda index: (-tail[index], index)


def _whole_nodes(problem: Problem, jobs: Sequence[PlannedJob], limit: float) -> list[int]:
    """Encoders at their cheapest degree within `limit` seconds, dits at the largest degree inside a node: nodes encode
    side by side, then run their dits one after the other."""
    largest = max(problem.cluster.nodes)
    degrees = []
    for job in jobs:
        if job.module == "dit":
            degrees.append(max((k for k, _ in job.modes if k <= largest), default=job.modes[0][0]))
        else:
            degrees.append(min((k * s if s <= limit else 1e9 + s, k) for k, s in job.modes)[1])
    return degrees
