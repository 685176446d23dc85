"""List scheduling: jobs in a given order with given degrees go where they end first; gaps are filled afterwards.

Inside a node a bag takes workers that are near to each other: of one NVLink island, else by PCIe and memory nodes. Over
several nodes it takes as few as possible, balanced, on the same NIC rails. Last come workers that hold the inputs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from actors.plan.schedule.problem import ItemKey, Placement, PlannedJob, Problem, StepContext

EPS = 1e-9


class EarlyInputs:
    """Encodes that ran before the jobs of a schedule, and what their results cost a bag that holds none of their
    workers."""

    def __init__(self, problem: Problem, context: StepContext) -> None:
        self.cost = problem.profile.handoff.latency_s > 0 or problem.profile.handoff.gib_per_s > 0
        self._problem = problem
        self._ran: dict[ItemKey, set[tuple[int, int, float, tuple[int, ...]]]] = {}
        self._found: dict[tuple[ItemKey, int, int], tuple[float, list[tuple[float, tuple[int, ...]]]]] = {}
        if not self.cost:
            return
        for (item, _, first, count), (end, workers) in context.ran.items():
            self._ran.setdefault(item, set()).add((first, count, end, workers))
        for (item, _), results in problem.finished.items():
            for result in results:
                samples = result.samples(problem.items[item])
                one = (samples.start, len(samples), result.end_s, result.workers)
                self._ran.setdefault(item, set()).add(one)

    def of(self, job: PlannedJob) -> tuple[float, list[tuple[float, tuple[int, ...]]]]:
        """(seconds from the end of an encode until its result is elsewhere, (end, workers) of those that ran before).

        0 and none where nothing is handed over, or that costs nothing.
        """
        if job.module != "dit" or not self.cost:
            return 0.0, []
        key = (job.item, job.first, job.count)
        if key not in self._found:
            delay = self._problem.profile.handoff_seconds(self._problem.items[job.item], job.count)
            stop = job.first + job.count
            ran = self._ran.get(job.item, ())
            self._found[key] = delay, sorted((end, by) for at, n, end, by in ran if at < stop and job.first < at + n)
        return self._found[key]


class ListSchedule:
    """A schedule in the making: places jobs one by one on the workers of a problem."""

    def __init__(
        self,
        problem: Problem,
        jobs: Sequence[PlannedJob],
        context: StepContext | None = None,
        *,
        together: bool = False,
    ) -> None:
        """Without a context all workers are idle and nothing ran before. `together`: an encode goes where one worker
        has all inputs of its dit first, instead of where it ends first."""
        context = context or StepContext.idle(problem.topology.num_workers)
        self.problem = problem
        self.context = context
        self.topology = problem.topology
        self.mapper = problem.options.mapper
        self.jobs = list(jobs)
        self.free = list(context.free_s)
        self.sorted_free = [sorted([self.free[w] for w in workers]) for workers in self.topology.workers]
        self.inputs = EarlyInputs(problem, context)
        self._consumer = {pred: job for job in jobs for pred in job.preds} if together else {}
        self.begin = [0.0] * len(jobs)
        self.end = [0.0] * len(jobs)
        self.placed: list[Placement] = []
        self.where: dict[int, tuple[int, ...]] = {}

    @property
    def step_end(self) -> float:
        """End of the step: of its last dit, or of its last encode where it has no dit."""
        own = [i for i, job in enumerate(self.jobs) if not job.optional and i in self.where]
        dits = [i for i in own if self.jobs[i].module == "dit"] or own
        return max((self.end[i] for i in dits), default=self.context.barrier_s)

    @property
    def score(self) -> float:
        """End of the step plus what later steps pay: encodes left to them, and workers that are busy beyond it."""
        end = self.step_end
        optional = [i for i, job in enumerate(self.jobs) if job.optional]
        if not optional:
            return end
        left = sum(self.jobs[i].worth_s for i in optional if i not in self.where)
        over = sum(max(time_s - end, 0.0) for time_s in self.free) / len(self.free)
        delay = max((self.end[i] - end - self.jobs[i].slack_s for i in optional if i in self.where), default=0.0)
        return end + left + over + max(delay, 0.0)

    def place(self, index: int, degree: int) -> None:
        """Put a job on the workers where it ends first. The degree must be one of its modes."""
        job = self.jobs[index]
        ready = self._ready(index)
        producers = self._producers(job)
        bags = self._bags(job, degree, ready, producers)
        assert bags, f"degree {degree} on {self.topology.num_workers} workers"
        if index in self._consumer:
            self.fix(index, self._beside(index, degree, bags, ready))
        else:
            self.fix(index, self._best(job, bags, ready, producers))

    def put(self, index: int, degree: int, nodes: Sequence[int], turn: int = 0) -> None:
        """Put a job on the given nodes, in equal shares. `turn` varies which of equally free workers are taken."""
        ready = self._ready(index)
        producers = self._producers(self.jobs[index])
        if not self.mapper.nodes:
            self.fix(index, self._anywhere(degree, ready, producers))
        elif len(nodes) == 1:
            job = self.jobs[index]
            bags = self._inside(job, nodes[0], degree, ready, producers, turn)
            self.fix(index, self._best(job, bags, ready, producers))
        else:
            given = [(node, degree // len(nodes)) for node in nodes]
            self.fix(index, self._common_rails(given, ready, producers, turn))

    def fix(self, index: int, workers: tuple[int, ...]) -> None:
        """Put a job on exactly these workers, as early as they, its encodes and the barrier allow."""
        job = self.jobs[index]
        start = max(self._ready(index), max(self.free[w] for w in workers), self._handoff_ready(job, workers))
        seconds = job.on(self.topology, workers)
        end = start + seconds
        for worker in workers:
            self.free[worker] = end
        for node in {self.topology.node[w] for w in workers}:
            self.sorted_free[node] = sorted([self.free[w] for w in self.topology.workers[node]])
        self.begin[index], self.end[index] = end - seconds, end
        self.where[index] = workers
        self.placed.append(Placement(index, workers))

    def fill(self, deadline: float, more: Sequence[PlannedJob] = ()) -> None:
        """Put encodes of later steps, and `more` of them, into idle gaps; the most urgent and largest first.

        They start before the end of the step and end by it; nothing else moves. Where a handoff takes time, it is over
        by then, too: results of an item that are apart would hold up a step that may place them better. The cheapest
        degree that finds a gap is taken, in the earliest gap. The schedule's order is by start time afterwards.
        """
        self.jobs += more
        self.begin += [0.0] * len(more)
        self.end += [0.0] * len(more)
        left = [i for i, job in enumerate(self.jobs) if job.optional and i not in self.where]
        if not left:
            return
        busy, end_s = _busy(self), self.step_end
        for index in sorted(left, key=lambda i: (self.jobs[i].step, -self.jobs[i].worth_s, i)):
            if time.perf_counter() > deadline:
                break
            job = self.jobs[index]
            handoff_s = self.problem.profile.handoff_seconds(self.problem.items[job.item], job.count)
            for _, degree, _ in sorted((k * s, k, s) for k, s in job.modes):
                found = _gap(self, busy, job, degree, end_s - handoff_s)
                if found is not None:
                    start, workers = found
                    self._insert(index, workers, start, start + job.on(self.topology, workers), busy)
                    break
        self.placed.sort(key=lambda placed: self.begin[placed.job])

    def _insert(
        self, index: int, workers: tuple[int, ...], start: float, end: float, busy: list[list[tuple[float, float]]]
    ) -> None:
        self.begin[index], self.end[index], self.where[index] = start, end, workers
        self.placed.append(Placement(index, workers))
        for worker in workers:
            self.free[worker] = max(self.free[worker], end)
            busy[worker].append((start, end))

    def _producers(self, job: PlannedJob) -> set[int]:
        if not self.mapper.producers:
            return set()
        placed = {w for pred in job.preds for w in self.where.get(pred, ())}
        return placed.union(*(workers for _, workers in self.inputs.of(job)[1]))

    def _ready(self, index: int) -> float:
        job = self.jobs[index]
        ready = max((self.end[pred] for pred in job.preds), default=0.0)
        ready = max(ready, job.release_s)
        return max(ready, self.context.barrier_s) if job.module == "dit" else ready

    def _handoff_ready(self, job: PlannedJob, workers: tuple[int, ...]) -> float:
        """When its inputs are on these workers, as far as none of them has made them."""
        bag = set(workers)
        return max((at for at, makers in self._handed_over(job) if bag.isdisjoint(makers)), default=0.0)

    def _handed_over(self, job: PlannedJob) -> list[tuple[float, tuple[int, ...]]]:
        """(when it is elsewhere, workers that made it) of each of its inputs; none where a handoff costs nothing."""
        delay, earlier = self.inputs.of(job)
        if not delay:
            return []
        own = [(self.end[pred], self.where.get(pred, ())) for pred in job.preds]
        return [(end + delay, makers) for end, makers in own + earlier]

    def _beside(self, index: int, degree: int, bags: Sequence[tuple[int, ...]], ready: float) -> tuple[int, ...]:
        """The bag of an encode with which all inputs of its dit are first on a worker that made one of them; of equal
        ones, where it ends first."""
        job, consumer = self.jobs[index], self._consumer[index]
        delay, earlier = self.inputs.of(consumer)
        made = [(self.end[pred], self.where[pred]) for pred in consumer.preds if pred in self.where] + earlier
        nodes = {self.topology.node[w] for _, makers in made for w in makers}
        for workers in (self.topology.workers[node] for node in sorted(nodes)):
            if len(workers) >= degree:
                bags = [*bags, *self._holding(consumer, workers, degree, ready, set())]

        def rank(workers: tuple[int, ...]) -> tuple[float, float]:
            end = max(ready, max(self.free[w] for w in workers)) + job.on(self.topology, workers)
            inputs = [*made, (end, workers)]
            return min(_all_there(inputs, set(makers), delay) for _, makers in inputs), end

        return min(bags, key=rank)

    def _best(
        self, job: PlannedJob, bags: Sequence[tuple[int, ...]], ready: float, producers: set[int]
    ) -> tuple[int, ...]:
        """The bag that ends first; of equal ones the nearest workers, those that hold the inputs, those free last."""
        if len(bags) == 1:
            return bags[0]
        seconds, penalty, detour = job.seconds(len(bags[0])), job.penalty(len(bags[0])), job.detour(len(bags[0]))

        def rank(workers: tuple[int, ...]) -> tuple[float, int, int, float, tuple[int, ...]]:
            start = max(ready, max(self.free[w] for w in workers), self._handoff_ready(job, workers))
            end = start + self.topology.seconds(workers, seconds, penalty, detour)
            held = len(producers.intersection(workers))
            apart = 0 if self.topology.alike else self.topology.apart(workers)
            return end, apart, -held, -sum(self.free[w] for w in workers), workers

        return min(bags, key=rank)

    def _bags(self, job: PlannedJob, degree: int, ready: float, producers: set[int]) -> list[tuple[int, ...]]:
        """Candidate bags: on the nodes where the start is earliest, or over few nodes where none is large enough.

        With speed factors, or where NVLink islands are priced, every node is a candidate, once per speed class; where a
        handoff takes time also the bag of a node that has a producer in it, although that may be free later than
        others.
        """
        if not self.mapper.nodes:
            return [self._anywhere(degree, ready, producers)]
        if self.topology.uniform and not self.inputs.cost and not job.detour(degree):
            ranked = []
            for node, times in enumerate(self.sorted_free):
                if len(times) >= degree:
                    begin = times[degree - 1]
                    ranked.append((max(begin, ready), -begin, node))
            if not ranked:
                return [self._over_nodes(degree, ready, producers)]
            earliest = min(ranked)
            nodes = [node for begin, idle, node in ranked if begin == earliest[0] and idle == earliest[1]][:3]
            nodes += [n for n in {self.topology.node[w] for w in producers} if n not in nodes]
            return [
                self._pick(self.topology.workers[node], degree, ready, producers)
                for node in nodes
                if len(self.topology.workers[node]) >= degree
            ]
        bags = []
        for node, workers in enumerate(self.topology.workers):
            for speed in sorted({self.topology.speed[w] for w in workers}):
                fast = [w for w in workers if self.topology.speed[w] >= speed]
                if len(fast) >= degree:
                    bags += self._inside(job, node, degree, ready, producers, among=fast)
            if producers and len(workers) >= degree:
                bags += self._holding(job, workers, degree, ready, producers)
        return bags or [self._over_nodes(degree, ready, producers)]

    def _holding(
        self, job: PlannedJob, workers: Sequence[int], degree: int, ready: float, producers: set[int]
    ) -> Iterator[tuple[int, ...]]:
        """Bags of a node with a worker that made the input for which the bag would wait longest; then also with one
        that made the next such."""
        inputs, held = self._handed_over(job), list[int]()
        bag = self._pick(workers, degree, ready, producers)
        while len(held) < degree:
            late = max(((at, makers) for at, makers in inputs if set(bag).isdisjoint(makers)), default=(0.0, ()))
            makers = [w for w in late[1] if w in workers]
            if not makers:
                return
            held.append(min(makers, key=lambda w: (self.free[w], w)))
            others = [w for w in workers if w not in held]
            start = max(ready, *(self.free[w] for w in held))
            bag = tuple(sorted([*held, *self._pick(others, degree - len(held), start, producers)]))
            yield bag

    def _inside(
        self,
        job: PlannedJob,
        node: int,
        degree: int,
        ready: float,
        producers: set[int],
        turn: int = 0,
        among: Sequence[int] = (),
    ) -> list[tuple[int, ...]]:
        """Candidate bags of a node: of all its workers, or those `among` them; and of each NVLink island alone where
        another one costs time."""
        workers = among or self.topology.workers[node]
        groups = [workers]
        if job.detour(degree):
            groups += [own for i in self.topology.islands[node] if len(own := [w for w in workers if w in i]) >= degree]
        return [self._pick(group, degree, ready, producers, turn) for group in groups]

    def _anywhere(self, degree: int, ready: float, producers: set[int]) -> tuple[int, ...]:
        """Workers of any nodes."""
        everyone = range(self.topology.num_workers)
        if not self.mapper.by_number:
            return self._pick(everyone, degree, ready, producers)
        return tuple(sorted(sorted(everyone, key=lambda w: (max(self.free[w], ready), w))[:degree]))

    def _pick(
        self, workers: Sequence[int], degree: int, ready: float, producers: set[int], turn: int = 0
    ) -> tuple[int, ...]:
        """Best fit: of the workers that allow the earliest start, those free last; producers first on ties."""
        if not degree:
            return ()
        free = self.free
        flip = -1 if turn % 2 else 1
        ordered = sorted(workers, key=lambda w: (free[w], w in producers, flip * w))
        start = max(ready, free[ordered[degree - 1]])
        usable = degree
        while usable < len(ordered) and free[ordered[usable]] <= start + EPS:
            usable += 1
        near = self.topology.near[self.topology.node[ordered[0]]]
        if near.alike or degree == 1 or not self.mapper.nodes:
            return tuple(sorted(ordered[usable - degree : usable]))
        return near.nearest(ordered[usable - 1 :: -1], degree)

    def _over_nodes(self, degree: int, ready: float, producers: set[int]) -> tuple[int, ...]:
        """A bag of `degree` workers over the fewest nodes that can hold it: those that are free first, then those where
        the inputs are."""
        nodes_of = self.topology.workers
        order = sorted(range(len(nodes_of)), key=lambda n: -len(nodes_of[n]))
        count, total = 0, 0
        while total < degree:
            total += len(nodes_of[order[count]])
            count += 1
        share = -(-degree // count)

        def available(node: int) -> float:
            times = sorted(self.free[w] for w in nodes_of[node])
            return times[min(share, len(times)) - 1]

        def rank(node: int) -> tuple[bool, float, int, int]:
            held = len(producers.intersection(nodes_of[node])) if producers else 0
            return len(nodes_of[node]) < share, available(node), -held, node

        ranked = sorted(order, key=rank)
        nodes = ranked[:count]
        extra = count
        while sum(len(nodes_of[n]) for n in nodes) < degree:
            nodes.append(ranked[extra])
            extra += 1
        given = _shares(degree, [len(nodes_of[n]) for n in nodes])
        assert given is not None, f"degree {degree} exceeds {self.topology.num_workers} workers"
        return self._common_rails([(n, g) for n, g in zip(nodes, given) if g], ready, producers)

    def _common_rails(
        self, given: Sequence[tuple[int, int]], ready: float, producers: set[int], turn: int = 0
    ) -> tuple[int, ...]:
        """The given number of workers of each node: earliest common start, then common rails and the shortest way to
        their NICs, then the nearest to each other, then best fit, then those that hold the inputs."""
        topology, free, start = self.topology, self.free, ready
        for node, count in given:
            start = max(start, sorted(free[w] for w in topology.workers[node])[count - 1])
        usable = [[w for w in topology.workers[node] if free[w] <= start + EPS] for node, _ in given]
        rails = sorted({topology.rail[w] for workers in usable for w in workers})
        stock = {rail: [sum(topology.rail[w] == rail for w in workers) for workers in usable] for rail in rails}
        held = Counter(topology.rail[w] for w in producers)
        # Rails present on every node first, those with most workers first: the overlap grows and few rails are used.
        # Then those of the workers that hold the inputs.
        flip = -1 if turn % 2 else 1
        ranks = {r: (-min(counts), -sum(counts), -held[r], flip * ord(r[0])) for r, counts in stock.items()}
        chosen: list[int] = []
        for (node, count), workers in zip(given, usable):
            way = {w: (ranks[topology.rail[w]], topology.nic_hops[w]) if self.mapper.rails else () for w in workers}
            workers.sort(key=lambda w: (way[w], -free[w], w not in producers, w))
            near = topology.near[node]
            if near.alike:
                chosen += workers[:count]
                continue
            bag: tuple[int, ...] = ()
            for _, group in groupby(workers, key=lambda w: way[w]):
                if len(bag) < count:
                    equal = list(group)
                    bag += near.nearest(equal, min(count - len(bag), len(equal)), bag)
            chosen += bag
        return tuple(sorted(chosen))


def _all_there(inputs: Sequence[tuple[float, tuple[int, ...]]], bag: set[int], delay: float) -> float:
    """When inputs (end, workers) are on a bag, to which what it has not made comes after `delay`."""
    return max(end + delay if bag.isdisjoint(makers) else end for end, makers in inputs)


def _shares(degree: int, sizes: Sequence[int]) -> list[int] | None:
    """How many workers each node gives: equal up to one, no more than it has. None when they are too few."""
    given = [0] * len(sizes)
    left = degree
    while left:
        open_nodes = [n for n in range(len(sizes)) if given[n] < sizes[n]]
        if not open_nodes:
            return None
        node = min(open_nodes, key=lambda n: (given[n], -sizes[n], n))
        given[node] += 1
        left -= 1
    return given


def _busy(schedule: ListSchedule) -> list[list[tuple[float, float]]]:
    """Intervals in which each worker cannot take a new job."""
    busy: list[list[tuple[float, float]]] = [
        [(-EPS, time_s)] if time_s > 0 else [] for time_s in schedule.context.free_s
    ]
    for index, workers in schedule.where.items():
        for worker in workers:
            busy[worker].append((schedule.begin[index], schedule.end[index]))
    return busy


def _gap(
    schedule: ListSchedule, busy: list[list[tuple[float, float]]], job: PlannedJob, degree: int, end_s: float
) -> tuple[float, tuple[int, ...]] | None:
    """Earliest (start, workers) of one node, of workers with little idle time to lose; of equally early ones, of the
    quicker workers."""
    topology, best = schedule.topology, None
    for of_node in topology.workers:
        for pace in sorted({topology.speed[w] for w in of_node}, reverse=True):
            workers = [w for w in of_node if topology.speed[w] >= pace]
            if len(workers) >= degree:
                best = _gap_of(schedule, busy, job, degree, end_s, workers, job.seconds(degree) / pace, best)
    return best


def _gap_of(
    schedule: ListSchedule,
    busy: list[list[tuple[float, float]]],
    job: PlannedJob,
    degree: int,
    end_s: float,
    workers: Sequence[int],
    seconds: float,
    best: tuple[float, tuple[int, ...]] | None,
) -> tuple[float, tuple[int, ...]] | None:
    """The earliest gap of these workers, in which the job takes `seconds`, where it is earlier than the `best`."""
    topology = schedule.topology
    starts = sorted({end for w in workers for _, end in busy[w]} | {min(schedule.context.free_s[w] for w in workers)})
    for start in starts:
        if start + seconds > end_s + EPS or (best is not None and start >= best[0]):
            break
        idle = [
            w for w in workers if all(end <= start + EPS or begin >= start + seconds - EPS for begin, end in busy[w])
        ]
        if len(idle) >= degree:
            near = topology.near[topology.node[workers[0]]]
            bag = tuple(idle[:degree]) if near.alike else near.nearest(idle, degree)
            if job.detour(degree) and topology.strays(bag):  # it would take longer than the gap is known to be
                continue
            return start, bag
    return best
