"""Many schedules at once: a vectorised list scheduler over a population of candidates.

N candidates, J jobs, G nodes, S workers of a node. A candidate is a key per job slot (their order is the order of
placement) and a mode per job (degree, and over how many nodes). Placement is greedy: the node with the earliest start,
best fit among its workers. Every semi-active schedule is reachable, so the search over keys and modes is complete for
equal workers. Free times of a node are kept sorted, identities come back when the winner is placed for real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.plan.schedule.problem import PlannedJob, Problem, StepContext

NEVER = 1e15  # free time of a worker that does not exist
FEW_NODES = 4  # up to which bags over more nodes than necessary are tried
FIT = 1e-5  # seconds of start time that a second of idle time is worth when nodes are compared


@dataclass(slots=True)
class Space:
    """Jobs as arrays: what `decode` needs. Built once per search."""

    chain_of: np.ndarray  # [J] chain (connected jobs of an item) of each job slot
    chain_jobs: np.ndarray  # [chains, longest] job indices of a chain in precedence order
    chain_length: list[int]
    degree: np.ndarray  # [J, M]
    span: np.ndarray  # [J, M] nodes of the bag
    seconds: np.ndarray  # [J, M]
    num_modes: np.ndarray  # [J]
    preds: np.ndarray  # [J, P] job indices, J where there is none
    release: np.ndarray  # [J] earliest start: encodes that ran before
    counts: np.ndarray  # [J] the job counts for the makespan; the others are encodes of later steps
    waits: np.ndarray  # [J] the job waits for the barrier
    worth: np.ndarray  # [J] seconds of step time that a later step saves when the job runs in this one
    slack: np.ndarray  # [J] seconds that such a job may end after this step without delaying the later one
    nodes: np.ndarray  # [G, S] free times at the start, sorted, NEVER where a node is smaller
    barrier: float = 0.0

    @property
    def num_jobs(self) -> int:
        return len(self.chain_of)


def chains(jobs: Sequence[PlannedJob]) -> list[list[int]]:
    """Connected components of the precedence graph, each in precedence order."""
    parent = list(range(len(jobs)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for index, job in enumerate(jobs):
        for pred in job.preds:
            parent[root(pred)] = root(index)
    groups: dict[int, list[int]] = {}
    for index in range(len(jobs)):
        groups.setdefault(root(index), []).append(index)
    return [sorted(group, key=lambda i: (bool(jobs[i].preds), i)) for group in groups.values()]


def useful_modes(problem: Problem, job: PlannedJob) -> list[tuple[int, int, float]]:
    """(degree, nodes, seconds) that are not dominated: less of both workers and time never hurts.

    A bag over several nodes takes equal shares of them at the best cross-node factor; it stays beside the same degree
    inside a node, because it fits where that does not. On clusters of few nodes, bags over three nodes and more are
    tried too.
    """
    sizes = problem.cluster.nodes
    found: list[tuple[int, int, float]] = []
    for k, seconds in job.modes:
        if any(k2 <= k and s2 <= seconds and (k2, s2) != (k, seconds) for k2, s2 in job.modes):
            continue
        for count in range(1, min(len(sizes), k) + 1):
            share = k // count
            if k % count == 0 and sum(size >= share for size in sizes) >= count:
                found.append((k, count, seconds * (problem.topology.best_span if count > 1 else 1.0)))
                if count > 1 and len(sizes) > FEW_NODES:
                    break
    return found


def build(problem: Problem, jobs: Sequence[PlannedJob], context: StepContext) -> Space | None:
    """Arrays of a problem; None where a job has no mode in this form (unequal shares over unequal nodes)."""
    modes = [useful_modes(problem, job) for job in jobs]
    if not all(modes):
        return None
    width = max(len(m) for m in modes)
    groups = chains(jobs)
    longest = max(len(group) for group in groups)
    chain_jobs = np.zeros((len(groups), longest), dtype=np.intp)
    chain_of = np.zeros(len(jobs), dtype=np.intp)
    for number, group in enumerate(groups):
        chain_jobs[number, : len(group)] = group
        chain_of[group] = number
    most = max((len(job.preds) for job in jobs), default=0) or 1
    preds = np.full((len(jobs), most), len(jobs), dtype=np.intp)
    table = np.zeros((3, len(jobs), width))
    for index, job in enumerate(jobs):
        preds[index, : len(job.preds)] = job.preds
        for number, mode in enumerate(modes[index]):
            table[:, index, number] = mode
    dits = np.array([job.module == "dit" for job in jobs])
    counts = dits if dits.any() else np.ones(len(jobs), dtype=bool)
    nodes = np.full((len(problem.cluster.nodes), max(problem.cluster.nodes)), NEVER)
    for node, workers in enumerate(problem.topology.workers):
        nodes[node, : len(workers)] = sorted(context.free_s[w] for w in workers)
    return Space(
        chain_of=chain_of,
        chain_jobs=chain_jobs,
        chain_length=[len(group) for group in groups],
        degree=table[0].astype(np.intp),
        span=table[1].astype(np.intp),
        seconds=table[2],
        num_modes=np.array([len(m) for m in modes]),
        preds=preds,
        release=np.array([job.release_s for job in jobs]),
        counts=counts,
        waits=dits,
        worth=np.array([job.worth_s for job in jobs]),
        slack=np.array([job.slack_s for job in jobs]),
        nodes=nodes,
        barrier=context.barrier_s,
    )


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
