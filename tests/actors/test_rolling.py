"""Step after step as the runner does it: every DiT cascade finds the encode results it needs, early ones included."""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.config import WorkersConfig
from actors.outcome import silent
from actors.plan.costs.profile import Profile
from actors.plan.schedule.check import check
from actors.plan.schedule.problem import PlanOptions
from actors.plan.types import Cascade, Cluster, Item, Part, StepPlan
from actors.planning.make_plan import make_plan, rolling_cut
from actors.run.asides import AsideTurns, NoAsides
from actors.run.dispatch import Holdings, calls_of, end_of
from actors.run.steps import StepRunner, early_encodes
from actors.run.waits import StepWaits
from actors.step import Seat, StepAssignment, StepItems
from ops.geometry import Geometry
from ops.models.config import TextConfig, VAEConfig
from ops.models.wan.config import WanConfig
from ops.spatial_temporal.choice import WHOLE
from tests.actors.fakes import Handle, step_items
from tests.long import in_default_run

GEOMETRY = Geometry()
WORKER: Any = Handle(
    **dict.fromkeys(
        ("encode_text", "encode_vae", "dit", "finish_step", "published", "outlasted"), lambda *given: object()
    )
)
SHAPES = ((1, 64, 96), (5, 64, 64), (17, 64, 96), (33, 64, 96))


def items_of(step: int, seed: int) -> list[Item]:
    rng = np.random.default_rng([step, seed])
    return [
        Item(
            id=f"s{step}.{n}",
            batch=int(rng.integers(1, 9)),
            text_tokens=30,
            **dict(zip(("frames", "height", "width"), SHAPES[rng.integers(0, 4)], strict=True)),
        )
        for n in range(6)
    ]


@pytest.mark.parametrize(
    ("strategy", "nodes"),
    in_default_run(
        [("cascade", (2, 2)), ("longest_first", (2,)), ("static", (2, 2)), ("knapsack", (3,))],
        of=product(["cascade", "longest_first", "static", "knapsack"], [(2,), (3,), (2, 2)]),
    ),
)
def test_twenty_rolling_steps_never_miss_an_encode_result(strategy: str, nodes: tuple[int, ...]) -> None:
    profile = Profile.from_flops(WanConfig(), VAEConfig(), TextConfig(), GEOMETRY)
    options = PlanOptions(strategy=strategy, budget_s=0.01)
    holdings, done, early = Holdings(), [], 0
    for step in range(20):
        window = [items_of(step, len(nodes)), items_of(step + 1, len(nodes))]
        plan = make_plan(window, profile, Cluster(nodes=nodes), options, first_step=step, done=done)
        check(plan, window, profile, Cluster(nodes=nodes), done=done)
        cascades = rolling_cut(plan)
        samples = {
            s: step_items(
                s,
                [(i.id, (i.frames, i.height, i.width), [f"{s}/{i.id}/{n}" for n in range(i.batch)]) for i in items],
                GEOMETRY,
                "sample",
            )
            for s, items in zip((step, step + 1), window, strict=True)
        }
        calls = calls_of(cascades, samples, 1, step, holdings)
        trained = sorted(
            s.id for c in {c.task.cascade: c for c in calls if c.task.module == "dit"}.values() for s in c.task.samples
        )
        assert trained == sorted(s.id for of in samples[step].items.values() for s in of.samples)
        ahead = [c for c in cascades if c.step > step]
        early += len(ahead)
        done = [one for c in ahead for one in early_encodes(c, end_of(cascades, step))]
        holdings.drop_before(step + 1)
    assert early > 0 or strategy != "cascade", "the cascade strategy never used a gap"


def samples_of(step: int, seed: int) -> StepItems:
    shapes = [(i.id, (i.frames, i.height, i.width), ["k"] * i.batch) for i in items_of(step, seed)]
    return step_items(step, shapes, GEOMETRY, "sample")


class Source:
    """Steps without pixels."""

    def items(self, step: int) -> Any:
        return tuple(items_of(step, 1))

    def data(self, step: int) -> Any:
        items = samples_of(step, 1)
        return SimpleNamespace(items=items, cached={}, batches=dict.fromkeys(items.items))

    def request(self, step: int) -> None:
        pass


class Planning:
    """Encodes as far ahead as it is shown, and says no word about what is done already; all that it has given out."""

    def __init__(self) -> None:
        self.given: Counter[tuple[str, str]] = Counter()

    def plan(self, step: int, window: Any, cluster: Cluster, done: Any, budget_s: float) -> StepAssignment:
        known = {(one.module, one.item) for one in done}
        cascades = []
        for ahead, items in enumerate(window):
            modules = ["text", "vae", "dit"] if ahead == 0 else ["text", "vae"]
            for number, (item, module) in enumerate((item, module) for item in items for module in modules):
                if (module, item.id) not in known:
                    part = Part(item=item.id, first=0, count=item.batch)
                    cascades.append(Cascade(id=f"{item.id}/{module}/0", module=module, step=step + ahead, parts=(part,),
                                            degree=1, workers=(number % 3,), start_s=0, end_s=1))  # fmt: skip
        cascades.sort(key=lambda c: (c.module == "dit", c.step))
        self.given.update((c.module, c.item) for c in cascades)
        plan = StepPlan(step=step, cascades=(), makespan_s=1, lower_bound_s=1, planning_s=0, idle_ratio=0)
        return StepAssignment(step=plan, cascades=tuple(cascades), planning_s=0.0)

    def request(self, *question: Any) -> None:
        pass


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_what_is_encoded_steps_ahead_is_encoded_once_and_found(lookahead: int) -> None:
    planner = Planning()
    runner = StepRunner(
        generation=1,
        world=tuple(Seat(name=f"w{n}", node="n", handle=WORKER) for n in range(3)),
        cluster=Cluster(nodes=(3,)),
        source=Source(),  # type: ignore[arg-type]
        planner=planner,  # type: ignore[arg-type]
        budget_s=0.01,
        lookahead=lookahead,
        exports=lambda step: False,
        next_step=0,
        last_step=100,
        forming=[],
        waits=StepWaits(config=WorkersConfig()),
        asides=AsideTurns(NoAsides(), silent),
    )
    for _ in range(12):
        running = runner.dispatch()
        assert all(call.reference is not None for call in running.calls)
    assert ("vae", f"s{11 + lookahead}.0") in planner.given and set(planner.given.values()) == {1}


class PlanningAhead:
    """Plans a DiT of one second a step, and begins the encodes of the next step in its second half."""

    def __init__(self) -> None:
        self.told: list[list[float]] = []

    def plan(self, step: int, window: Any, cluster: Cluster, done: Any, budget_s: float) -> StepAssignment:
        self.told.append([one.end_s for one in done])
        known = {(one.module, one.item) for one in done}
        cascades = []
        for ahead, items in enumerate(window[:2]):
            for module in ("text", "vae", "dit")[: 3 - ahead]:
                if (module, items[0].id) not in known:
                    part = Part(item=items[0].id, first=0, count=items[0].batch)
                    # the VAE of the next step outlasts this one by 0.25 s, its text encode ends in time
                    times = (0.6, 1.25) if ahead and module == "vae" else (0.0, 1.0)
                    worker = 1 if module == "vae" else 0
                    cascades.append(Cascade(id=f"{items[0].id}/{module}/0", module=module, step=step + ahead,
                                            parts=(part,), degree=1, workers=(worker,), start_s=times[0],
                                            end_s=times[1]))  # fmt: skip
        cascades.sort(key=lambda c: (c.module == "dit", c.step))
        plan = StepPlan(step=step, cascades=(), makespan_s=1, lower_bound_s=1, planning_s=0, idle_ratio=0)
        return StepAssignment(step=plan, cascades=tuple(cascades), planning_s=0.0, rates=WHOLE)

    def request(self, *question: Any) -> None:
        pass


def test_the_end_of_a_step_stands_before_that_of_an_encode_that_outlasts_it() -> None:
    asked: list[tuple[int, str, Any]] = []
    fetched: dict[str, tuple[Any, ...]] = {}  # by DiT cascade: the results that it gets as arguments

    def handle(rank: int) -> Any:
        def answer(method: str) -> Any:
            def called(task: Any, *rest: Any) -> tuple[int, str, str]:
                asked.append((rank, method, task))
                if method == "dit":
                    fetched[task.cascade] = rest
                return rank, method, task.cascade if method != "finish_step" else ""

            return called

        return Handle(**{m: answer(m) for m in ("encode_text", "encode_vae", "dit", "finish_step", "outlasted")})

    planner = PlanningAhead()
    runner = StepRunner(
        generation=1,
        world=tuple(Seat(name=f"w{n}", node="n", handle=handle(n)) for n in range(2)),
        cluster=Cluster(nodes=(2,)),
        source=Source(),  # type: ignore[arg-type]
        planner=planner,  # type: ignore[arg-type]
        budget_s=0.01,
        lookahead=1,
        exports=lambda step: False,
        next_step=0,
        last_step=100,
        forming=[],
        waits=StepWaits(config=WorkersConfig()),
        asides=AsideTurns(NoAsides(), silent),
    )
    first, second = runner.dispatch(), runner.dispatch()
    assert {task.rates for _, method, task in asked if method == "dit"} == {WHOLE}, "all ranks slice by the plan's"
    late = "s1.0/vae/0"
    of_1 = [(method, getattr(task, "cascade", f"finish {task.step}")) for rank, method, task in asked if rank == 1]
    begun, ended = of_1.index(("encode_vae", late)), of_1.index(("outlasted", late))
    assert begun < of_1.index(("finish_step", "finish 0")) < ended < of_1.index(("finish_step", "finish 1"))
    finishes = {(rank, task.step): task.cascades for rank, method, task in asked if method == "finish_step"}
    assert late not in finishes[1, 0] and late in finishes[1, 1]
    (end,) = [task for rank, method, task in asked if method == "outlasted" and task.cascade == late]
    assert (end.planned_start_s, end.planned_end_s) == pytest.approx((-0.4, 0.25))
    assert planner.told[1] == pytest.approx([0.0, 0.25]), "the next plan knows until when its worker is busy"
    assert (1, "outlasted", late) in fetched["s1.0/dit/0"], "what others fetch comes from its end"
    assert (1, "encode_vae", late) not in fetched["s1.0/dit/0"]
    refs = {call.reference[1:] for call in second.calls}  # type: ignore[index]
    assert {("encode_vae", late), ("outlasted", late)} <= refs and ("outlasted", late) not in {
        c.reference[1:] for c in first.calls
    }  # type: ignore[index]
