"""List scheduling: jobs in a given order with given degrees go where they end first."""

from __future__ import annotations

from collections.abc import Sequence

from actors.plan.schedule.bags import pick_on, span
from actors.plan.schedule.problem import Placement, PlannedJob, Problem, StepContext

EPS = 1e-9


class ListSchedule:
    """A schedule in the making: places jobs one by one on the workers of a problem."""

    def __init__(self, problem: Problem, jobs: Sequence[PlannedJob], context: StepContext | None = None) -> None:
        """Without a context all workers are idle and nothing ran before."""
        context = context or StepContext.idle(problem.topology.num_workers)
        self.problem = problem
        self.context = context
        self.topology = problem.topology
        self.jobs = jobs
        self.free = list(context.free_s)
        self.sorted_free = [sorted([self.free[w] for w in workers]) for workers in self.topology.workers]
        self.handoff = problem.profile.handoff.latency_s > 0 or problem.profile.handoff.gib_per_s > 0
        self.begin = [0.0] * len(jobs)
        self.end = [0.0] * len(jobs)
        self.placed: list[Placement] = []
        self.where: dict[int, tuple[int, ...]] = {}

    def with_more(self, jobs: Sequence[PlannedJob]) -> ListSchedule:
        """The same schedule with more jobs, which are not placed yet."""
        other = ListSchedule(self.problem, [*self.jobs, *jobs], self.context)
        other.free, other.sorted_free = list(self.free), [list(times) for times in self.sorted_free]
        other.begin, other.end = [*self.begin, *[0.0] * len(jobs)], [*self.end, *[0.0] * len(jobs)]
        other.placed, other.where = list(self.placed), dict(self.where)
        return other

    def place(self, index: int, degree: int) -> float:
        """Put a job on the workers where it ends first; returns its end. The degree must be one of its modes."""
        job = self.jobs[index]
        ready = self._ready(index)
        producers = {w for pred in job.preds for w in self.where.get(pred, ())}
        best: tuple[float, int, float, tuple[int, ...]] | None = None
        seconds = job.seconds(degree)
        for workers in self._bags(degree, ready, producers):
            start = max(ready, max(self.free[w] for w in workers), self._handoff_ready(job, workers))
            end = start + seconds * self.topology.factor(workers)
            rank = (end, -len(producers.intersection(workers)), -sum(self.free[w] for w in workers), workers)
            if best is None or rank < best:
                best = rank
        assert best is not None, f"degree {degree} on {self.topology.num_workers} workers"
        return self._settle(index, best[3], best[0])

    def put(self, index: int, degree: int, nodes: Sequence[int], turn: int = 0) -> float:
        """Put a job on the given nodes, in equal shares. `turn` varies which of equally free workers are taken."""
        job = self.jobs[index]
        ready = self._ready(index)
        producers = {w for pred in job.preds for w in self.where.get(pred, ())}
        if len(nodes) == 1:
            workers = self._pick(self.topology.workers[nodes[0]], degree, ready, producers, turn)
        else:
            given = [(node, degree // len(nodes)) for node in nodes]
            workers = pick_on(self.topology, self.free, given, ready, turn)
        start = max(ready, max(self.free[w] for w in workers), self._handoff_ready(job, workers))
        return self._settle(index, workers, start + job.seconds(degree) * self.topology.factor(workers))

    def fix(self, index: int, workers: tuple[int, ...]) -> float:
        """Put a job on exactly these workers."""
        start = max(
            self._ready(index), max(self.free[w] for w in workers), self._handoff_ready(self.jobs[index], workers)
        )
        degree = len(workers)
        return self._settle(index, workers, start + self.jobs[index].seconds(degree) * self.topology.factor(workers))

    def insert(self, index: int, workers: tuple[int, ...], start: float, end: float) -> None:
        """Put a job into an idle gap; the caller vouches for the gap and restores the order of `placed`."""
        self.begin[index], self.end[index], self.where[index] = start, end, workers
        self.placed.append(Placement(index, workers))
        for worker in workers:
            self.free[worker] = max(self.free[worker], end)

    def _settle(self, index: int, workers: tuple[int, ...], end: float) -> float:
        for worker in workers:
            self.free[worker] = end
        for node in {self.topology.node[w] for w in workers}:
            self.sorted_free[node] = sorted([self.free[w] for w in self.topology.workers[node]])
        self.begin[index] = end - self.jobs[index].seconds(len(workers)) * self.topology.factor(workers)
        self.end[index] = end
        self.where[index] = workers
        self.placed.append(Placement(index, workers))
        return end

    def _ready(self, index: int) -> float:
        job = self.jobs[index]
        ready = max((self.end[pred] for pred in job.preds), default=0.0)
        ready = max(ready, job.release_s)
        return max(ready, self.context.barrier_s) if job.module == "dit" else ready

    def _handoff_ready(self, job: PlannedJob, workers: tuple[int, ...]) -> float:
        if job.module != "dit" or not self.handoff:
            return 0.0
        item = self.problem.items[job.item]
        delay = self.problem.profile.handoff_seconds(job.count, item.frames, item.height, item.width)
        bag = set(workers)
        ready = 0.0
        for pred in job.preds:
            if bag.isdisjoint(self.where.get(pred, ())):
                ready = max(ready, self.end[pred] + delay)
        for module in ("text", "vae"):
            result = self.problem.finished.get((job.item, module))
            if result is not None and bag.isdisjoint(result.workers):
                ready = max(ready, delay)
        return ready

    def _bags(self, degree: int, ready: float, producers: set[int]) -> list[tuple[int, ...]]:
        """Candidate bags: on the nodes where the start is earliest, or over few nodes where none is large enough.

        With speed factors every node is a candidate, once per speed class.
        """
        if self.topology.uniform and not self.handoff:
            ranked = []
            for node, times in enumerate(self.sorted_free):
                if len(times) >= degree:
                    begin = times[degree - 1]
                    ranked.append((max(begin, ready), -begin, node))
            if not ranked:
                return [span(self.topology, self.free, degree, ready)]
            earliest = min(ranked)
            nodes = [node for begin, idle, node in ranked if begin == earliest[0] and idle == earliest[1]][:3]
            nodes += [n for n in {self.topology.node[w] for w in producers} if n not in nodes]
            return [
                self._pick(self.topology.workers[node], degree, ready, producers)
                for node in nodes
                if len(self.topology.workers[node]) >= degree
            ]
        bags = []
        for workers in self.topology.workers:
            for speed in sorted({self.topology.speed[w] for w in workers}):
                fast = [w for w in workers if self.topology.speed[w] >= speed]
                if len(fast) >= degree:
                    bags.append(self._pick(fast, degree, ready, producers))
        return bags or [span(self.topology, self.free, degree, ready)]

    def _pick(
        self, workers: Sequence[int], degree: int, ready: float, producers: set[int], turn: int = 0
    ) -> tuple[int, ...]:
        """Best fit: of the workers that allow the earliest start, those free last; producers first on ties."""
        free = self.free
        flip = -1 if turn % 2 else 1
        ordered = sorted(workers, key=lambda w: (free[w], w in producers, flip * w))
        start = max(ready, free[ordered[degree - 1]])
        usable = degree
        while usable < len(ordered) and free[ordered[usable]] <= start + EPS:
            usable += 1
        return tuple(sorted(ordered[usable - degree : usable]))
