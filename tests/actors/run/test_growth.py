"""What the controller does in a step grows no faster than the step: counted in objects and calls, not in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.config import WorkersConfig
from actors.messages import Piece, Span, StepReport
from actors.outcome import silent
from actors.plan.costs.flops import DiTWork
from actors.plan.types import Cascade, Cluster, Module, Part, StepPlan
from actors.run.asides import AsideTurns, NoAsides
from actors.run.communicators import Communicators
from actors.run.dispatch import Holdings, calls_of
from actors.run.step_metrics import StepFacts, step_metrics
from actors.run.steps import StepRunner
from actors.run.waits import StepWaits
from actors.step import Seat
from ops.geometry import Geometry
from ops.models.base.flops import joint_flops
from ops.waiting import Patience
from tests.actors.fakes import Handle, step_items

WORKERS = 64
IMAGE = (1, 64, 96)


def cascade(module: Module, workers: tuple[int, ...], item: str = "s0.0") -> Cascade:
    part = Part(item=item, first=0, count=2)
    return Cascade(id=f"{item}/{module}/0", module=module, step=0, parts=(part,), degree=len(workers), workers=workers,
                   start_s=0.0, end_s=1.0)  # fmt: skip


def report(worker: str, *spans: Span) -> StepReport:
    return StepReport(worker=worker, step=0, loss=1.0, weight=1.0, grad_norm=1.0, lr=1e-4, applied=True, spans=spans,
                      peak_memory_gib=0.0, rss_gib=0.0)  # fmt: skip


def test_a_dispatch_makes_a_task_per_bag_and_another_only_for_members_that_do_something_else() -> None:
    everybody = tuple(range(WORKERS))
    plan = [cascade("text", (0,)), cascade("vae", everybody), cascade("dit", everybody)]
    samples = step_items(0, [("s0.0", IMAGE, ["a", "b"])], Geometry(), "sample")
    patience = Patience(limit_s=7.0, why="a test")
    calls = calls_of(plan, {0: samples}, 1, 0, Holdings(), patience=patience)
    made = {id(call.task): call.task for call in calls}
    assert len(calls) == 1 + 2 * WORKERS and len(made) == 4
    assert [call.rank for call in calls if call.task.keep] == [0, 0], "the VAE's results stay on one of the ranks"
    assert {task.patience for task in made.values()} == {patience}


def test_a_step_of_many_workers_is_taken_by_few_questions_to_ray_and_no_answer_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[str]] = []
    ready = WORKERS // 2

    def get(references: list[str]) -> list[Any]:
        asked.append(references)
        return [(report(name.removeprefix("end ")), None) if name.startswith("end") else None for name in references]

    def wait(references: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        return references[:ready], references[ready:]

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    world = tuple(Seat(name=f"w{n}", node="n", handle=Handle()) for n in range(WORKERS))  # type: ignore[arg-type]
    runner = StepRunner(generation=1, world=world, cluster=Cluster(nodes=(WORKERS,)), source=None, planner=None,  # type: ignore[arg-type]
                        budget_s=0.0, lookahead=1, exports=lambda step: False, next_step=1, last_step=9, forming=[],
                        waits=StepWaits(config=WorkersConfig()), asides=AsideTurns(NoAsides(), silent))  # fmt: skip
    calls = [SimpleNamespace(reference=f"dit {n}", module="dit", worker=f"w{n}", name="dit") for n in range(WORKERS)]
    ends: Any = {f"end w{n}": n for n in range(WORKERS)}
    dits = {one.reference: one for one in calls}
    running = SimpleNamespace(step=0, finishes=ends, answers={}, letters={}, heard=set(), calls=calls, open_dits=dits)
    runner.running = [running]  # type: ignore[list-item]
    assert runner.collect(0.0) is None and runner.collect(0.0) is None
    ready = WORKERS
    done = runner.collect(0.0)
    assert done is not None and [one.worker for one in done.reports] == [seat.name for seat in world]
    everything = [name for references in asked for name in references]
    assert len(everything) == len(set(everything)) == 2 * WORKERS and len(asked) <= 5


def test_the_bags_of_a_worker_are_not_searched_among_those_of_the_run() -> None:
    class Bag(tuple[int, ...]):
        searched = 0

        def __contains__(self, rank: object) -> bool:
            Bag.searched += 1
            return super().__contains__(rank)

    account = Communicators(0)
    pairs = [Bag((a, b)) for a in range(WORKERS) for b in range(a + 1, WORKERS)]
    for at in range(0, len(pairs), 16):
        account.step(pairs[at : at + 16])
    assert account.peers(5) == account.bags(5) == account.most_seen == WORKERS - 1
    assert Bag.searched == 0


def test_metrics_count_a_sample_once_and_not_for_every_worker_of_its_bag() -> None:
    counted: list[tuple[int, ...]] = []

    class Counting(DiTWork):
        def model_tflop(self, samples: int, tokens: int, text: int = 0, frames: int = 1) -> float:
            counted.append((tokens, text, frames))
            return super().model_tflop(samples, tokens, text, frames)

    pieces = tuple(Piece(item=f"s0.{n}", bucket=IMAGE, batch=2) for n in range(3))
    span = Span(name="", module="dit", cascade="c", step=0, start=0.0, end=1.0, degree=WORKERS, pieces=pieces)
    plan = StepPlan(step=0, cascades=(), makespan_s=1.0, lower_bound_s=1.0, planning_s=0.0, idle_ratio=0.0)
    facts = StepFacts(step=0, generation=1, plan=plan, planning_s=0.0, step_s=1.0, data_wait_s=0.0, finished_at=0.0,
                      num_samples=6, num_tokens=144, dispatch_s=0.0, num_calls=WORKERS)  # fmt: skip
    work = Counting(forward=joint_flops(1, 8, 32), recomputes=True)
    found = step_metrics(facts, [report(f"w{n}", span) for n in range(WORKERS)], Geometry(), work)
    assert found.tokens == 6 * 24 and len(found.tflops_by_worker) == WORKERS
    assert len(counted) <= 3 * len(pieces)
