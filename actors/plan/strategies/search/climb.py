"""Search for what no other engine takes: jobs that only unequal shares over unequal nodes can hold; workers of unequal
speed where the compiled search is missing or too small. One schedule is changed in small ways, and a change that does
no harm is kept. Far slower than the others, but it sees every worker."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from actors.plan.schedule.constructive import Start, listed
from actors.plan.schedule.listing import ListSchedule
from actors.plan.schedule.problem import PlannedJob, Problem, StepContext
from actors.plan.strategies.search.space import chains

PLACE_S = 4e-5  # calibration: placing one job


def climb(
    problem: Problem,
    jobs: Sequence[PlannedJob],
    context: StepContext,
    starts: Sequence[Start],
    budget_s: float,
    seed: int,
    deadline: float,
) -> ListSchedule:
    """The best schedule of the budget's counted work; the wall clock ends it at `deadline`."""
    source = random.Random(seed)
    groups = chains(jobs)
    chain = {index: number for number, group in enumerate(groups) for index in group}

    def in_chains(order: Sequence[int], degrees: Sequence[int]) -> tuple[float, ListSchedule]:
        turn = [iter(group) for group in groups]
        schedule = listed(problem, jobs, [next(turn[chain[index]]) for index in order], degrees, context)
        return schedule.score, schedule

    own = [([i for i in order if not jobs[i].optional], degrees) for order, degrees in starts]
    best = min(((*in_chains(order, degrees), order, degrees) for order, degrees in own), key=lambda found: found[0])
    for _ in range(int(budget_s / (len(own[0][0]) * PLACE_S))):
        if time.perf_counter() > deadline:
            break
        order, degrees = _changed(source, jobs, best[2], best[3])
        reached, schedule = in_chains(order, degrees)
        if reached <= best[0]:
            best = (reached, schedule, order, degrees)
    return best[1]


def _changed(source: random.Random, jobs: Sequence[PlannedJob], order: Sequence[int], degrees: Sequence[int]) -> Start:
    """One or two changes: a job elsewhere in the order, or at another degree."""
    moved, other = list(order), list(degrees)
    for _ in range(source.randint(1, 2)):
        if source.random() < 0.5:
            moved.insert(source.randrange(len(moved)), moved.pop(source.randrange(len(moved))))
        else:
            index = source.choice(moved)
            other[index] = source.choice(jobs[index].modes)[0]
    return moved, other
