"""Large clusters: strips of nodes are balanced, cells of a few nodes start from them and are searched, slowest first.

With many items per node a good cell plan is close to its area bound, so the balance between cells decides; swaps of
items between the slowest and the quickest cell finish the work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from actors.plan.schedule.constructive import constructive, side_by_side
from actors.plan.schedule.listing import ListSchedule
from actors.plan.schedule.problem import Placement, PlannedJob, Problem, StepContext
from actors.plan.strategies.search.improve import improved
from actors.plan.strategies.search.space import chains
from actors.plan.strategies.search.strips import Strip, balanced_strips

CELL_WORKERS = 16  # small enough for a strong search, large enough for bags over two nodes
BALANCE_S = 0.1  # seconds for balancing strips, also where the budget is smaller
POPULATION = 64  # candidates of the vectorised search of one cell
TRY_S = 0.008  # seconds of search for one cell in the first round; later rounds have more
SHARE = 0.8  # of the budget goes to searching; the rest to making one plan of all cells


@dataclass(slots=True)
class Cell:
    """Some nodes with the chains they run."""

    problem: Problem
    first_worker: int
    chains: list[int]
    makespan: float = 0.0
    placed: list[Placement] | None = None  # job indices of the whole problem, workers of the cell
    searched: bool = False


def plan_cells(
    problem: Problem, jobs: Sequence[PlannedJob], context: StepContext, seed: int, budget_s: float
) -> ListSchedule | None:
    """A schedule of all jobs from idle workers; None where the cluster is not large against the jobs' degrees or has
    too few chains for every cell."""
    groups = chains(jobs)
    if not _worth_cells(problem, jobs, len(groups)):
        return None
    deadline = time.perf_counter() + SHARE * budget_s
    areas = np.array([sum(jobs[i].area for i in group) for group in groups])
    cells = _cells(problem)
    speed = problem.topology.speed
    paces = [min(speed[worker] for worker in workers) for workers in problem.topology.workers]
    strips = balanced_strips(
        jobs,
        groups,
        paces,
        problem.cluster.nodes[0],
        problem.options.clock_end(time.perf_counter() + max(0.25 * budget_s, BALANCE_S)),
    )
    for cell, own in zip(cells, _dealt(strips, paces, [len(cell.problem.cluster.nodes) for cell in cells])):
        cell.chains = [chain for strip in own for chain in strip.chains]
        _lay(cell, jobs, own)
    try_s = TRY_S
    while time.perf_counter() < deadline:
        _even_out(cells, jobs, groups, areas, seed, try_s, deadline)
        try_s = min(3 * try_s, max(TRY_S, 0.1 * budget_s))
        for cell in cells:
            cell.searched = False
    schedule = ListSchedule(problem, jobs, context)
    for cell in cells:
        for decision in cell.placed or []:
            schedule.fix(decision.job, tuple(w + cell.first_worker for w in decision.workers))
    return schedule


def _worth_cells(problem: Problem, jobs: Sequence[PlannedJob], num_chains: int) -> bool:
    nodes = problem.cluster.nodes
    workers = problem.topology.num_workers
    return (
        len(nodes) > 1
        and len(set(nodes)) == 1
        and workers >= 2 * CELL_WORKERS
        and num_chains * CELL_WORKERS >= 4 * workers
        and max(min(k for k, _ in job.modes) for job in jobs) <= max(nodes)
    )


def _cells(problem: Problem) -> list[Cell]:
    size = problem.cluster.nodes[0]
    per_cell = max(1, CELL_WORKERS // size)
    cells, node = [], 0
    while node < len(problem.cluster.nodes):
        cells.append(Cell(problem.on(problem.cluster.part(node, per_cell), node * size), node * size, []))
        node += per_cell
    return cells


def _dealt(strips: Sequence[Strip], paces: Sequence[float], counts: Sequence[int]) -> list[list[Strip]]:
    """Strips to cells: the slowest beside the quickest, so that a cell's search has something to even out. Where nodes
    differ each stays on that which it was made for."""
    if len(set(paces)) > 1:
        own = iter(strips)
        return [[next(own) for _ in range(count)] for count in counts]
    left = sorted(strips, key=lambda strip: (strip.seconds, strip.chains))
    return [[left.pop(-1 if number % 2 == 0 else 0) for number in range(count)] for count in counts]


def _lay(cell: Cell, jobs: Sequence[PlannedJob], strips: Sequence[Strip]) -> None:
    """Give a cell the plan of its strips, one on each node."""
    schedule = ListSchedule(cell.problem, jobs)
    for node, strip in enumerate(strips):
        for job, degree in strip.order:
            schedule.put(job, degree, (node,))
    cell.placed, cell.makespan = schedule.placed, max(schedule.end, default=0.0)


def _even_out(
    cells: list[Cell],
    jobs: Sequence[PlannedJob],
    groups: Sequence[Sequence[int]],
    areas: np.ndarray,
    seed: int,
    try_s: float,
    deadline: float,
) -> None:
    """Relieve the slowest cell, by search and by swaps, until nothing helps it or the time is over."""
    failures = 0
    while failures < 24 and time.perf_counter() < deadline:
        worst = max(range(len(cells)), key=lambda c: cells[c].makespan)
        if try_s and not cells[worst].searched:
            _plan(cells[worst], jobs, groups, seed, try_s)
            continue
        ranked = sorted((c for c in range(len(cells)) if c != worst), key=lambda c: cells[c].makespan)
        partner = cells[ranked[failures % max(1, min(8, len(ranked)))]]
        swapped = _swap(cells[worst], partner, jobs, groups, areas, seed, failures // 8, try_s)
        failures = 0 if swapped else failures + 1


def _plan(cell: Cell, jobs: Sequence[PlannedJob], groups: Sequence[Sequence[int]], seed: int, budget_s: float) -> None:
    """Plan a cell; keeps its earlier plan where that was better."""
    cell.searched = budget_s > 0
    indices = [i for chain in cell.chains for i in groups[chain]]
    place = {old: new for new, old in enumerate(indices)}
    limit = cell.problem.topology.num_workers
    own = [
        replace(
            jobs[i],
            modes=tuple(mode for mode in jobs[i].modes if mode[0] <= limit),
            preds=[place[p] for p in jobs[i].preds],
        )
        for i in indices
    ]
    makespan, placed = _planned(cell.problem, own, seed, budget_s) if own else (0.0, [])
    if cell.placed is None or makespan < cell.makespan:
        cell.makespan, cell.placed = makespan, [Placement(indices[p.job], p.workers) for p in placed]


def _planned(problem: Problem, jobs: Sequence[PlannedJob], seed: int, budget_s: float) -> tuple[float, list[Placement]]:
    """(makespan, placements) of one cell; with budget 0 its constructive plan."""
    idle = StepContext.idle(problem.topology.num_workers)
    if budget_s <= 0:
        made = constructive(problem, jobs, idle, 0.0)
        return made.score, made.schedule.placed
    until = time.perf_counter() + 4 * budget_s
    found = improved(problem, jobs, idle, side_by_side(problem, jobs), budget_s, seed, until, POPULATION)
    return (float("inf"), []) if found is None else (max(found.end), found.placed)


def _swap(
    slow: Cell,
    fast: Cell,
    jobs: Sequence[PlannedJob],
    groups: Sequence[Sequence[int]],
    areas: np.ndarray,
    seed: int,
    attempt: int,
    try_s: float,
) -> bool:
    """Exchange the pair of chains whose area difference comes nearest to evening out both cells, if it helps."""
    want = (slow.makespan - fast.makespan) / 2 * slow.problem.topology.num_workers
    pairs = sorted(
        (abs(areas[a] - (areas[b] if b is not None else 0.0) - want), a, -1 if b is None else b)
        for a in slow.chains
        for b in [*fast.chains, None]
        if areas[a] > (areas[b] if b is not None else 0.0)
    )
    if len(pairs) <= attempt:
        return False
    _, give, take = pairs[attempt]
    taken = [take] if take >= 0 else []
    one = Cell(slow.problem, slow.first_worker, [c for c in slow.chains if c != give] + taken)
    two = Cell(fast.problem, fast.first_worker, [c for c in fast.chains if c not in taken] + [give])
    for cell in (one, two):
        _plan(cell, jobs, groups, seed, try_s)
        if cell.makespan >= slow.makespan - 1e-9:
            return False
    for old, new in ((slow, one), (fast, two)):
        old.chains, old.makespan, old.placed, old.searched = new.chains, new.makespan, new.placed, new.searched
    return True
