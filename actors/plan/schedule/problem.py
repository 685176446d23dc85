"""A planning problem as flat lists of jobs: what every strategy schedules.

A job is one cascade to be: a module on a range of samples of an item, with its legal degrees. Strategies decide degree,
order and workers; the evaluator makes cascades of their decision and times them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from actors.plan.costs.needs import TRIES
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.topology import Topology
from actors.plan.types import ENCODED, MODULES, Cluster, EarlyEncode, Item, Module, PlanError, refuse_degrees
from ops.counted import counted
from ops.degrees import default_degrees

ItemKey = tuple[int, str]  # step, item id: ids need to be unique within a step only
EncodeKey = tuple[ItemKey, Module, int, int]  # item, module, first sample, samples
PartKey = tuple[Module, int, int, int, int, int]  # all that a price of some samples of an item depends on
Modes = tuple[tuple[int, float], ...]  # (degree, seconds), ascending


@dataclass(frozen=True, kw_only=True, slots=True)
class Mapper:
    """What decides which workers run a cascade. Plans use all of it; its switches are for ablations (Arachne,
    Table III). With none of them, workers are taken by number as they become free."""

    nodes: bool = True  # bags inside one node, there near to each other, or over as few nodes as possible
    rails: bool = True  # bags over several nodes have the same NIC rails on each
    producers: bool = True  # among equally good workers, those that hold the inputs

    @property
    def by_number(self) -> bool:
        return not (self.nodes or self.rails or self.producers)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What a caller may choose. `budget_s` is per step; see `make_plan` for what it means."""

    strategy: str = "cascade"
    budget_s: float = 0.2
    degrees: tuple[int, ...] = ()  # allowed DiT degrees; empty: all the profile allows
    topology: str = ""  # knapsack and knapformer only; empty: chosen by itself
    static_degree: int = 0  # static only; 0: the best fixed degree for this workload
    proof_s: float = 20.0  # exact only: seconds that it may take even if the budget is smaller, as a proof needs them
    split: bool = True  # a batch may run as several cascades
    lookahead: int = 1  # steps whose encodes may fill gaps of this one
    replans: bool = False  # only the first step will be executed: the budget is spent on it alone
    least_gain: float = 0.0  # share of a step that cut batches or packed bags must save before they are chosen
    bag_peers: int = 0  # a bag with more peers is planned only where no smaller one is legal; 0: no limit
    counted: bool = False
    """A search ends with its counted work, however long that takes: the same plan on any machine. Not that of a large
    cluster in cells, whose rounds the clock ends."""
    mapper: Mapper = Mapper()

    def __post_init__(self) -> None:
        if not self.budget_s >= 0:
            raise PlanError(f"planner.budget_s is {self.budget_s}; it must be a number of seconds of at least 0.")
        if self.lookahead < 0:
            raise PlanError(f"planner.lookahead is {self.lookahead}; it must be at least 0.")

    def clock_end(self, end: float) -> float:
        """When the clock ends a search that should be over by `end`: never where its work is counted."""
        return math.inf if self.counted else end


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One cascade to be. `modes` are (degree, seconds), ascending; `preds` indices of the encodes it consumes."""

    module: Module
    step: int
    item: ItemKey
    first: int
    count: int
    modes: tuple[tuple[int, float], ...]
    preds: Sequence[int] = ()
    penalties: tuple[tuple[int, float], ...] = ()
    """(degree, seconds more where its bag spans nodes without a common rail); empty on one node."""
    detours: tuple[tuple[int, float], ...] = ()
    """(degree, seconds more where its bag uses more NVLink islands of a node than it has to); empty where no node has
    several."""
    release_s: float = 0.0
    """Earliest start: encodes that it consumes ran in an earlier step and end then."""
    worth_s: float = 0.0
    """Step time that a later step saves when this encode of it runs now. Above 0 the job may be left out."""
    slack_s: float = 0.0
    """How much an optional job may end after the step without delaying its own."""

    @property
    def optional(self) -> bool:
        """An encode of a later step, which may be left to that step."""
        return self.worth_s > 0

    def seconds(self, degree: int) -> float:
        """Seconds on one node, at normal speed."""
        return dict(self.modes)[degree]

    def penalty(self, degree: int) -> float:
        """Seconds more over nodes, without a common rail."""
        return dict(self.penalties).get(degree, 0.0)

    def detour(self, degree: int) -> float:
        """Seconds more in more NVLink islands of a node than it has to use."""
        return dict(self.detours).get(degree, 0.0)

    def on(self, topology: Topology, workers: Sequence[int]) -> float:
        """Seconds on exactly these workers."""
        degree = len(workers)
        return topology.seconds(workers, self.seconds(degree), self.penalty(degree), self.detour(degree))

    def at_best(self, topology: Topology) -> list[tuple[int, float]]:
        """(degree, seconds) where its bag is quickest: over nodes only if none is large enough."""
        return at_best(self.modes, self.penalties, topology)

    @property
    def area(self) -> float:
        """The fewest GPU-seconds it can take, on one node."""
        return min(k * s for k, s in self.modes)

    @property
    def quickest(self) -> float:
        return min(s for _, s in self.modes)


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision about one job."""

    job: int
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a step inherits from the steps before it."""

    free_s: tuple[float, ...]
    """When each worker is free."""
    barrier_s: float = 0.0
    """End of the previous step's last dit cascade: no dit of this step starts earlier."""
    ran: Mapping[EncodeKey, tuple[float, tuple[int, ...]]] = field(default_factory=dict)
    """Encodes that ran already, of whichever step: (end, workers)."""

    @classmethod
    def idle(cls, num_workers: int) -> StepContext:
        """Nothing ran before."""
        return cls((0.0,) * num_workers)

    @property
    def fresh(self) -> bool:
        return not any(self.free_s) and not self.ran


class Problem:
    """Items, profile, cluster and options of one planning call, with prices looked up once."""

    def __init__(
        self,
        steps: Sequence[Sequence[Item]],
        profile: Profile,
        cluster: Cluster,
        options: PlanOptions,
        *,
        first_step: int = 0,
        done: Sequence[EarlyEncode] = (),
    ) -> None:
        self.steps = steps
        self.profile = profile
        self.cluster = cluster
        self.options = options
        self.first_step = first_step
        self.done = done
        self.topology = Topology(cluster, profile.cross_node)
        self.room_gib = cluster.least_room_gib
        self.items = index_items(steps, first_step)
        self.finished: dict[tuple[ItemKey, Module], list[EarlyEncode]] = {}
        for key, result in done_results(done, self.items):
            self.finished.setdefault((key, result.module), []).append(result)
        self.numbers = range(first_step, first_step + len(steps))
        self.busy_s = busy_until(done, cluster.num_workers)
        self._modules = {module for module in MODULES if profile.has(module)}
        self._prices: dict[PartKey, tuple[Modes, Modes, Modes]] = {}
        self._cheapest: dict[PartKey, tuple[float, float]] = {}
        refuse_degrees(options.degrees)

    def modes(self, module: Module, item: Item, count: int) -> Modes:
        """Legal (degree, seconds) that this cluster can hold; seconds on one node."""
        return self._priced(module, item, count)[0]

    def penalties(self, module: Module, item: Item, count: int) -> Modes:
        """(degree, seconds more over nodes without a common rail); none in a cluster of one node."""
        return self._priced(module, item, count)[1]

    def detours(self, module: Module, item: Item, count: int) -> Modes:
        """(degree, seconds more in more NVLink islands of a node than necessary); none where no node has several."""
        return self._priced(module, item, count)[2]

    def _priced(self, module: Module, item: Item, count: int) -> tuple[Modes, Modes, Modes]:
        """Modes, penalties and detours."""
        key = _key(module, item, count)
        known = self._prices.get(key)
        if known is None:
            known = self._prices[key] = self._price(module, Samples.of_item(item, count))
        return known

    def _price(self, module: Module, part: Samples) -> tuple[Modes, Modes, Modes]:
        profile, gbps = self.profile, self.cluster.island_gbps
        degrees = [k for k in profile.candidate_degrees(module) if k <= self.cluster.num_workers]
        penalties = [(k, profile.penalty(module, part, k)) for k in degrees if len(self.cluster.nodes) > 1]
        detours = [(k, profile.detour(module, part, k, gbps)) for k in degrees if self.topology.has_islands]
        found = [(k, s) for k, s in profile.modes(module, part, self.room_gib) if self._allows(module, k)]
        modes = self._connectable(found)
        if not modes and part.count == 1 and profile.needs.limits:
            modes = self._last_try(module, part)
        return modes, tuple(penalties), tuple(detours)

    def modes_at_best(self, module: Module, item: Item, count: int) -> list[tuple[int, float]]:
        """The modes as a bag takes where it is quickest: over nodes only if none is large enough."""
        return at_best(self.modes(module, item, count), self.penalties(module, item, count), self.topology)

    def _allows(self, module: Module, degree: int) -> bool:
        allowed = self.options.degrees if module == "dit" else ()
        return degree <= self.cluster.num_workers and (not allowed or degree in allowed)

    def _connectable(self, modes: Sequence[tuple[int, float]]) -> Modes:
        """The modes whose bag keeps to the limit of peers; where there is none, the smallest."""
        most = self.options.bag_peers
        small = [(k, s) for k, s in modes if not most or k <= most + 1]
        return tuple(small or modes[:1])

    def _last_try(self, module: Module, one: Samples) -> Modes:
        """One sample at the highest degree, where only out-of-memory errors that may not come again speak against."""
        degrees = [
            k
            for k in self.profile.candidate_degrees(module)
            if self._allows(module, k) and self.profile.may_try(module, one, k, self.room_gib)
        ]
        if not degrees:
            return ()
        return ((degrees[-1], self.profile.seconds(module, one, degrees[-1])),)

    def needs(self, key: ItemKey, module: Module) -> bool:
        """Whether a cascade of this module must run for the item."""
        return module in self._modules and module not in self.items[key].cached and (key, module) not in self.finished

    def pieces(self, key: ItemKey, module: Module, pattern: Sequence[int]) -> list[PlannedJob]:
        """Jobs of one module of an item, `pattern` being the samples of each cascade. PlanError if one has no mode."""
        item = self.items[key]
        jobs, first = [], 0
        for count in pattern:
            modes = self.modes(module, item, count)
            if not modes:
                raise PlanError(self.why_not(key, module, count))
            penalties, detours = self.penalties(module, item, count), self.detours(module, item, count)
            jobs.append(PlannedJob(module, key[0], key, first, count, modes, (), penalties, detours))
            first += count
        return jobs

    @property
    def start(self) -> StepContext:
        """What the first step inherits: workers that are still at an early encode, and when it ends."""
        ran = {
            (key, module, pieces.start, len(pieces)): (result.end_s, result.workers)
            for (key, module), results in self.finished.items()
            for result in results
            for pieces in [result.samples(self.items[key])]
            if result.end_s > 0
        }
        return StepContext(self.busy_s, 0.0, ran)

    def on(self, cluster: Cluster, first_worker: int) -> Problem:
        """The same items on some nodes of this cluster, whose workers are counted from the first of them on."""
        part = copy.copy(self)
        part.cluster = cluster
        part.topology = Topology(cluster, self.profile.cross_node)
        part.busy_s = (0.0,) * cluster.num_workers
        here = range(first_worker, first_worker + cluster.num_workers)
        part.finished = {
            key: [replace(one, workers=tuple(w - first_worker for w in one.workers if w in here)) for one in results]
            for key, results in self.finished.items()
        }
        part._prices, part._cheapest = {}, {}
        return part

    def jobs(
        self, patterns: dict[tuple[ItemKey, Module], tuple[int, ...]] | None = None, steps: Sequence[int] | None = None
    ) -> list[PlannedJob]:
        """All jobs of the given steps, encodes before the dit of their item, predecessors filled in."""
        jobs: list[PlannedJob] = []
        for key in self.items:
            if steps is not None and key[0] not in steps:
                continue
            encodes: list[int] = []
            for module in ENCODED:
                if self.needs(key, module):
                    pattern = self.pattern(key, module, patterns)
                    pieces = self.pieces(key, module, pattern)
                    encodes += range(len(jobs), len(jobs) + len(pieces))
                    jobs += pieces
            if self.needs(key, "dit"):
                for job in self.pieces(key, "dit", self.pattern(key, "dit", patterns)):
                    preds = [
                        e
                        for e in encodes
                        if jobs[e].first < job.first + job.count and job.first < jobs[e].first + jobs[e].count
                    ]
                    jobs.append(replace(job, preds=preds))
        return jobs

    def pattern(
        self, key: ItemKey, module: Module, patterns: dict[tuple[ItemKey, Module], tuple[int, ...]] | None
    ) -> tuple[int, ...]:
        """How the item's batch is cut: as asked, else whole, else the largest pieces that some degree can hold."""
        if patterns and (key, module) in patterns:
            return patterns[key, module]
        item = self.items[key]
        if self.modes(module, item, item.batch) or not self.options.split:
            return (item.batch,)
        for size in range(item.batch - 1, 0, -1):
            rest = item.batch % size
            if self.modes(module, item, size) and (not rest or self.modes(module, item, rest)):
                return (size,) * (item.batch // size) + ((rest,) if rest else ())
        return (item.batch,)

    def patterns_of(self, key: ItemKey, module: Module) -> list[tuple[int, ...]]:
        """All cuts of the batch into near-equal pieces that the profile can price, the whole batch first."""
        item = self.items[key]
        default = self.pattern(key, module, None)
        found = [default]
        if self.options.split:
            for pieces in range(2, min(item.batch, 16) + 1):
                low, extra = divmod(item.batch, pieces)
                pattern = (low + 1,) * extra + (low,) * (pieces - extra)
                if pattern != default and all(self.modes(module, item, count) for count in set(pattern)):
                    found.append(pattern)
        return found

    def cheapest(self, key: ItemKey, module: Module) -> tuple[float, float]:
        """(fewest GPU-seconds, quickest seconds) of a module of an item over all cuts of its batch."""
        item = self.items[key]
        whole = _key(module, item, item.batch)
        if whole not in self._cheapest:
            self._cheapest[whole] = self._least(key, module)
        return self._cheapest[whole]

    def _least(self, key: ItemKey, module: Module) -> tuple[float, float]:
        area, quick = float("inf"), float("inf")
        fastest = max(self.topology.speed)
        for pattern in self.patterns_of(key, module):
            pattern_area, pattern_quick = 0.0, 0.0
            for count in pattern:
                modes = self.modes_at_best(module, self.items[key], count)
                if not modes:
                    return 0.0, 0.0
                pattern_area += min(k * s for k, s in modes)
                pattern_quick = max(pattern_quick, min(s for _, s in modes))
            area = min(area, pattern_area)
            quick = min(quick, pattern_quick / fastest)
        return area, quick

    def once_at_best(self, item: Item, count: int, degree: int) -> float:
        """Seconds of a dit cascade where its bag is quickest that it does not take again in a pack with others."""
        part, over = Samples.of_item(item, count), 0.0
        if degree > self.topology.largest:
            over = self.topology.least_fall * self.profile.penalty_once("dit", part, degree)
        return self.profile.once("dit", part, degree) + over

    def why_not(self, key: ItemKey, module: Module, count: int) -> str:
        """One sentence: why no degree can run it, and the smallest change that would help."""
        item = self.items[key]
        what = (
            f"step {key[0]}, item {key[1]!r} ({item.frames}f {item.height}x{item.width}, batch {count}): no legal "
            f"degree for {module}"
        )
        priced = self.profile.modes(module, Samples.of_item(item, count), self.room_gib)
        if priced:
            smallest = priced[0][0]
            if self.cluster.num_workers < smallest:
                short = self._short_of_memory(module, item) if count == 1 else ""
                return (
                    f"{what} on {counted(self.cluster.num_workers, 'worker')}: the smallest is {smallest}. "
                    f"{short and short + ' '}Add {counted(smallest - self.cluster.num_workers, 'worker')}."
                )
            legal = [k for k, _ in priced if k <= self.cluster.num_workers]
            return f"{what} among the allowed {list(self.options.degrees)}. Allow degree {legal[0]} in planner.degrees."
        for smaller in range(count - 1, 0, -1):
            if self.profile.modes(module, Samples.of_item(item, smaller), self.room_gib):
                return f"{what}. Use batch {smaller} for this bucket."
        return f"{what}. {self._memory_remedy(module, item)}"

    def _memory_remedy(self, module: Module, item: Item) -> str:
        profile, one = self.profile, Samples.of_item(item, 1)
        short = self._short_of_memory(module, item)
        short = short and f"{short} Use fewer frames or a smaller size for this bucket, or GPUs with more memory."
        if short and module != "dit":  # what an encoder needs in a bag is not known before it has run there
            return short
        heads = profile.num_heads
        for degree in range(1, 4 * self.cluster.num_workers + 1):
            usual = heads is None or degree in default_degrees(heads, most=degree)
            if not usual and degree not in profile.degrees.get(module, ()):
                continue
            if profile.price(module, one, degree) is not None and profile.fits(module, one, degree, self.room_gib):
                return f"It fits at degree {degree}: allow it in the profile's degrees."
        known = sorted(
            {
                key[2]
                for key in profile.measured
                if key[0] == module and key[3:5] == (item.height, item.width) and key[1] == item.batch
            }
        )
        if short:
            return short
        if profile.extrapolate:
            return "One sample ran out of memory when this profile was measured: use fewer frames."
        if known:
            nearest = min(known, key=lambda frames: abs(frames - item.frames))
            return f'The profile lists this batch at {nearest} frames: use that bucket, or set "extrapolate": true.'
        return (
            f"The profile, of {profile.model} on {profile.device}, lists no such shape. Leave it out if another model "
            'is planned; else measure the shape, or set "extrapolate": true in the file.'
        )

    def _short_of_memory(self, module: Module, item: Item) -> str:
        """What one sample lacks at the highest degree of this cluster; "" where memory is not what forbids it."""
        degree = max((k for k in self.profile.candidate_degrees(module) if self._allows(module, k)), default=0)
        if not degree:
            return ""
        found = self.profile.footprint(module, [Samples.of_item(item, 1)], degree)
        need, room = self.profile.needs.gib(found), self.room_gib
        where = f"at degree {degree}, the highest that {counted(self.cluster.num_workers, 'worker')} can run,"
        if need is not None and need > room:
            return (
                f"One sample needs {need:.2f} GiB {where} and a worker has {room:.2f} GiB beside the states: "
                f"{need - room:.2f} GiB are missing."
            )
        lacking = self.profile.needs.lacking_gib(found)
        if lacking is None:
            return ""
        missing = f" when at least {lacking:.2f} GiB were missing" if lacking else " and nobody counts what it lacked"
        return f"One sample ran out of memory {TRIES} times {where}{missing}."


def _key(module: Module, item: Item, count: int) -> PartKey:
    """As `Samples`, which take a search longer to make."""
    return module, count, item.frames, item.height, item.width, item.text_tokens


def at_best(
    modes: Sequence[tuple[int, float]], penalties: Sequence[tuple[int, float]], topology: Topology
) -> list[tuple[int, float]]:
    """(degree, seconds) of modes where their bags are quickest, at normal speed."""
    more = dict(penalties)
    return [(k, s + topology.least_fall * more.get(k, 0.0) if k > topology.largest else s) for k, s in modes]


def index_items(steps: Sequence[Sequence[Item]], first_step: int) -> dict[ItemKey, Item]:
    """Items by (step, id). Raises PlanError when an id occurs twice in a step."""
    items: dict[ItemKey, Item] = {}
    for number, step in enumerate(steps, first_step):
        for item in step:
            if (number, item.id) in items:
                raise PlanError(f"step {number}: item {item.id!r} occurs twice. Give every item of a step its own id.")
            items[number, item.id] = item
    return items


def busy_until(done: Sequence[EarlyEncode], num_workers: int) -> tuple[float, ...]:
    """When each worker ends the early encodes of the steps before. Raises PlanError for one beyond the cluster."""
    busy = [0.0] * num_workers
    for result in done:
        if beyond := [worker for worker in result.workers if not 0 <= worker < num_workers]:
            raise PlanError(
                f"{result.module} of item {result.item!r} is done on worker {beyond[0]}, and the cluster has workers 0 "
                f"to {num_workers - 1}. Leave what lies on other workers out of `done`."
            )
        for worker in result.workers:
            busy[worker] = max(busy[worker], result.end_s)
    return tuple(busy)


def done_results(done: Sequence[EarlyEncode], items: Mapping[ItemKey, Item]) -> list[tuple[ItemKey, EarlyEncode]]:
    """The first item of each finished encode's id; results of items that are not planned are left out."""
    first: dict[str, ItemKey] = {}
    for key in items:
        first.setdefault(key[1], key)
    return [(first[result.item], result) for result in done if result.item in first]
