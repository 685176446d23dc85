"""`heddle bench truth`: does a run learn what its cascades cost, and do its plans follow?

A machine whose costs Heddle does not know (`app.bench.truth_machine`): its laws are not those that costs are fitted to.
It has bags of VAE and text, handoffs, an end of a step and a rest, a slow link between two nodes, one slow GPU, noise,
ranks that come late, first runs of a shape that compile, and now and then a timing that is NaN or absurd. A run begins
with a *wrong* profile (another device's FLOPs, a network of another speed), plans and executes 200 steps on this
machine, and learns from the spans that its workers would report. Then, on steps it has not seen: how far predicted
seconds of cascades and of steps are off the true ones, and how much longer its plans take than plans made with the
truth.

Before that: how far off is a profile of this machine, measured at some shapes and degrees, at others?

Planner, observations, speeds and remainders are those of a run, points, their order and their measuring those of
`heddle profile`; only workers and bags are simulated, and a search ends with its counted work, not by the clock.
"""

from __future__ import annotations

import io
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
import typer

from actors.config import PlannerConfig
from actors.plan.costs.handoff import Handoff, HandoffPoint
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.remainder import RemainderPoint
from actors.plan.costs.spanning import OVERLAP
from actors.plan.costs.update import UpdateCosts, UpdatePoint
from actors.plan.registry import STRATEGIES
from actors.plan.schedule.problem import PlanOptions
from actors.plan.types import Cluster, Item, Module
from actors.planning.actor import Planner
from actors.run.speeds import Speeds
from actors.run.step_pace import remainder_of_step
from app.bench.truth_machine import (
    LATE,
    LAUNCHES,
    MODEL,
    NODES,
    SLOW_SPEED,
    SLOW_WORKER,
    TILING,
    EveryShape,
    Machine,
)
from app.device.bag import MeasuredBag
from app.device.measuring import Measuring
from app.device.over_nodes import HANDOFFS
from app.device.points import PointTimes, ProfiledShape
from app.device.wanted import by_information, figures_of, points_of
from app.settings.config import RunConfig
from data.types import Bucket

if TYPE_CHECKING:
    from ops.spatial_temporal.choice import SliceRates

CLIPS = ((1, 480, 832, 8), (17, 480, 832, 3), (33, 480, 832, 2), (81, 480, 832, 1), (33, 720, 1280, 1))
TEXT_TOKENS = 128
PROFILED_DEGREES = (1, 2, 4)
ENCODER_DEGREES = (1, 2, 4)
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
DEGREES = {"static": 2}
ITEMS_OF = {"exact": 4}  # of a step, where that of the others takes a proof its whole time: 15 s and more of a core


class CountedPlanner(Planner):
    """A planner whose searches end with their counted work: this machine's load changes no figure."""

    def options(self, budget_s: float) -> PlanOptions:
        return replace(super().options(budget_s), counted=True)


@dataclass(kw_only=True, slots=True)
class TrueProfile(Profile):
    """Plans with it are made with the truth, that of this machine."""

    machine: Machine

    def price(self, module: Module, part: Samples, degree: int) -> float:
        """Seconds on the machine."""
        return self.machine.normal(module, [part], degree)

    def penalty(self, module: Module, part: Samples, degree: int) -> float:
        """Seconds that its slow link adds."""
        return self.penalty_together(module, [part], degree)

    def together(self, module: Module, parts: Sequence[Samples], degree: int) -> float:
        """Seconds of a pack on the machine."""
        return self.machine.normal(module, parts, degree)

    def penalty_together(self, module: Module, parts: Sequence[Samples], degree: int) -> float:
        """Seconds that its slow link adds to a pack."""
        return self.machine.normal(module, parts, degree, degree > 1) - self.machine.normal(module, parts, degree)

    def once(self, module: Module, part: Samples, degree: int) -> float:
        """Seconds of the machine's launches and of exchanges that send nothing."""
        return self.machine.once(degree) if module == "dit" else 0.0

    def penalty_once(self, module: Module, part: Samples, degree: int) -> float:
        """Seconds that its slow link adds to exchanges that send nothing."""
        return self.machine.once(degree, degree > 1) - self.machine.once(degree) if module == "dit" else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyResult:
    """What a run of one strategy has come to."""

    strategy: str
    before: float  # median relative error of predicted cascade seconds, with the wrong profile
    median: float  # the same after the steps
    worst: float  # of nine in ten cascades
    step_ratio: float  # predicted over taken seconds of a step, end and rest included: median of the last quarter
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
    launches: Annotated[float, typer.Option(help="Seconds of a training cascade before it computes.")] = LAUNCHES,
) -> None:
    """What a profile predicts, and a table of all strategies."""
    if not strategy:
        for where, spanning in (("on one node", False), ("over nodes", True)):
            told = predicted_by_profile(seed, spanning, launches)
            print(
                f"after a profile, {told.cascades} cascades of unseen shapes or degrees {where}: predicted "
                f"{told.median:.1%} (median), {told.worst:.1%} (worst) off"
            )
        print()
    step = "step over that of the truth, before and after; by a measured profile"
    print(f"| strategy | error before | after, median and 90 % | step predicted / taken | {step} |")
    print("|---|---|---|---|---|")
    for name in [strategy] if strategy else STRATEGIES:
        found = learn_live(name, steps, unseen, budget, seed, launches_s=launches)
        print(
            f"| {name} | {found.before:.1%} | {found.median:.1%}, {found.worst:.1%} | {found.step_ratio:.3f} | "
            f"{found.plan_before:.3f}, "
            f"{found.plan_ratio:.3f}; {found.plan_profiled:.3f} |",
            flush=True,
        )


def learn_live(
    strategy: str,
    steps: int,
    unseen: int,
    budget_s: float = 0.05,
    seed: int = 0,
    late: float = LATE,
    launches_s: float = LAUNCHES,
) -> StrategyResult:
    """One run of `steps` from the wrong profile, judged on `unseen` further ones; `late` is the share of late ranks,
    `launches_s` what a training cascade takes however little it computes."""
    rng = np.random.default_rng(seed)
    machine = Machine(rng, late=late, launches_s=launches_s)
    workload = np.random.default_rng(seed + 1)
    config = PlannerConfig(strategy=strategy, budget_s=budget_s, static_degree=DEGREES.get(strategy, 1), lookahead=0)
    planner, speeds = CountedPlanner(wrong_profile(), config), Speeds()
    names = [f"w{n}" for n in range(sum(NODES))]
    cluster = Cluster(nodes=NODES)
    count = ITEMS_OF.get(strategy, ITEMS)
    judged = [_items(workload, step, count) for step in range(steps, steps + unseen)]
    known = _true_cluster()
    truth = _judge(CountedPlanner(true_profile(launches_s), config), judged, known, machine)
    measured = _judge(CountedPlanner(profiled(_machine_of(seed, launches_s)), config), judged, known, machine)
    before = _judge(CountedPlanner(wrong_profile(), config), judged, cluster, machine)
    ratios = []
    for step in range(steps):
        items = _items(workload, step, count)
        assigned = planner.plan(step, [items], cluster, (), budget_s)
        reports, took = machine.execute(assigned.cascades, items, step)
        spans = [span for report in reports for span in report.spans]
        texts = {item.id: item.text_tokens for item in items}
        ratios.append(assigned.step.seconds / took)
        rest_s = remainder_of_step(spans, assigned.step.makespan_s, took)
        planner.observe(spans, texts, cluster, 0, rest_s)
        speeds.observe(reports, dict(zip(names, cluster.speed, strict=False)))
        cluster = replace(cluster, speed=speeds.factors(names))
    after = _judge(planner, judged, cluster, machine)
    errors = sorted(after.errors)
    return StrategyResult(
        strategy=strategy,
        before=statistics.median(before.errors),
        median=statistics.median(errors),
        worst=errors[int(0.9 * len(errors))],
        step_ratio=statistics.median(ratios[-max(1, steps // 4) :]),
        plan_ratio=after.seconds / truth.seconds,
        plan_before=before.seconds / truth.seconds,
        plan_profiled=measured.seconds / truth.seconds,
        cascades=len(errors),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Misprediction:
    """How far predicted seconds are off the true ones, relative."""

    median: float
    worst: float
    cascades: int


def predicted_by_profile(seed: int = 0, spanning: bool = False, launches_s: float = LAUNCHES) -> Misprediction:
    """Predictions for cascades whose shape was not measured, some at degrees that were not, in bags on one node or over
    two."""
    machine = _machine_of(seed, launches_s)
    profile = profiled(machine)
    errors = []
    cascades = [("dit", clip, degree) for clip in UNSEEN_CLIPS for degree in UNSEEN_DEGREES[spanning]]
    if not spanning:
        cascades += [("vae", clip, degree) for clip in UNSEEN_CLIPS for degree in UNSEEN_DEGREES[False]]
        cascades += [("text", clip, degree) for clip in UNSEEN_TEXTS for degree in (1, 2)]
    for name, (frames, height, width, batch), degree in cascades:
        module = cast(Module, name)
        part = Samples.of(batch, (frames, height, width), TEXT_TOKENS)
        true = machine.normal(module, [part], degree, spanning)
        found = profile.seconds(module, part, degree)
        if spanning:
            found += profile.cross_node.fall(OVERLAP) * profile.penalty(module, part, degree)
        errors.append(abs(found / true - 1.0))
    return Misprediction(median=statistics.median(errors), worst=max(errors), cascades=len(errors))


class HiddenBench:
    """What `heddle profile` measures without a bag, on the hidden machine (`app.device.measuring.SoloBench`)."""

    model = SimpleNamespace(dit=MODEL)
    device = SimpleNamespace(type="cpu")

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def measure(
        self, module: Module, shape: ProfiledShape, repeats: int, rates: SliceRates | None = None
    ) -> PointTimes:
        return _timed(self._machine, module, shape, repeats, 1, False)

    def update(self, repeats: int) -> PointTimes:
        return PointTimes(
            seconds=tuple(self._machine.measured(self._machine.end_of_step(1, False)) for _ in range(repeats))
        )

    def rest(self) -> None: ...


class HiddenBag(MeasuredBag):
    """A bag of the hidden machine."""

    def __init__(self, machine: Machine, degree: int, nodes: int) -> None:
        super().__init__(degree)
        self._machine, self.nodes = machine, nodes

    def measure(
        self, module: Module, shape: ProfiledShape, repeats: int, rates: SliceRates | None = None
    ) -> PointTimes:
        return _timed(self._machine, module, shape, repeats, self.degree, self.nodes > 1)

    def update(self, repeats: int) -> PointTimes:
        took = self._machine.end_of_step(self.degree, self.nodes > 1)
        return PointTimes(seconds=tuple(self._machine.measured(took) for _ in range(repeats)))

    def exchange(self, num_bytes: int, repeats: int = 5) -> float:
        sent = num_bytes * (self.degree - 1) / self.degree
        took = self._machine.exchange(sent, self.degree, self.nodes > 1)
        return statistics.median(self._machine.measured(took) for _ in range(repeats))

    def close(self) -> None: ...


class HiddenBags:
    """Bags and handoffs of the hidden machine (`app.device.measuring.BagSource`)."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def bag(self, degree: int, nodes: int) -> MeasuredBag:
        return HiddenBag(self._machine, degree, nodes)

    def handoffs(self, nodes: int, repeats: int) -> list[HandoffPoint]:
        return [
            HandoffPoint(
                num_bytes=size, seconds=self._machine.measured(self._machine.handoff(size, nodes > 1)), nodes=nodes
            )
            for size in HANDOFFS
            for _ in range(repeats)
        ]


def _timed(
    machine: Machine, module: Module, shape: ProfiledShape, repeats: int, degree: int, spanning: bool
) -> PointTimes:
    took = machine.normal(module, [shape.samples], degree, spanning)
    return PointTimes(seconds=tuple(machine.measured(took) for _ in range(repeats)))


def profiled(machine: Machine) -> Profile:
    """What `heddle profile` makes of this machine: its points in its order, each the median of some runs with the
    machine's noise, ends of steps, all-to-alls and handoffs."""
    profile = wrong_profile()
    shapes = [
        ProfiledShape(batch=count, bucket=Bucket(frames, height, width), text_tokens=TEXT_TOKENS)
        for frames, height, width, batch in CLIPS
        for count in sorted({1, batch})
    ]
    inside = [degree for degree in PROFILED_DEGREES if degree > 1]
    over = dict.fromkeys(inside, len(NODES))
    figures = figures_of(RunConfig.from_yaml("run: {name: truth}"), inside, over, (1, len(NODES)))
    points = by_information(points_of(shapes, inside, over), figures)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        alone = cast(Any, HiddenBench(machine))  # its device and its model are no more than what is asked of them
        Measuring(alone, HiddenBags(machine), profile, Path(folder) / "profile.json", repeats=3).run(points, 0.0)
    return profile


def wrong_profile() -> Profile:
    """What the run begins with: the FLOP model of another device."""
    profile = Profile.from_flops(
        MODEL,
        tiling=TILING,
        tflops=60.0,
        exchange_gbps=500.0,
        vae_flops_per_pixel=5e5,
        text_flops_per_token=3e8,
        launch_s=1e-5,
        degrees=(1, 2, 3, 4, 6, 12),
        device="another",
    )
    profile.degrees.update(vae=ENCODER_DEGREES, text=ENCODER_DEGREES)
    return profile


def true_profile(launches_s: float = LAUNCHES) -> Profile:
    """The machine's own costs. Handoffs between its nodes take longer than inside one, which no profile knows: theirs
    is the mean."""
    base, machine = wrong_profile(), _machine_of(0, launches_s)
    workers, nodes = sum(NODES), len(NODES)
    end = UpdatePoint(workers=workers, nodes=nodes, seconds=machine.end_of_step(workers, nodes > 1))
    rest = RemainderPoint(workers=workers, nodes=nodes, seconds=machine.rest_of_step(3 * ITEMS // workers))
    small, large = ((machine.handoff(size, False) + machine.handoff(size, True)) / 2 for size in (0.0, 2.0**30))
    return TrueProfile(
        machine=machine,
        model="truth",
        models=base.models,
        num_heads=base.num_heads,
        degrees=base.degrees,
        geometry=base.geometry,
        tiling=TILING,
        handoff=Handoff(latency_s=small, gib_per_s=1.0 / (large - small)),
        update=UpdateCosts(points=(end,)),
        remainders=(rest,),
    )


def _machine_of(seed: int, launches_s: float) -> Machine:
    return Machine(np.random.default_rng(seed), launches_s=launches_s)


@dataclass(frozen=True, slots=True)
class _Judgement:
    """Relative errors of predicted cascades, and seconds of the steps."""

    errors: list[float]
    seconds: float


def _judge(planner: Planner, steps: Sequence[list[Item]], cluster: Cluster, machine: Machine) -> _Judgement:
    """Plans of these steps as they are predicted, beside what they take without noise and late ranks."""
    quiet = replace(machine, rng=np.random.default_rng(0), noise=0.0, late=0.0, absurd=0.0, ran=EveryShape())
    errors, seconds = [], 0.0
    for number, items in enumerate(steps):
        assigned = planner.plan(number, [items], cluster, (), planner_budget(planner))
        reports, took = quiet.execute(assigned.cascades, items, number)
        seconds += took
        for report in reports:
            for span in report.spans:
                if span.bag and span.bag[0] == int(report.worker[1:]) and span.work_s:
                    errors.append(abs((span.planned_end_s - span.planned_start_s) / span.work_s - 1.0))
    return _Judgement(errors, seconds)


def planner_budget(planner: Planner) -> float:
    return planner._config.budget_s


def _true_cluster() -> Cluster:
    return Cluster(nodes=NODES, speed=tuple(SLOW_SPEED if w == SLOW_WORKER else 1.0 for w in range(sum(NODES))))


def _items(rng: np.random.Generator, step: int, count: int) -> list[Item]:
    chosen = [CLIPS[n] for n in rng.integers(0, len(CLIPS), count)]
    return [
        Item(id=f"s{step}.{n}", batch=batch, frames=frames, height=height, width=width, text_tokens=TEXT_TOKENS)
        for n, (frames, height, width, batch) in enumerate(chosen)
    ]
