"""What is searched: jobs as arrays. J jobs, M modes of a job, P predecessors, G nodes, S workers of a node.

A candidate is a key per job (their order is the order of placement), a mode per job (degree, and over how many nodes)
and a rank per job (which of the best nodes). Placement is greedy: the node with the earliest start, best fit among its
workers. Every semi-active schedule is reachable, so the search over keys and modes is complete for equal workers. Free
times of a node are kept sorted; which workers of a node take part is decided when the winner is placed for real. Where
that costs time (handoffs, NVLink islands, unequal speeds), the compiled engine places workers by name, and the winner
has their bags.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.plan.schedule.listing import EarlyInputs
from actors.plan.schedule.problem import PlannedJob, Problem, StepContext

NEVER = 1e15  # free time of a worker that does not exist
FEW_NODES = 4  # up to which bags over more nodes than necessary are tried


@dataclass(slots=True)
class BagCosts:
    """Costs that depend on which workers of a node are in a bag. A worker is a bit of its node's word."""

    who: np.ndarray  # [G, S] number inside its node of the worker of each free time
    holds: bool  # bags are drawn to the workers that have their inputs
    delay: np.ndarray  # [J] seconds that inputs take to a bag which holds none of their workers; 0 where nothing is
    early: list[list[tuple[float, list[int]]]]  # [J] encodes that ran before this step: end, workers as words [G]
    over: np.ndarray  # [J, M] seconds more over nodes without a common rail
    detour: np.ndarray  # [J, M] seconds more in more NVLink islands of a node than necessary
    fall: np.ndarray  # [R + 1, R + 1] what is left of `over`, by common rails and by most rails of a node
    rails: list[list[int]]  # [G, R] workers of a rail
    islands: list[list[int]]  # [G, islands] workers of an NVLink island, the largest first
    paces: list[float]  # [P] speeds of workers, ascending; 1 where all are equal, whose seconds are divided by theirs
    quick: list[list[int]]  # [P, G] workers that are at least so quick


@dataclass(slots=True)
class Space:
    """Jobs as arrays: what the engines need. Built once per search."""

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
    slack: np.ndarray  # [J] seconds that the job may end after this step without delaying the later one
    nodes: np.ndarray  # [G, S] free times at the start, sorted, NEVER where a node is smaller
    barrier: float = 0.0
    bags: BagCosts | None = None  # None where it does not matter who of a node is in a bag

    @property
    def num_jobs(self) -> int:
        return len(self.chain_of)

    def candidate(self, order: Sequence[int], degrees: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """(keys, modes) that repeat a constructive plan: jobs in this order, the degree of every job."""
        keys = np.empty(self.num_jobs)
        for position, index in enumerate(order):
            keys[index] = (position + 0.5) / self.num_jobs
        modes = np.zeros(self.num_jobs, dtype=np.intp)
        for index, degree in enumerate(degrees):
            fitting = np.flatnonzero(self.degree[index, : self.num_modes[index]] <= degree)
            modes[index] = fitting[-1] if len(fitting) else 0
            same = np.flatnonzero(self.degree[index, : self.num_modes[index]] == self.degree[index, modes[index]])
            modes[index] = same[0]
        return keys, modes


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

    A bag over several nodes takes equal shares of them on common rails; it stays beside the same degree inside a node,
    because it fits where that does not. On clusters of few nodes, bags over three nodes and more are tried too.
    """
    sizes = problem.cluster.nodes
    found: list[tuple[int, int, float]] = []
    quickest = dict(job.at_best(problem.topology))
    for k, seconds in job.modes:
        if any(k2 < k and s2 <= quickest[k] for k2, s2 in quickest.items()):
            continue
        for count in range(1, min(len(sizes), k) + 1):
            share = k // count
            if k % count == 0 and sum(size >= share for size in sizes) >= count:
                spanning_s = problem.topology.least_fall * job.penalty(k) if count > 1 else 0.0
                found.append((k, count, seconds + spanning_s))
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
    table[2] /= _common_speed(problem)
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
        bags=_bag_costs(problem, jobs, modes, context, nodes.shape[1]),
    )


def _bag_costs(
    problem: Problem,
    jobs: Sequence[PlannedJob],
    modes: Sequence[Sequence[tuple[int, int, float]]],
    context: StepContext,
    size: int,
) -> BagCosts | None:
    """Costs by which workers are in a bag; None where workers are equally quick and handoffs and NVLink islands cost
    nothing, or where nodes are not kept to."""
    topology, mapper = problem.topology, problem.options.mapper
    inputs = EarlyInputs(problem, context)
    delay = np.array([inputs.of(job)[0] for job in jobs])
    over, detour = np.zeros((2, len(jobs), max(len(m) for m in modes)))
    for index, job in enumerate(jobs):
        for number, (degree, nodes, _) in enumerate(modes[index]):
            table, seconds = (over, job.penalty(degree)) if nodes > 1 else (detour, job.detour(degree))
            table[index, number] = seconds / _common_speed(problem)
    if not mapper.nodes or (topology.uniform and not (delay.any() or detour.any())):
        return None

    def words(workers: Iterable[int]) -> list[int]:
        found = [0] * len(topology.workers)
        for worker in workers:
            found[topology.node[worker]] |= 1 << worker - topology.workers[topology.node[worker]][0]
        return found

    who = np.tile(np.arange(size), (len(topology.workers), 1))
    for node, workers in enumerate(topology.workers):
        who[node, : len(workers)] = sorted(range(len(workers)), key=lambda w: (context.free_s[workers[w]], w))
    everyone = range(topology.num_workers)
    names = sorted(set(topology.rail)) if mapper.rails else []
    rails = [words(w for w in everyone if topology.rail[w] == name) for name in names] or [words(everyone)]
    shares = range(len(rails) + 1)
    paces = [1.0] if topology.uniform else sorted(set(topology.speed))
    return BagCosts(
        who=who,
        holds=mapper.producers,
        delay=delay,
        early=[[(end, words(workers)) for end, workers in inputs.of(job)[1]] for job in jobs],
        over=over,
        detour=detour,
        fall=np.array([[topology.cross.fall(min(one / max(most, 1), 1.0)) for most in shares] for one in shares]),
        rails=[[rail[node] for rail in rails] for node in range(len(topology.workers))],
        islands=[[words(island)[node] for island in topology.islands[node]] for node in range(len(topology.workers))],
        paces=paces,
        quick=[words(w for w in everyone if topology.uniform or topology.speed[w] >= pace) for pace in paces],
    )


def _common_speed(problem: Problem) -> float:
    """What all seconds are divided by: the speed of all workers; 1 where they have speeds of their own."""
    return problem.topology.speed[0] if problem.topology.uniform else 1.0


def least_end(problem: Problem, jobs: Sequence[PlannedJob], context: StepContext) -> float:
    """No schedule of these jobs ends earlier; a search that reaches it may stop."""
    if context.barrier_s:
        return context.barrier_s
    own = [job for job in jobs if not job.optional]
    area = sum(job.area for job in own) / sum(problem.topology.speed)
    return max(area, _longest_path(problem, own)) if context.fresh else area


def _longest_path(problem: Problem, jobs: Sequence[PlannedJob]) -> float:
    """Seconds of the longest way from an encode through the jobs that consume it, all at their quickest degree."""
    fastest = max(problem.topology.speed)
    quick = [min(s for _, s in job.at_best(problem.topology)) / fastest for job in jobs]
    return max((quick[i] + max((quick[p] for p in job.preds), default=0.0) for i, job in enumerate(jobs)), default=0.0)


@dataclass(slots=True)
class SearchResult:
    """The best candidate: jobs in order; degree, nodes and start of each job."""

    makespan: float
    cost: float
    order: list[int]
    degree: list[int]
    nodes: list[tuple[int, ...]]
    start: list[float]
    rounds: int
    bags: list[tuple[int, ...]] = field(default_factory=list)  # [J] workers; empty where the engine left them open
