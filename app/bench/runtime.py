"""`heddle bench runtime`: does the runtime keep the plan's promise, and what does a plan gain on a real model?

(a) The controller, 16 worker processes and real process groups execute plans of the published 16-GPU workload, each
    cascade replaced by a wait of its predicted length: executed against planned makespan, gradient sum and update
    included, and the controller's cost per dispatched cascade. With --speed 10 the waits are ten times shorter.
(b) A tiny model on two workers of this machine, mixed buckets: seconds per step and idle share of `cascade` against
    `static`, taken in turns so that both see the same noise.
(m) With --memory-steps 500: resident sets and object-store use after 50, 250 and 498 short steps.
(h) With --host: memory that nodes take for the state of some 50 M weights, against what is asked of them.
Part (c), the bookkeeping of sequence parallelism per layer, is `heddle bench ulysses`.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer

from actors.messages import CascadeTask, SampleId
from actors.ray_calls import put
from actors.step import StepBatches
from actors.worker.encoding import Encoding
from actors.worker.executor import Executor
from actors.worker.handoff import EncodeResult
from actors.worker.loading import Modules
from actors.worker.measure import CascadeMeasure
from actors.worker.worker import Worker
from app.bench import host_memory, memory
from app.bench.lab import Lab
from app.bench.markdown import markdown_table
from app.bench.workload import ItemFeeder, published_set, scaled_profile
from app.settings.out_files import check_writable
from data.types import Batch
from ops.counted import counted
from ops.models.folders import resolve
from ops.models.load import build_dit
from ops.update.sync import FlatSync

if TYPE_CHECKING:
    from ray._private.node import Node


class TimedExecutor(Executor):
    """Waits where the real one computes: members of a bag meet, then wait for the planned length together."""

    def dit(
        self, task: CascadeTask, fetched: dict[tuple[str, SampleId], EncodeResult], fetch_s: float | None = None
    ) -> None:
        with self.cascade(task) as measure:
            _wait(task, measure)
        if self.groups is not None and self.groups.rank == task.bag[0]:  # the bag's samples count once
            self.work.add_weights(task.step, sum(sample.weight for sample in task.samples), 0.0)


class TimedEncoding(Encoding):
    """Encodes that wait as the cascades of `TimedExecutor` do."""

    def text(
        self, task: CascadeTask, captions: Sequence[str], pictures: Sequence[object] = (), ok: Sequence[bool] = ()
    ) -> list[EncodeResult]:
        return self._waited(task)

    def vae(self, task: CascadeTask, video: object, ok: Sequence[bool]) -> list[EncodeResult]:
        return self._waited(task)

    def _waited(self, task: CascadeTask) -> list[EncodeResult]:
        with self.executor.cascade(task) as measure:
            _wait(task, measure)
            count = len(task.samples)
            return self._deliver(task, [torch.zeros(1, 1)] * count, [True] * count)


def _wait(task: CascadeTask, measure: CascadeMeasure) -> None:
    measure.meet()
    time.sleep(task.planned_end_s - task.planned_start_s)


class TimedWorker(Worker):
    """A worker whose cascades are waits."""

    def _load(self) -> Executor:
        (model, geometry), train = resolve(self.settings.model), self.settings.train
        dit = build_dit(model.dit, train.seed)
        nothing: Any = SimpleNamespace()  # no encoder is asked for anything
        modules = Modules(config=model, geometry=geometry, dit=dit, vae=nothing, text=nothing)
        return TimedExecutor(modules, FlatSync(dit, train.optimizer, train.steps), train, self.device, self._phase)

    def _encoding(self) -> Encoding:
        return TimedEncoding(self.executor)


class WorkloadFeeder(ItemFeeder):
    """Hands out the items of a workload file; the pixels are one byte."""

    def batches(self, step: int) -> StepBatches:
        references = tuple(
            put(
                Batch(
                    item=i.id,
                    video=np.zeros((i.batch, 1, 1, 1, 3), np.uint8),
                    captions=[""] * i.batch,
                    ok=[True] * i.batch,
                    keys=[""] * i.batch,
                )
            )
            for i in self._steps[step]
        )
        return StepBatches(references=references, position=self.token(step + 1))


def run(
    workers: Annotated[int, typer.Option(help="Workers of part (a); the workload is made for 16.")] = 16,
    steps: Annotated[int, typer.Option(help="Steps of part (a); 0 leaves it out.")] = 10,
    speed: Annotated[float, typer.Option(help="Part (a) divides the predicted lengths by this.")] = 1.0,
    lookahead: Annotated[int, typer.Option(help="Steps of part (a) whose encodes may run early.")] = 1,
    real_steps: Annotated[int, typer.Option(help="Steps of each strategy in part (b); 0 leaves it out.")] = 40,
    memory_steps: Annotated[int, typer.Option(help="Steps of part (m); 0 leaves it out.")] = 0,
    host: Annotated[bool, typer.Option("--host", help="Part (h) too.")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON with all figures.")] = None,
) -> None:
    """Measure and print one table per part."""
    check_writable([out])
    logging.getLogger("actors").setLevel(logging.ERROR)
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder)) as lab:
        if steps:
            timed = _timed(lab, workers, steps, speed, lookahead)
            figures["timed"] = asdict(timed)
            print(_timed_table(timed), flush=True)
        if real_steps:
            real = _real(lab, real_steps)
            figures["real"] = {strategy: asdict(pace) for strategy, pace in real.items()}
            print(_real_table(real), flush=True)
        if memory_steps:
            found = memory.measure(lab, memory_steps)
            figures["memory"] = [asdict(use) for use in found]
            print(memory.table(found), flush=True)
        if host:
            taken = host_memory.measure(lab)
            figures["host"] = [asdict(one) for one in taken]
            print(host_memory.table(taken), flush=True)
    if out is not None:
        out.write_text(json.dumps(figures, indent=1))


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedSteps:
    """Part (a): executed beside planned steps, without the first, which waits for its encodes. Medians, but for means
    and the ratio of the sums."""

    workers: int
    steps: int
    executed_s: float
    planned_s: float
    executed_mean_s: float
    planned_mean_s: float
    ratio_median: float
    ratio_total: float
    dispatch_ms_per_call: float
    calls_per_step: float
    sync_ms: float


def _timed(lab: Lab, workers: int, steps: int, speed: float, lookahead: int) -> TimedSteps:
    """Part (a)."""
    from actors.feed.step_source import actor_factory

    nodes = [lab.add_node(workers=workers // 2) for _ in range(2)]
    drawn = published_set("A-16gpu")[0][:steps]
    items = [[replace(item, id=f"s{number}.{item.id}") for item in step] for number, step in enumerate(drawn)]
    config = lab.config(
        "timed",
        train={"steps": len(items)},
        workers={"min": workers, "max": workers, "wait_s": 600},
        snapshot={"enabled": False},
        planner={"budget_s": 0.2, "lookahead": lookahead, "split": False},
        model={"dit": {"num_layers": 1, "num_heads": 24, "head_dim": 2}},  # of whose weights only the sum is seen
    )
    run = lab.start(
        config,
        profile=scaled_profile(speed),
        worker_class=TimedWorker,
        feeder=actor_factory(WorkloadFeeder, items),
    )
    outcome = run.join(900)
    if outcome.code:
        raise RuntimeError(f"the timed run ended early: {outcome.reason}")
    for node in nodes:
        _remove(lab, node)
    measured = [m.step_s for m in run.metrics[1:]]
    planned = [plan.makespan_s + plan.update_s for plan in run.plans[1:]]  # what it promises of cascades and end
    return TimedSteps(
        workers=workers,
        steps=len(measured),
        executed_s=statistics.median(measured),
        planned_s=statistics.median(planned),
        executed_mean_s=statistics.fmean(measured),
        planned_mean_s=statistics.fmean(planned),
        ratio_median=statistics.median(a / b for a, b in zip(measured, planned)),
        ratio_total=sum(measured) / sum(planned),
        dispatch_ms_per_call=statistics.median(1e3 * m.dispatch_s / m.calls for m in run.metrics),
        calls_per_step=statistics.median(m.calls for m in run.metrics),
        sync_ms=1e3 * statistics.median(m.sync_s for m in run.metrics[1:]),
    )


def _remove(lab: Lab, node: Node) -> None:
    lab.cluster.remove_node(node, allow_graceful=True)
    lab.nodes.remove(node)


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyPace:
    """Part (b): seconds per step of one strategy, median and mean, and the median share of idle workers."""

    step_s: float
    mean_step_s: float
    idle: float


def _real(lab: Lab, steps: int) -> dict[str, StrategyPace]:
    """Part (b): two rounds of each strategy in turn."""
    node = lab.add_node(workers=2)
    seconds: dict[str, list[float]] = {"static": [], "cascade": []}
    idle: dict[str, list[float]] = {"static": [], "cascade": []}
    for turn in range(2):
        for strategy in seconds:
            run = lab.start(
                lab.config(
                    f"{strategy}{turn}",
                    train={"steps": steps},
                    workers={"min": 2, "max": 2},
                    planner={"strategy": strategy, "static_degree": 1, "budget_s": 0.02},
                    data=_MIXED,
                    model=_LARGER,
                )
            )
            outcome = run.join(900)
            if outcome.code:
                raise RuntimeError(f"{strategy} ended early: {outcome.reason}")
            warm = run.metrics[5:]
            seconds[strategy] += [m.step_s for m in warm]
            idle[strategy] += [m.idle_ratio for m in warm]
    _remove(lab, node)
    return {
        name: StrategyPace(
            step_s=statistics.median(seconds[name]),
            mean_step_s=statistics.fmean(seconds[name]),
            idle=statistics.median(idle[name]),
        )
        for name in seconds
    }


_MIXED = {
    "buckets": {"table": ["1x64x96", "9x64x96", "17x64x96", "33x64x96"], "short_videos": "image"},
    "batch": {"memory_tokens": 600, "text_tokens": 40, "max_batch": 8},
    "items_per_step": 5,
}
_LARGER = {"dit": {"num_layers": 4, "num_heads": 4, "head_dim": 32, "ffn_dim": 512}}


def _timed_table(timed: TimedSteps) -> str:
    rows = [
        ("executed / planned makespan, median of steps", f"{timed.ratio_median:.3f}", "<= 1.05"),
        ("executed / planned, sum of all steps", f"{timed.ratio_total:.3f}", ""),
        ("executed seconds per step, median and mean", f"{timed.executed_s:.2f}, {timed.executed_mean_s:.2f}", ""),
        ("planned seconds per step, median and mean", f"{timed.planned_s:.2f}, {timed.planned_mean_s:.2f}", ""),
        (
            f"dispatch per call ({timed.calls_per_step:.0f} calls a step)",
            f"{timed.dispatch_ms_per_call:.2f} ms",
            "<= 3 ms",
        ),
        ("gradient sum and update at the end of a step", f"{timed.sync_ms:.1f} ms", ""),
    ]
    title = f"{counted(timed.workers, 'worker')}, {timed.steps} steps of timed waits"
    return markdown_table((title, "measured", "must"), rows)


def _real_table(real: Mapping[str, StrategyPace]) -> str:
    static, cascade = real["static"], real["cascade"]
    seconds = f"{cascade.step_s / static.step_s:.2f} ({cascade.step_s:.2f} / {static.step_s:.2f} s)"
    rows = [
        ("cascade / static, seconds per step", seconds, "< 1"),
        ("idle share, cascade / static", f"{cascade.idle:.0%} / {static.idle:.0%}", ""),
    ]
    return markdown_table(("tiny model, 2 workers, mixed buckets", "measured", "must"), rows)
