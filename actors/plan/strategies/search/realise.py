"""From nodes to workers: who of a node runs a job whose node and time a search has chosen.

Workers of a node are equal but for their NIC rails, which a bag over several nodes wants in common. First the placement
rules decide (earliest start, common rails, best fit). Where rails are then missing later, bags are drawn at random at
the found times, rail by rail, so that whole rails stay free: within a node any free workers will do, since the found
schedule never needs more than there are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from actors.plan.schedule.listing import EPS, Lister
from actors.plan.schedule.problem import PlannedJob, Problem
from actors.plan.strategies.search.anneal import SearchResult

TURNS = 6  # ways to resolve equal workers by rule
DRAWS = 60  # random ones at most, where no rule keeps the found makespan, within
SHARE, PLACE_S = 0.1, 3e-5  # this share of the budget; calibration: placing one job
SAME = 1e-6  # seconds


def realise(
    problem: Problem,
    jobs: Sequence[PlannedJob],
    found: SearchResult,
    free: Sequence[float],
    barrier: float,
    release: Sequence[float],
    own: Sequence[bool],
    budget_s: float,
) -> Lister:
    """The found schedule with workers: the first way that keeps its makespan, or the best of all that are tried.

    `own` marks the jobs whose end counts.
    """
    best: tuple[float, Lister] | None = None
    source = random.Random(0)
    in_time = sorted(found.order, key=lambda index: (found.start[index], bool(jobs[index].preds)))
    spans = any(len(found.nodes[index]) > 1 for index in found.order)
    draws = min(DRAWS, int(SHARE * budget_s / (PLACE_S * len(in_time)))) if spans else 0
    for turn in range(TURNS + draws):
        lister = Lister(problem, jobs, free)
        lister.barrier, lister.release = barrier, list(release)
        last = 0.0
        for position, index in enumerate(found.order if turn < TURNS else in_time):
            if turn < TURNS:
                flip = turn >> (position % 3) if turn else 0
                end = lister.put(index, found.degree[index], found.nodes[index], flip)
            else:
                end = lister.fix(index, draw_bag(lister, index, found, source))
            if own[index]:
                last = max(last, end)
        if best is None or last < best[0] - EPS:
            best = (last, lister)
        if last <= found.makespan + SAME:
            break
    assert best is not None
    return best[1]


def draw_bag(lister: Lister, index: int, found: SearchResult, source: random.Random) -> tuple[int, ...]:
    """Workers of the found nodes that are free at the found start, rail by rail in random order; over several nodes
    the same rails on each."""
    topology, nodes = lister.topology, found.nodes[index]
    share = found.degree[index] // len(nodes)
    idle = []
    for node in nodes:
        by_time = sorted(topology.workers[node], key=lambda worker: (lister.free[worker], worker))
        count = sum(lister.free[worker] <= found.start[index] + SAME for worker in by_time)
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
        bag += sorted(
            workers,
            key=lambda w: (
                topology.rail[w] not in rank,
                several and firsts[topology.rail[w]] != w,
                rank.get(topology.rail[w], 0),
                w,
            ),
        )[:share]
    return tuple(sorted(bag))
