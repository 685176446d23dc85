"""CP-SAT: the proven optimum of a small step, the yardstick of the other strategies.

Optional intervals per degree, set of nodes and, where workers are of unequal speed, how many of each speed a bag has;
one cumulative per node and speed. Workers of a node and a speed are interchangeable, so whatever keeps to the
cumulatives can be placed. A bag over several nodes takes equal shares on common rails, as in the search space of
`cascade`; batches keep the given cut.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING

from actors.plan.schedule.evaluator import to_cascades
from actors.plan.schedule.figures import end_with_credit
from actors.plan.schedule.listing import EPS, ListSchedule
from actors.plan.schedule.problem import PlannedJob, Problem, StepContext
from actors.plan.schedule.strategy import Strategy, one_by_one
from actors.plan.strategies.knapsack import knapsack_step
from actors.plan.strategies.search.improve import realise
from actors.plan.strategies.search.space import SearchResult, useful_modes
from actors.plan.strategies.search.step import plan_step
from actors.plan.strategies.search.step_jobs import StepsAhead
from actors.plan.types import Cascade, PlanError

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

Team = tuple[int, float]  # the workers of a node with this speed

log = logging.getLogger(__name__)
RESOLUTION = 40_000  # ticks of a step's serial length; durations are rounded up, the evaluator then uses the exact ones
MOST_WAYS = 20_000  # to run the jobs of a step; with more no proof is tried


@dataclass(frozen=True, slots=True)
class BagChoice:
    """A bag for a job: its nodes, and how many workers of each team. `seconds` are with the slowest of them."""

    degree: int
    nodes: tuple[int, ...]
    takes: tuple[tuple[Team, int], ...]
    seconds: float


class Exact:
    """Every step alone, or the plan of knapsack where packed bags, which are not in its space, end earlier."""

    name = "exact"

    def plan(self, problem: Problem, seed: int) -> list[Cascade]:
        return one_by_one(problem, lambda step: _plan_step(problem, step, seed))


def _plan_step(problem: Problem, step: int, seed: int) -> list[Cascade]:
    idle = StepContext.idle(problem.topology.num_workers)
    start = plan_step(problem, idle, step, StepsAhead(), seed, problem.options.budget_s).schedule
    if not start.jobs:
        return []
    best = improve_exactly(problem, start.jobs, start, seed)
    found = to_cascades(problem, start.jobs, best.placed)
    try:
        packed = knapsack_step(problem, step)
    except PlanError:  # knapsack has no legal plan here
        return found
    return packed if end_with_credit(problem, packed, step) < end_with_credit(problem, found, step) else found


def improve_exactly(problem: Problem, jobs: Sequence[PlannedJob], start: ListSchedule, seed: int) -> ListSchedule:
    """The proven optimum, or the best found in the larger of budget and `proof_s`; never worse than `start`."""
    nodes = [tuple(sorted({problem.topology.node[w] for w in start.where[i]})) for i in range(len(jobs))]
    degrees = [len(start.where[i]) for i in range(len(jobs))]
    bags = [start.where[i] for i in range(len(jobs))]
    hint = SearchResult(max(start.end), 0.0, [p.job for p in start.placed], degrees, nodes, list(start.begin), 0, bags)
    budget_s = max(problem.options.proof_s, problem.options.budget_s)
    found, _ = solve(problem, jobs, hint, budget_s, seed)
    if found is hint:
        return start
    best = realise(problem, jobs, start.context, found, budget_s)
    return best if max(best.end) < max(start.end) - EPS else start


def solve(
    problem: Problem, jobs: Sequence[PlannedJob], hint: SearchResult | None, budget_s: float, seed: int
) -> tuple[SearchResult, bool]:
    """(best schedule, proven optimal). PlanError when the budget ends without any schedule and there is no hint, which
    has the workers of every job."""
    teams = _teams(problem)
    choices = [_ways(problem, job, teams) for job in jobs]
    if sum(map(len, choices)) > MOST_WAYS:
        if hint is None:
            raise PlanError(f"exact: workers have too many speeds ({len(teams)} by node). Use strategy cascade.")
        log.info("exact: too many speeds of workers for a proof")
        return hint, False
    for job, ways in zip(jobs, choices, strict=True):
        if not ways:
            sizes = problem.cluster.nodes
            raise PlanError(f"item {job.item[1]!r}: no degree fits equal shares of the nodes {sizes}; use cascade.")
    model = StepModel(problem, jobs, choices, teams)
    if hint is not None:
        model.start_from(hint.makespan, [_takes(problem, bag) for bag in hint.bags])
    answer = model.solve(seed, budget_s, problem.options.clock_end(budget_s))
    if answer is None:
        if hint is None:
            raise PlanError(
                f"exact found no plan of {len(jobs)} cascades within its budget. Raise the budget or use cascade."
            )
        log.info("exact: no improvement on the starting plan within the budget")
        return hint, False
    return answer.result(problem, teams), answer.is_proven


class StepModel:
    """A step as CP-SAT has it: of each job an interval for every way to run it, one of which is present. Times are in
    ticks, `RESOLUTION` of which are the step's serial length."""

    def __init__(
        self,
        problem: Problem,
        jobs: Sequence[PlannedJob],
        choices: Sequence[Sequence[BagChoice]],  # of each job, at least one
        teams: Mapping[Team, Sequence[int]],
    ) -> None:
        from ortools.sat.python import cp_model

        self._model = model = cp_model.CpModel()
        self._choices = choices
        self._starts: list[cp_model.IntVar] = []
        self._ends: list[cp_model.IntVar] = []
        self._taken: list[list[cp_model.IntVar]] = []
        serial = sum(job.quickest for job in jobs) / min(problem.topology.speed)
        self._ticks = RESOLUTION / serial  # of a second
        horizon = 3 * RESOLUTION + len(jobs)
        of_team: dict[Team, list[tuple[cp_model.IntervalVar, int]]] = {team: [] for team in teams}
        for job, ways in zip(jobs, choices, strict=True):
            start, end = model.new_int_var(0, horizon, ""), model.new_int_var(0, horizon, "")
            own = [model.new_bool_var("") for _ in ways]
            for present, way in zip(own, ways, strict=True):
                length = int(-(-way.seconds * self._ticks // 1))
                interval = model.new_optional_interval_var(start, length, end, present, "")
                for team, count in way.takes:
                    of_team[team].append((interval, count))
            model.add_exactly_one(own)
            for pred in job.preds:
                model.add(start >= self._ends[pred])
            self._starts.append(start)
            self._ends.append(end)
            self._taken.append(own)
        for team, workers in teams.items():
            model.add_cumulative([i for i, _ in of_team[team]], [k for _, k in of_team[team]], len(workers))
        self._makespan = model.new_int_var(0, horizon, "")
        trains = any(job.module == "dit" for job in jobs)
        for job, end in zip(jobs, self._ends, strict=True):
            if job.module == "dit" or not trains:
                model.add(self._makespan >= end)
        model.minimize(self._makespan)

    def start_from(self, makespan_s: float, takes: Sequence[tuple[tuple[Team, int], ...]]) -> None:
        """Look for what is no longer than a known schedule, first near it: `takes` of each of its jobs."""
        self._model.add(self._makespan <= int(makespan_s * self._ticks) + len(takes) + 1)
        for own, ways, known in zip(self._taken, self._choices, takes, strict=True):
            for present, way in zip(own, ways, strict=True):
                self._model.add_hint(present, way.takes == known)

    def solve(self, seed: int, budget_s: float, clock_s: float) -> _Answer | None:
        """The best that is found within the budget, or within `clock_s` of a slow machine; None: nothing is."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1  # with one worker and deterministic time the load does not decide the answer
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = budget_s
        solver.parameters.max_time_in_seconds = clock_s
        status = solver.solve(self._model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return _Answer(
            ways=[
                next(way for way, present in zip(ways, own, strict=True) if solver.value(present))
                for ways, own in zip(self._choices, self._taken, strict=True)
            ],
            begin=[solver.value(start) for start in self._starts],
            over=[solver.value(end) for end in self._ends],
            makespan=solver.value(self._makespan),
            ticks=self._ticks,
            is_proven=status == cp_model.OPTIMAL,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """How each job is run, from when to when, in ticks."""

    ways: list[BagChoice]
    begin: list[int]
    over: list[int]
    makespan: int
    ticks: float  # of a second
    is_proven: bool

    def result(self, problem: Problem, teams: Mapping[Team, Sequence[int]]) -> SearchResult:
        """The schedule in seconds, with workers where they are of unequal speed."""
        last = self.makespan / self.ticks
        found = SearchResult(
            last,
            last,
            order=sorted(range(len(self.ways)), key=lambda i: (self.begin[i], i)),
            degree=[way.degree for way in self.ways],
            nodes=[way.nodes for way in self.ways],
            start=[begin / self.ticks for begin in self.begin],
            rounds=0,
        )
        if not problem.topology.uniform:
            found.bags = _bags(problem, teams, self.ways, self.begin, self.over)
        return found


def _teams(problem: Problem) -> dict[Team, list[int]]:
    """The workers of each node by their speed."""
    found: dict[Team, list[int]] = {}
    for worker, node in enumerate(problem.topology.node):
        found.setdefault((node, problem.topology.speed[worker]), []).append(worker)
    return found


def _takes(problem: Problem, workers: Sequence[int]) -> tuple[tuple[Team, int], ...]:
    """How many workers of each team a bag has."""
    found: dict[Team, int] = {}
    for worker in workers:
        team = problem.topology.node[worker], problem.topology.speed[worker]
        found[team] = found.get(team, 0) + 1
    return tuple(sorted(found.items()))


def _ways(problem: Problem, job: PlannedJob, teams: Mapping[Team, Sequence[int]]) -> list[BagChoice]:
    """All ways to run a job."""
    sizes = problem.cluster.nodes
    ways = []
    for degree, count, seconds in useful_modes(problem, job):
        share = degree // count
        for nodes in combinations(range(len(sizes)), count):
            for parts in product(*(_shares(teams, node, share) for node in nodes)):
                takes = tuple(one for part in parts for one in part)
                ways.append(BagChoice(degree, nodes, takes, seconds / min(speed for (_, speed), _ in takes)))
                if len(ways) > MOST_WAYS:
                    return ways
    return ways


def _shares(teams: Mapping[Team, Sequence[int]], node: int, share: int) -> list[tuple[tuple[Team, int], ...]]:
    """All ways to take this many workers of a node, the slowest teams first."""
    own = sorted(team for team in teams if team[0] == node)
    found = []
    for counts in product(*(range(min(share, len(teams[team])) + 1) for team in own)):
        if sum(counts) == share:
            found.append(tuple((team, count) for team, count in zip(own, counts, strict=True) if count))
    return found


def _bags(
    problem: Problem,
    teams: Mapping[Team, Sequence[int]],
    ways: Sequence[BagChoice],
    begin: Sequence[int],
    over: Sequence[int],
) -> list[tuple[int, ...]]:
    """Workers of every job that are free from its begin, in ticks, until it is over: of several nodes those on rails
    that all of them have free."""
    topology = problem.topology
    busy = [0] * topology.num_workers
    bags: list[tuple[int, ...]] = [()] * len(ways)
    for index in sorted(range(len(ways)), key=lambda i: (begin[i], i)):
        idle = {team: [w for w in teams[team] if busy[w] <= begin[index]] for team, _ in ways[index].takes}
        rails = [
            {topology.rail[w] for (n, _), own in idle.items() if n == node for w in own} for node in ways[index].nodes
        ]
        common = set.intersection(*rails)
        bag: tuple[int, ...] = ()
        for team, count in ways[index].takes:
            wished = sorted(idle[team], key=lambda w: (topology.rail[w] not in common, topology.rail[w], w))
            near = topology.near[team[0]]
            beside = tuple(w for w in bag if topology.node[w] == team[0])
            alike = near.alike or len(ways[index].nodes) > 1
            bag += tuple(wished[:count]) if alike else near.nearest(wished, count, beside)
        for worker in bag:
            busy[worker] = over[index]
        bags[index] = tuple(sorted(bag))
    return bags


STRATEGY: type[Strategy] = Exact
