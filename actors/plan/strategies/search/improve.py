"""A step's jobs, searched from constructive starts: the best candidate of an engine, placed on workers.

Where handoffs or NVLink islands cost time, or workers are of unequal speed, the compiled engine decides on every
worker. Elsewhere an engine decides node and time of every job, not which worker of the node runs it: workers of a node
are equal but for PCIe and their NIC rails, which a bag over several nodes wants in common. First the placement rules
decide (earliest start, near workers or common rails, best fit). Where rails are then missing later, bags are drawn at
random at the found times, rail by rail, so that whole rails stay free: within a node any free workers will do, since
the found schedule never needs more than there are.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from actors.plan.schedule.constructive import Start
from actors.plan.schedule.listing import EPS, ListSchedule
from actors.plan.schedule.problem import PlannedJob, Problem, StepContext
from actors.plan.strategies.search import anneal, native
from actors.plan.strategies.search.climb import climb
from actors.plan.strategies.search.space import SearchResult, build, least_end

TURNS = 6  # ways to resolve equal workers by rule
# Where no rule keeps the found makespan, at most DRAWS random choices follow, within SHARE of the budget. PLACE_S is
# the calibration of that: seconds for placing one job.
DRAWS, SHARE, PLACE_S = 60, 0.1, 3e-5
SAME = 1e-6  # seconds


def improved(
    problem: Problem,
    jobs: Sequence[PlannedJob],
    context: StepContext,
    starts: Sequence[Start],
    budget_s: float,
    seed: int,
    until: float,
    population: int = 0,
) -> ListSchedule | None:
    """What the search makes of the jobs; None when the clock ended it before it found anything.

    The compiled engine where it can be used, else the vectorised one with `population` candidates. That one does not
    know who is in a bag: where this costs time, it has half of the budget, and a climb goes on from what it found; it
    has all of it where workers are of unequal speed.
    """
    space = build(problem, jobs, context)
    by_name = space is not None and space.bags is not None and native.fits(space)
    if space is None or not (problem.topology.uniform or by_name):
        return climb(problem, jobs, context, starts, budget_s, seed, until)
    candidates = [space.candidate(order, degrees) for order, degrees in starts]
    bound = least_end(problem, jobs, context)
    if native.fits(space):
        named = native.anneal(space, candidates, budget_s, seed, bound, until - time.perf_counter())
        return None if named is None else realise(problem, jobs, context, named, budget_s)
    if space.bags is None:
        found = anneal.anneal(space, candidates, budget_s, seed, bound, until, population)
        return realise(problem, jobs, context, found, budget_s)
    half = time.perf_counter() + (until - time.perf_counter()) / 2
    found = anneal.anneal(space, candidates, budget_s / 2, seed, bound, half, population)
    begun = [(found.order, found.degree), *starts]
    return min(
        realise(problem, jobs, context, found, budget_s),
        climb(problem, jobs, context, begun, budget_s / 2, seed, until),
        key=lambda schedule: schedule.score,
    )


def realise(
    problem: Problem, jobs: Sequence[PlannedJob], context: StepContext, found: SearchResult, budget_s: float
) -> ListSchedule:
    """The found schedule with workers: the first way that keeps its makespan, or the best of all that are tried."""
    best: tuple[float, ListSchedule] | None = None
    source = random.Random(0)
    in_time = sorted(found.order, key=lambda index: (found.start[index], bool(jobs[index].preds)))
    mapper = problem.options.mapper
    spans = mapper.nodes and mapper.rails and any(len(found.nodes[index]) > 1 for index in found.order)
    draws = min(DRAWS, int(SHARE * budget_s / (PLACE_S * len(in_time)))) if spans else 0
    for turn in range(-1 if found.bags else 0, TURNS + draws):
        schedule = ListSchedule(problem, jobs, context)
        if turn < 0:
            for index in found.order:
                schedule.fix(index, found.bags[index])
        elif turn < TURNS:
            for position, index in enumerate(found.order):
                flip = turn >> (position % 3) if turn else 0
                schedule.put(index, found.degree[index], found.nodes[index], flip)
        else:
            for index in in_time:
                schedule.fix(index, draw_bag(schedule, index, found, source))
        last = max((schedule.end[index] for index in found.order if not jobs[index].optional), default=0.0)
        if best is None or last < best[0] - EPS:
            best = (last, schedule)
        if last <= found.makespan + SAME:
            break
    assert best is not None
    return best[1]


def draw_bag(schedule: ListSchedule, index: int, found: SearchResult, source: random.Random) -> tuple[int, ...]:
    """Workers of the found nodes that are free at the found start, rail by rail in random order; over several nodes
    the same rails on each."""
    topology, nodes = schedule.topology, found.nodes[index]
    share = found.degree[index] // len(nodes)
    idle = []
    for node in nodes:
        by_time = sorted(topology.workers[node], key=lambda worker: (schedule.free[worker], worker))
        count = sum(schedule.free[worker] <= found.start[index] + SAME for worker in by_time)
        idle.append(by_time[: max(count, share)])
    rails = sorted({topology.rail[worker] for workers in idle for worker in workers})
    source.shuffle(rails)
    common = [r for r in rails if all(any(topology.rail[w] == r for w in workers) for workers in idle)]
    chosen: list[str] = []
    for rail in common:
        if all(sum(topology.rail[w] in chosen for w in workers) >= share for workers in idle):
            break
        chosen.append(rail)
    rank = {rail: number for number, rail in enumerate(chosen)}
    bag: list[int] = []
    for workers in idle:
        firsts = {topology.rail[w]: w for w in reversed(workers)}
        several = len(nodes) > 1  # then one worker of every chosen rail comes first: the overlap is of rails
        wished = sorted(
            workers,
            key=lambda w: (
                topology.rail[w] not in rank,
                several and firsts[topology.rail[w]] != w,
                rank.get(topology.rail[w], 0),
                w,
            ),
        )
        near = topology.near[topology.node[workers[0]]]
        bag += wished[:share] if several or near.alike else near.nearest(wished, share)
    return tuple(sorted(bag))
