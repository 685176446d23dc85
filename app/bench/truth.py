"""`heddle bench truth`: does a run learn what its cascades cost, and do its plans follow?

A machine whose costs Heddle is not told: devices that small batches leave half idle, an attention of its own exponent,
an all-to-all with a latency and a bandwidth, a slow link between two nodes, one slow GPU, noise, ranks that come late,
first runs of a shape that compile, and now and then a timing that is NaN or absurd. A run begins with a *wrong*
profile (another device's FLOPs, a network of another speed), plans and executes 200 steps on this machine, and learns
from the spans that its workers would report. Then, on steps it has not seen: how far predicted seconds of cascades are
off the true ones, and how much longer its plans take than plans made with the truth.

Before that: how far off is a profile of this machine, measured at some shapes and degrees, at others?

Planner, observations and speeds are those of a run, points and fits those of `heddle profile`; only the workers are
simulated.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, cast

import numpy as np
import typer

from actors.config import PlannerConfig
from actors.messages import Piece, Span, StepReport
from actors.plan.costs.exchange import ExchangePoint, exchange_speed
from actors.plan.costs.flops import exchange_seconds
from actors.plan.costs.profile import Profile
from actors.plan.costs.spanning import OVERLAP
from actors.plan.registry import STRATEGIES
from actors.plan.types import Cascade, Cluster, Item, Module
from actors.planning.actor import Planner
from actors.planning.observations import PartShape, parts_of
from actors.run.speeds import Speeds
from app.device.measuring import EXCHANGES, spanning_point
from app.device.points import ProfiledShape
from app.device.profile import points_of
from data.types import Bucket
from ops.models.wan.config import WanConfig

MODEL = WanConfig(num_layers=30, num_heads=12, head_dim=128, ffn_dim=8960, gradient_checkpointing=True)
NODES = (4, 4)
SLOW_WORKER, SLOW_SPEED = 2, 0.6
CLIPS = ((1, 480, 832, 8), (17, 480, 832, 3), (33, 480, 832, 2), (81, 480, 832, 1), (33, 720, 1280, 1))
TEXT_TOKENS = 128
PROFILED_DEGREES = (1, 2, 4)
UNSEEN_DEGREES = {False: (1, 2, 3, 4), True: (2, 3, 4, 6)}  # over nodes, of other shapes
UNSEEN_CLIPS = (
    (1, 480, 832, 4),
    (1, 720, 1280, 2),
    (9, 480, 832, 4),
    (25, 480, 832, 2),
    (49, 480, 832, 1),
    (65, 480, 832, 1),
    (17, 720, 1280, 1),
    (49, 720, 1280, 1),
)
UNSEEN_TEXTS = tuple((1, 480, 832, batch) for batch in (2, 4, 6))
ITEMS = 8  # of a step
LATE = 0.1
DEGREES = {"static": 2}
EQUAL_SPEEDS = ("exact",)  # strategies that know no slow worker: their machine has none
ITEMS_OF = {"exact": 4}  # of a step, where that of the others takes a proof its whole time: 15 s and more of a core


@dataclass
class Machine:
    """The hidden truth, and what its workers report."""

    rng: np.random.Generator
    noise: float = 0.04  # standard deviation of a cascade's logarithm
    late: float = LATE  # share of a bag's ranks that come late
    absurd: float = 0.003  # share of spans with an impossible timing
    nodes: tuple[int, ...] = NODES
    slow: int = SLOW_WORKER  # a worker that is slower; -1: none
    _ran: set[tuple[int, str, tuple[int, ...]]] = field(default_factory=set)

    def seconds(self, module: Module, parts: Sequence[PartShape], workers: Sequence[int]) -> float:
        """Of a cascade of these parts on these workers, without noise."""
        slowest = min(SLOW_SPEED if w == self.slow else 1.0 for w in workers)
        spanning = len({w // self.nodes[0] for w in workers}) > 1
        return self.normal(module, parts, len(workers), spanning) / slowest

    def normal(self, module: Module, parts: Sequence[PartShape], degree: int, spanning: bool = False) -> float:
        """The same on workers of normal speed."""
        if module == "text":
            return 0.004 + 2e-5 * sum(count * text for count, *_, text in parts)
        if module == "vae":
            return 0.02 + math.fsum(2.6e-9 * count * math.pow(f * h * w, 1.02) for count, f, h, w, _ in parts)
        d, layers = MODEL.dim, sum(MODEL.block_counts)
        lengths = [(count, _tokens(f, h, w) + text) for count, f, h, w, text in parts]
        rows = sum(count * length for count, length in lengths) / degree
        linear = sum(count * 24.0 * length * d * d for count, length in lengths)
        attention = sum(count * 4.0 * math.pow(length, 1.94) * d * 1.6 for count, length in lengths)
        efficiency = rows / (rows + 400.0)  # few rows leave a device half idle
        compute = 4.0 * layers * (linear / 4.2e14 + attention / 3.1e14) / degree / efficiency
        if degree == 1:
            return 0.03 + compute
        sent = rows * d * 2 * (degree - 1) / degree  # bytes of one of four exchanges, in four passes
        return 0.03 + compute + 16.0 * layers * self.exchange(sent, degree, spanning)

    def exchange(self, sent: float, degree: int, spanning: bool = False) -> float:
        """Of one all-to-all in which a member sends so many bytes."""
        return 2e-5 * math.log2(degree) + sent / (4e10 if spanning else 1.6e11)

    def execute(self, cascades: Sequence[Cascade], items: Sequence[Item], step: int) -> tuple[list[StepReport], float]:
        """(what the workers report, seconds of the step)."""
        by_id, bucket_of = {i.id: i for i in items}, {i.id: (i.frames, i.height, i.width) for i in items}
        free = [0.0] * sum(self.nodes)
        spans: list[list[Span]] = [[] for _ in free]
        ready: dict[str, float] = {}
        for cascade in sorted(cascades, key=lambda c: c.start_s):
            pieces = tuple(
                Piece(item=p.item, bucket=bucket_of[p.item], batch=p.count) for p in cascade.parts if p.item in by_id
            )
            parts = parts_of(pieces, {i.id: i.text_tokens for i in items})
            inputs = max((ready.get(p.item, 0.0) for p in cascade.parts), default=0.0) * (cascade.module == "dit")
            work = self.seconds(cascade.module, parts, cascade.workers) * math.exp(self.rng.normal(0, self.noise))
            shape = (cascade.module, (*(b for p in pieces for b in p.bucket), cascade.degree))
            first = {w: (w, *shape) not in self._ran for w in cascade.workers}
            if any(first.values()):
                work *= 4.0
            self._ran |= {(w, *shape) for w in cascade.workers}
            came = {
                w: max(free[w], inputs) + (self.rng.exponential(0.5) * work if self.rng.random() < self.late else 0.0)
                for w in cascade.workers
            }
            met = max(came.values())
            for worker in cascade.workers:
                told = work if self.rng.random() >= self.absurd else self.rng.choice([math.nan, -1.0, 1e9])
                spans[worker].append(
                    Span(
                        name=cascade.id,
                        module=cascade.module,
                        cascade=cascade.id,
                        step=cascade.step,
                        start=came[worker],
                        end=met + work,
                        batch=cascade.batch,
                        degree=cascade.degree,
                        pieces=pieces,
                        planned_start_s=cascade.start_s,
                        planned_end_s=cascade.end_s,
                        bag=cascade.workers,
                        work_s=told,
                        wait_s=met - came[worker],
                        first_here=first[worker],
                    )
                )
                free[worker] = met + work
            if cascade.module != "dit":
                for part in cascade.parts:
                    ready[part.item] = max(ready.get(part.item, 0.0), met + work)
        reports = [_report(worker, step, tuple(of)) for worker, of in enumerate(spans)]
        return reports, max(free)


class TrueProfile(Profile):
    """Plans with it are made with the truth."""

    def price(
        self, module: Module, batch: int, frames: int, height: int, width: int, degree: int, text_tokens: int = 0
    ) -> float:
        """Of the machine."""
        return _true(module, (batch, frames, height, width, text_tokens), degree)

    def penalty(
        self, module: Module, batch: int, frames: int, height: int, width: int, degree: int, text_tokens: int = 0
    ) -> float:
        """Of its slow link."""
        part = (batch, frames, height, width, text_tokens)
        return _true(module, part, degree, spanning=degree > 1) - _true(module, part, degree)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """What a run of one strategy has come to."""

    strategy: str
    before: float  # median relative error of predicted cascade seconds, with the wrong profile
    median: float  # and after the steps
    worst: float  # of nine in ten cascades
    plan_ratio: float  # seconds of its plans on the machine over those of plans made with the truth
    plan_before: float  # the same with the wrong profile
    plan_profiled: float  # the same with a measured profile, and speeds of workers known
    cascades: int


def run(
    steps: Annotated[int, typer.Option(help="Steps that the run learns from.")] = 200,
    unseen: Annotated[int, typer.Option(help="Steps after them, on which it is judged.")] = 20,
    budget: Annotated[float, typer.Option(help="Seconds of search per step.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of noise and items.")] = 0,
    strategy: Annotated[str, typer.Option(help="Measure this strategy alone.")] = "",
) -> None:
    """What a profile predicts, and a table of all strategies."""
    if not strategy:
        for where, spanning in (("on one node", False), ("over nodes", True)):
            told = predicted_by_profile(seed, spanning)
            print(
                f"after a profile, {told.cascades} cascades of unseen shapes or degrees {where}: predicted "
                f"{told.median:.1%} (median), {told.worst:.1%} (worst) off"
            )
        print()
    step = "step over that of the truth, before and after; by a measured profile"
    print(f"| strategy | error before | after, median and 90 % | {step} |")
    print("|---|---|---|---|")
    for name in [strategy] if strategy else STRATEGIES:
        found = learn_live(name, steps, unseen, budget, seed)
        print(
            f"| {name} | {found.before:.1%} | {found.median:.1%}, {found.worst:.1%} | {found.plan_before:.3f}, "
            f"{found.plan_ratio:.3f}; {found.plan_profiled:.3f} |",
            flush=True,
        )


def learn_live(
    strategy: str, steps: int, unseen: int, budget_s: float = 0.05, seed: int = 0, late: float = LATE
) -> Learned:
    """One run of `steps` from the wrong profile, judged on `unseen` further ones; `late` is the share of late ranks."""
    rng = np.random.default_rng(seed)
    equal = strategy in EQUAL_SPEEDS
    machine, workload = Machine(rng, late=late, slow=-1 if equal else SLOW_WORKER), np.random.default_rng(seed + 1)
    config = PlannerConfig(strategy=strategy, budget_s=budget_s, static_degree=DEGREES.get(strategy, 1), lookahead=0)
    planner, speeds = Planner(wrong_profile(), config), Speeds()
    names = [f"w{n}" for n in range(sum(NODES))]
    cluster = Cluster(nodes=NODES)
    count = ITEMS_OF.get(strategy, ITEMS)
    judged = [_items(workload, step, count) for step in range(steps, steps + unseen)]
    known = cluster if equal else _true_cluster()
    truth = _judge(Planner(true_profile(), config), judged, known, machine)
    measured = _judge(Planner(profiled(Machine(np.random.default_rng(seed))), config), judged, known, machine)
    before = _judge(Planner(wrong_profile(), config), judged, cluster, machine)
    for step in range(steps):
        items = _items(workload, step, count)
        assigned = planner.plan(step, [items], cluster, (), budget_s)
        reports, _ = machine.execute(assigned.cascades, items, step)
        spans = [span for report in reports for span in report.spans]
        planner.observe(spans, {item.id: item.text_tokens for item in items}, cluster)
        speeds.observe(reports, dict(zip(names, cluster.speed, strict=False)))
        cluster = cluster if equal else replace(cluster, speed=speeds.factors(names))
    after = _judge(planner, judged, cluster, machine)
    errors = sorted(after.errors)
    return Learned(
        strategy=strategy,
        before=statistics.median(before.errors),
        median=statistics.median(errors),
        worst=errors[int(0.9 * len(errors))],
        plan_ratio=after.seconds / truth.seconds,
        plan_before=before.seconds / truth.seconds,
        plan_profiled=measured.seconds / truth.seconds,
        cascades=len(errors),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """How far predicted seconds are off the true ones, relative."""

    median: float
    worst: float
    cascades: int


def predicted_by_profile(seed: int = 0, spanning: bool = False) -> Predicted:
    """Of cascades whose shape was not measured, some at degrees that were not, in bags on one node or over two."""
    machine = Machine(np.random.default_rng(seed))
    profile = profiled(machine)
    errors = []
    cascades = [("dit", clip, degree) for clip in UNSEEN_CLIPS for degree in UNSEEN_DEGREES[spanning]]
    if not spanning:
        cascades += [("vae", clip, 1) for clip in UNSEEN_CLIPS] + [("text", clip, 1) for clip in UNSEEN_TEXTS]
    for name, (frames, height, width, batch), degree in cascades:
        module = cast(Module, name)
        true = machine.normal(module, [(batch, frames, height, width, TEXT_TOKENS)], degree, spanning)
        shape = (module, batch, frames, height, width, degree, TEXT_TOKENS)
        found = profile.seconds(*shape)
        if spanning:
            found += profile.cross_node.fall(OVERLAP) * profile.penalty(*shape)
        errors.append(abs(found / true - 1.0))
    return Predicted(median=statistics.median(errors), worst=max(errors), cascades=len(errors))


def profiled(machine: Machine, repeats: int = 3) -> Profile:
    """What `heddle profile` measures of this machine: its points, each the median of some runs with the machine's
    noise, and its all-to-alls."""
    profile = wrong_profile()
    shapes = [
        ProfiledShape(batch=count, bucket=Bucket(frames, height, width), text_tokens=TEXT_TOKENS)
        for frames, height, width, batch in CLIPS
        for count in sorted({1, batch})
    ]

    def measured(seconds: float) -> float:
        return seconds * statistics.median(math.exp(machine.rng.normal(0, machine.noise)) for _ in range(repeats))

    inside, over = [k for k in PROFILED_DEGREES if k > 1], {k: 2 for k in PROFILED_DEGREES if k > 1}
    for degree in inside:
        for size in EXCHANGES:
            took = measured(machine.exchange(size * (degree - 1) / degree, degree))
            profile.exchanges += (ExchangePoint(workers=degree, num_bytes=size, seconds=took),)
    line = exchange_speed(profile.exchanges)
    assert line is not None, "two sizes were measured"
    profile.count_exchange(exchange_seconds(MODEL, line[1]))
    for point in points_of(shapes, inside, over):
        if point.module == "dit" or point.degree == 1:
            shape = point.shape
            part = (shape.batch, shape.bucket.frames, shape.bucket.height, shape.bucket.width, shape.text_tokens)
            took = measured(machine.normal(point.module, [part], point.degree, point.nodes > 1))
            if point.nodes > 1:
                profile.count_over_nodes([spanning_point(point, took)])
            else:
                profile.measure(point.key, took, text_tokens=shape.text_tokens)
    return profile


def wrong_profile() -> Profile:
    """What the run begins with: the FLOP model of another device."""
    return Profile.from_flops(
        MODEL,
        tflops=60.0,
        exchange_gbps=500.0,
        vae_flops_per_pixel=5e5,
        text_flops_per_token=3e8,
        launch_s=1e-5,
        degrees=(1, 2, 3, 4, 6, 12),
        device="another",
    )


def true_profile() -> Profile:
    """The machine's own costs."""
    base = wrong_profile()
    return TrueProfile(
        model="truth",
        models=base.models,
        num_heads=base.num_heads,
        degrees=base.degrees,
        geometry=base.geometry,
    )


def _true(module: Module, part: PartShape, degree: int, *, spanning: bool = False) -> float:
    return Machine(np.random.default_rng(0)).normal(module, [part], degree, spanning)


@dataclass(frozen=True, slots=True)
class _Judged:
    """Relative errors of predicted cascades, and seconds of the steps."""

    errors: list[float]
    seconds: float


def _judge(planner: Planner, steps: Sequence[list[Item]], cluster: Cluster, machine: Machine) -> _Judged:
    """Plans of these steps as they are predicted, beside what they take without noise and late ranks."""
    quiet = replace(machine, rng=np.random.default_rng(0), noise=0.0, late=0.0, absurd=0.0, _ran=Everything())
    errors, seconds = [], 0.0
    for number, items in enumerate(steps):
        assigned = planner.plan(number, [items], cluster, (), planner_budget(planner))
        reports, took = quiet.execute(assigned.cascades, items, number)
        seconds += took
        for report in reports:
            for span in report.spans:
                if span.bag[0] == int(report.worker[1:]) and span.work_s:
                    errors.append(abs((span.planned_end_s - span.planned_start_s) / span.work_s - 1.0))
    return _Judged(errors, seconds)


def planner_budget(planner: Planner) -> float:
    return planner._config.budget_s


class Everything(set[tuple[int, str, tuple[int, ...]]]):
    """Shapes that have all run before."""

    def __contains__(self, shape: object) -> bool:
        return True


def _true_cluster() -> Cluster:
    return Cluster(nodes=NODES, speed=tuple(SLOW_SPEED if w == SLOW_WORKER else 1.0 for w in range(sum(NODES))))


def _items(rng: np.random.Generator, step: int, count: int) -> list[Item]:
    chosen = [CLIPS[n] for n in rng.integers(0, len(CLIPS), count)]
    return [
        Item(id=f"s{step}.{n}", batch=batch, frames=frames, height=height, width=width, text_tokens=TEXT_TOKENS)
        for n, (frames, height, width, batch) in enumerate(chosen)
    ]


def _tokens(frames: int, height: int, width: int) -> int:
    return ((frames - 1) // 4 + 1) * (height // 16) * (width // 16)


def _report(worker: int, step: int, spans: tuple[Span, ...]) -> StepReport:
    return StepReport(
        worker=f"w{worker}",
        step=step,
        loss=0.0,
        weight=1.0,
        grad_norm=0.0,
        lr=0.0,
        applied=True,
        spans=spans,
        peak_memory_gib=0.0,
        rss_gib=0.0,
    )
