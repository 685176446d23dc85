"""The search in numpy: a population of N schedules annealed in lockstep by a vectorised list scheduler.

Work is counted in decoded jobs, not in seconds, so the same input, seed and budget give the same plan on any machine;
the wall clock only stops a search that is far slower than the calibration (see `rounds_for`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.plan.strategies.search.space import NEVER, SearchResult, Space
from actors.plan.strategies.search.waves import waves

SMALL = 10  # up to this many jobs, more candidates are better than more rounds
POPULATIONS = (512, 256)  # of a small and of a larger problem
ROUNDS = 60  # where a budget allows fewer rounds, the population is halved first
ISLAND = 32  # candidates that compete with each other
CYCLE = 400  # rounds between reheatings
HEAT = 0.015  # starting temperature as a share of the makespan
SOFT = 12
WAVE_ROUNDS = 20  # with fewer rounds only the constructive starts are searched
DRAWS = 8  # waves drawn for every one that is kept
FIT = 1e-5  # seconds of start time that a second of idle time is worth when nodes are compared
# Calibration on one busy core: seconds that placing one job of every candidate takes, by calls, by candidates and by
# free-time cells. A fifth is added, so that an idle machine ends before the budget does.
CALL_S, ROW_S, CELL_S = 1.2e-4, 3e-7, 6e-9


def rounds_for(space: Space, budget_s: float, population: int) -> int:
    """How many rounds a budget buys. A constant calibration, deliberately not a measurement."""
    placing = CALL_S + population * (ROW_S + CELL_S * space.nodes.size)
    return max(1, int(budget_s / (space.num_jobs * placing)))


def anneal(
    space: Space,
    starts: Sequence[tuple[np.ndarray, np.ndarray]],
    budget_s: float,
    seed: int,
    bound: float,
    deadline: float,
    population: int = 0,
) -> SearchResult:
    """Improve from starting candidates (keys [J], modes [J]) until the budget's rounds are spent or `bound` is met."""
    random = np.random.default_rng(seed)
    if not population:
        population = POPULATIONS[space.num_jobs > SMALL]
        while population > 2 * ISLAND and rounds_for(space, budget_s, population) < ROUNDS:
            population //= 2
    rounds = rounds_for(space, budget_s, population)
    num_jobs = space.num_jobs
    genes = (
        np.empty((population, num_jobs)),
        np.empty((population, num_jobs), dtype=np.intp),
        np.zeros((population, num_jobs), dtype=np.intp),
    )  # keys, modes, ranks
    for number in range(population):
        genes[0][number], genes[1][number] = starts[number % len(starts)]
    _mutate(random, space, genes, np.arange(population) >= len(starts), strength=3)
    state = decode(space, *genes)
    cost = _cost(space, state, genes[1])
    if rounds >= WAVE_ROUNDS:
        _start_waves(random, space, genes, cost)
        state = decode(space, *genes)
    best = _best(state, cost, genes[1], space)
    heat = HEAT * (best.makespan - space.barrier)
    ahead = bool(space.worth.any())  # with encodes of later steps the cost decides, without them the makespan alone
    for number in range(rounds):
        if (best.makespan <= bound * (1 + 1e-9) and not ahead) or time.perf_counter() > deadline:
            break
        best.rounds = number + 1
        fresh = tuple(gene.copy() for gene in genes)
        if number % 4 == 3:
            _cross(random, space, fresh)
        _mutate(random, space, fresh, np.ones(population, dtype=bool), strength=1)
        state = decode(space, *fresh)
        fresh_cost = _cost(space, state, fresh[1])
        phase = (number % CYCLE) / CYCLE if rounds > CYCLE else number / rounds
        accept = fresh_cost < cost + heat * (0.01 + (1 - phase) ** 2) * random.exponential(size=population)
        for old, new in zip((*genes, cost), (*fresh, fresh_cost)):
            old[accept] = new[accept]
        if (fresh_cost.min() < best.cost - 1e-9) if ahead else (state.makespan.min() < best.makespan - 1e-9):
            best = _best(state, fresh_cost, fresh[1], space, number + 1)
        if number % 10 == 9:
            _resample(genes, cost)
    return best


def _start_waves(random: np.random.Generator, space: Space, genes: tuple[np.ndarray, ...], cost: np.ndarray) -> None:
    """Half of the islands start from the best of a few draws of waves; islands do not mix, so these may mature."""
    islands = len(cost) // ISLAND
    for base in range(islands // 2 * ISLAND, islands * ISLAND, ISLAND):
        keys, modes = waves(space, DRAWS * ISLAND, random)
        found = _cost(space, decode(space, keys, modes, np.zeros_like(modes)), modes)
        top = np.argsort(found, kind="stable")[:ISLAND]
        rows = slice(base, base + ISLAND)
        genes[0][rows], genes[1][rows], genes[2][rows], cost[rows] = keys[top], modes[top], 0, found[top]


def _cost(space: Space, state: PopulationSchedules, modes: np.ndarray) -> np.ndarray:
    """Makespan, softened so that progress on any late item counts, plus what the next steps will have to pay.

    Encodes of later steps that would start after this step's end are left to them; those that start before and end
    after occupy their workers.
    """
    ends = state.end[:, space.counts] - space.barrier
    top = np.maximum(state.makespan - space.barrier, 1e-9)
    soft = top * (np.maximum(ends / top[:, None], 0.0) ** SOFT).mean(axis=1) ** (1 / SOFT)
    cost: np.ndarray
    if not space.worth.any():
        cost = 0.5 * top + 0.5 * soft + 0.05 * state.area
        return cost
    late = state.start >= state.makespan[:, None] - 1e-9
    left = np.where(late, space.worth, 0.0).sum(axis=1)
    degree = space.degree[np.arange(space.num_jobs), modes]
    beyond = np.where(late | space.counts, 0.0, np.maximum(state.end - state.makespan[:, None], 0.0))
    over = beyond * degree
    delay = np.where(beyond > 0, np.maximum(beyond - space.slack, 0.0), 0.0).max(axis=1)
    cost = 0.75 * top + 0.25 * soft + left + delay + over.sum(axis=1) / (space.nodes < NEVER).sum()
    return cost


def _resample(genes: tuple[np.ndarray, ...], cost: np.ndarray) -> None:
    """On every island the worst quarter becomes a copy of the best."""
    size = min(ISLAND, len(cost))
    for base in range(0, len(cost), size):
        ranked = base + np.argsort(cost[base : base + size], kind="stable")
        for array in (*genes, cost):
            array[ranked[-size // 4 :]] = array[ranked[: size // 4]]


def _cross(random: np.random.Generator, space: Space, genes: tuple[np.ndarray, ...]) -> None:
    """A third of the candidates take some chains from a partner of their island."""
    count = len(genes[0])
    size = min(ISLAND, count)
    takers = np.flatnonzero(random.random(count) < 0.33)
    partners = takers // size * size + random.integers(size, size=len(takers))
    chain = random.random((len(takers), len(space.chain_jobs))) < 0.3
    mask = chain[:, space.chain_of]
    for gene in genes:
        gene[takers] = np.where(mask, gene[partners], gene[takers])


def _best(
    state: PopulationSchedules, cost: np.ndarray, modes: np.ndarray, space: Space, rounds: int = 0
) -> SearchResult:
    row = int(cost.argmin()) if space.worth.any() else int(np.lexsort((state.area, state.makespan))[0])
    jobs = range(space.num_jobs)
    end = state.makespan[row] - 1e-9
    kept = [int(j) for j in state.order[row] if space.counts[j] or not space.worth[j] or state.start[row, j] < end]
    degrees = [int(space.degree[j, modes[row, j]]) for j in jobs]
    return SearchResult(
        float(state.makespan[row]),
        float(cost[row]),
        kept,
        degrees,
        [tuple(int(n) for n in state.node[row, j] if n >= 0) for j in jobs],
        [float(state.start[row, j]) for j in jobs],
        rounds,
    )


def _mutate(
    random: np.random.Generator, space: Space, genes: tuple[np.ndarray, ...], rows: np.ndarray, strength: int
) -> None:
    """Move a job in the order, change its mode, or send it to another node, `strength` times, in the given rows."""
    keys, modes, ranks = genes
    index = np.flatnonzero(rows)
    count = len(index)
    for _ in range(strength):
        kind = random.random(count)
        moved = index[kind < 0.6]
        chosen = random.integers(space.num_jobs, size=len(moved))
        # An encode of a later step may get a key above 1: at the end, where it is left to its own step.
        keys[moved, chosen] = random.random(len(moved)) * np.where(space.worth[chosen] > 0, 1.6, 1.0)
        changed = index[(kind > 0.4) & (kind < 0.95)]
        jobs = random.integers(space.num_jobs, size=len(changed))
        modes[changed, jobs] = (random.random(len(changed)) * space.num_modes[jobs]).astype(np.intp)
        turned = index[(kind > 0.9) | (kind < 0.1)]
        jobs = random.integers(space.num_jobs, size=len(turned))
        other = random.integers(len(space.nodes), size=len(turned))
        ranks[turned, jobs] = np.where(random.random(len(turned)) < 0.5, 0, other)


@dataclass(slots=True)
class PopulationSchedules:
    """Schedules of a population."""

    makespan: np.ndarray  # [N] end of the last job that counts
    area: np.ndarray  # [N] mean free time of a worker at the end: breaks ties, guides the search
    order: np.ndarray  # [N, J] jobs in order of placement
    node: np.ndarray  # [N, J, spans] nodes of the bag by job, -1 where unused
    start: np.ndarray  # [N, J]
    end: np.ndarray  # [N, J]


def decode(space: Space, keys: np.ndarray, modes: np.ndarray, ranks: np.ndarray) -> PopulationSchedules:
    """Place every candidate's jobs in the order of its keys [N, J] with its modes, on its ranks-th best nodes.

    Written with flat `take` and per-position columns: this loop is where planning time goes.
    """
    count, num_jobs = keys.shape
    num_nodes, size = space.nodes.shape
    width = int(space.span.max())
    order = _order(space, keys)
    flat_modes = np.arange(num_jobs) * space.seconds.shape[1] + modes  # [N, J] by job
    by_position = np.take_along_axis(flat_modes, order, axis=1).T  # [J, N], rows contiguous below
    seconds = space.seconds.ravel().take(by_position)
    spans = space.span.ravel().take(by_position)
    shares = space.degree.ravel().take(by_position) // spans
    turned = np.minimum(np.take_along_axis(ranks, order, axis=1).T, num_nodes - spans)
    floor = np.where(space.waits, np.maximum(space.release, space.barrier), space.release).take(order.T)
    before = space.preds.take(order.T, axis=0)  # [J, N, P]

    rows = np.arange(count)
    free = np.tile(space.nodes.ravel(), count).reshape(count * num_nodes, size)
    node_base = rows * num_nodes
    cell_base = (node_base[:, None] + np.arange(num_nodes)) * size  # [N, G] of the first free time of a node
    end = np.zeros((count, num_jobs + 1))  # the last column stands for "no predecessor"
    end_base = rows * (num_jobs + 1)
    begin_of = np.empty((count, num_jobs))
    node_of = np.full((count, num_jobs, width), -1, dtype=np.intp)
    workers, offsets = np.arange(size), np.arange(width)
    for position in range(num_jobs):
        job, share, span = order[:, position], shares[position], spans[position]
        ready = np.maximum(end.ravel().take(end_base[:, None] + before[position]).max(axis=1), floor[position])
        kth = free.ravel().take(cell_base + (share - 1)[:, None])  # [N, G] when the node's share-th worker is free
        begin = np.maximum(kth, ready[:, None])
        chosen = _nodes(begin + FIT * (begin - kth), turned[position], offsets)
        starts = begin.ravel().take(node_base[:, None] + chosen)
        used = offsets < span[:, None]
        start = starts[:, 0] if width == 1 else np.where(used, starts, 0.0).max(axis=1)
        finish = start + seconds[position]
        begin_of[rows, job] = start
        end[rows, job] = finish
        for slot in range(width):
            active = rows if slot == 0 else np.flatnonzero(used[:, slot])
            if not len(active):
                break
            node = chosen[:, 0] if slot == 0 else chosen[active, slot]
            node_of[active, job[active], slot] = node
            where = node_base[active] + node
            times = free.take(where, axis=0)
            usable = (times <= start[active, None] + 1e-9).sum(axis=1)[:, None]
            taken = (workers >= usable - share[active, None]) & (workers < usable)
            times = np.where(taken, finish[active, None], times)
            times.sort(axis=1)
            free[where] = times
    finished = end[:, :-1]
    makespan = np.maximum(np.where(space.counts, finished, 0.0).max(axis=1), space.barrier)
    real = space.nodes.ravel() < NEVER
    area = np.where(real, free.reshape(count, -1), 0.0).sum(axis=1) / real.sum()
    return PopulationSchedules(makespan, area, order, node_of, begin_of, finished)


def _order(space: Space, keys: np.ndarray) -> np.ndarray:
    """Jobs [N, J] by ascending key; within a chain the keys are dealt in precedence order."""
    sorted_keys = keys.copy()
    for number, length in enumerate(space.chain_length):
        if length > 1:
            members = space.chain_jobs[number, :length]
            sorted_keys[:, members] = np.sort(keys[:, members], axis=1)
    return np.argsort(sorted_keys, axis=1, kind="stable")


def _nodes(score: np.ndarray, turned: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Nodes [N, spans] from the `turned`-th lowest score on."""
    num_nodes = score.shape[1]
    if num_nodes == 1:
        return np.zeros((len(score), 1), dtype=np.intp)
    if num_nodes == 2:
        first = (score[:, 1] < score[:, 0]).astype(np.intp) ^ (turned & 1)
        return first[:, None] if len(offsets) == 1 else np.stack([first, 1 - first], axis=1)
    ranked = np.argsort(score, axis=1)
    picked = np.minimum(turned[:, None] + offsets, num_nodes - 1)
    return np.take_along_axis(ranked, picked, axis=1)
