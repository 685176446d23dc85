"""Constructive schedules: degrees for a target time, then jobs by their longest remaining path; the best of a few.

What a search starts from, and what a step is given without one.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.plan.costs.topology import Topology
from actors.plan.schedule.listing import EarlyInputs, ListSchedule
from actors.plan.schedule.problem import PlannedJob, Problem, StepContext

# Target times, as multiples of the longest path and of the jobs' area over all workers.
TARGETS_OF_PATH = (1.0, 1.2)
TARGETS_OF_AREA = (0.5, 0.7, 1.0, 1.25, 1.6, 2.2)
ENCODE_SHARES = (0.12, 0.2, 0.3)  # of the area: seconds that an encode may take while nodes encode side by side

Start = tuple[list[int], list[int]]  # order of jobs, degree of every job


@dataclass(frozen=True, slots=True)
class ConstructiveStarts:
    """The best constructive schedule with its score, and all orders and degrees that were tried."""

    score: float
    schedule: ListSchedule
    tried: list[Start]


def constructive(
    problem: Problem, jobs: Sequence[PlannedJob], context: StepContext, fill_until: float, until: float = math.inf
) -> ConstructiveStarts:
    """Allotments for a few target times, own jobs only first; encodes of later steps then fill the best one's gaps. Of
    the targets as many are listed as `until` allows, one at least: where handoffs take time, also with the encodes of
    an item together."""
    own = [i for i, job in enumerate(jobs) if not job.optional]
    ahead = [i for i, job in enumerate(jobs) if job.optional]
    tried = [*_by_targets(problem, jobs, own), *side_by_side(problem, jobs, own)]
    best: tuple[float, ListSchedule] | None = None
    handoffs = EarlyInputs(problem, context).cost
    for together, (order, degrees) in itertools.product((False, True) if handoffs else (False,), tried):
        if best is not None and time.perf_counter() > until:
            break
        schedule = listed(problem, jobs, order, degrees, context, together=together)
        reached = schedule.score
        if best is None or reached < best[0] - 1e-9:
            best = (reached, schedule)
    assert best is not None
    reached, schedule = best
    if ahead:
        schedule.fill(fill_until)
        degrees = [len(schedule.where[i]) if i in schedule.where else job.modes[0][0] for i, job in enumerate(jobs)]
        tried.insert(0, ([placed.job for placed in schedule.placed], degrees))
        reached = schedule.score
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


def allot(problem: Problem, jobs: Sequence[PlannedJob], target: float) -> list[int]:
    """Degree of every job: the fewest GPU-seconds with which encode + dit of its item stay within `target`.

    Where nothing does, the quickest degree. Bags that no node can hold are charged what spanning nodes costs at best.
    """
    topology = problem.topology
    degrees = [0] * len(jobs)
    for index, job in enumerate(jobs):
        if job.module == "dit":
            quickest_encode = max((jobs[p].quickest for p in job.preds), default=0.0)
            degrees[index] = _cheapest_within(job, target - quickest_encode, topology)
    for index, job in enumerate(jobs):
        if job.module == "dit":
            left = target - job.seconds(degrees[index])
            for pred in job.preds:
                degrees[pred] = _cheapest_within(jobs[pred], left, topology)
    for index, job in enumerate(jobs):
        if not degrees[index]:
            degrees[index] = _cheapest_within(job, target, topology)
    return degrees


def _cheapest_within(job: PlannedJob, limit: float, topology: Topology) -> int:
    modes = job.at_best(topology)
    best = min(((k * s, s, k) for k, s in modes if s <= limit), default=None)
    return min((s, k) for k, s in modes)[1] if best is None else best[2]


def list_by_tail(
    problem: Problem, jobs: Sequence[PlannedJob], degrees: Sequence[int], context: StepContext | None = None
) -> ListSchedule:
    """Schedule the jobs by decreasing tail."""
    return listed(problem, jobs, sorted(range(len(jobs)), key=_by_tail(jobs, degrees)), degrees, context)


def listed(
    problem: Problem,
    jobs: Sequence[PlannedJob],
    order: Sequence[int],
    degrees: Sequence[int],
    context: StepContext | None = None,
    *,
    together: bool = False,
) -> ListSchedule:
    """Every job of the order, one after the other, where it ends first; `together` as `ListSchedule` says."""
    schedule = ListSchedule(problem, jobs, context, together=together)
    for index in order:
        schedule.place(index, degrees[index])
    return schedule


def _by_tail(jobs: Sequence[PlannedJob], degrees: Sequence[int]) -> Callable[[int], tuple[float, int]]:
    tail = tails(jobs, degrees)
    return lambda index: (-tail[index], index)


def tails(jobs: Sequence[PlannedJob], degrees: Sequence[int]) -> list[float]:
    """Seconds from the start of each job to the end of its item's dit."""
    tail = [job.seconds(k) for job, k in zip(jobs, degrees)]
    for index, job in enumerate(jobs):
        for pred in job.preds:
            tail[pred] = max(tail[pred], jobs[pred].seconds(degrees[pred]) + tail[index])
    return tail


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
