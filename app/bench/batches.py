"""`heddle bench batches`: what the sizes of batches are worth, and what it is worth that they follow measured costs.

Open-Sora 2.0's stage-2 buckets (from one 256px picture to 129 frames of 768px, samples drawn evenly over them), one
batch per worker and step, and a barrier: AdaptiveLoad's setting. The machine is that of `heddle bench truth`, whose
costs Heddle is not told; a run begins with a wrong profile of it. Its kernels are compiled before and no worker comes
late, so that sizes alone differ. Four ways to size batches, all in one run:

equal tokens         as many samples as memory holds, B = M_mem / S
dual constraint      B = min(M_mem / S, M_comp / S^p), M_comp and p from a fit to the profile (`data.batch: auto`)
with re-sizing       the same, and `data.batch.recalibrate: on`: fitted again to what the run measures
true costs           the dual constraint, fitted to the machine's own costs: what re-sizing may come to

Order of the data, limits, planner, observations and decisions are those of a run; only the workers are simulated.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import typer

from actors.config import PlannerConfig
from actors.outcome import Events
from actors.plan.costs.point import Samples
from actors.plan.types import Cluster, Item
from actors.planning.actor import Planner
from actors.planning.batching import best_sizes, fitted_limits
from actors.records.events import BatchesResized, RunEvent
from actors.run.recalibrate import Recalibration, StageSizes
from app.bench.planner import STAGE_2, STAGE_2_TEXT
from app.bench.truth import true_profile, wrong_profile
from app.bench.truth_machine import EveryShape, Machine
from data.buckets import Choice, batch_size
from data.config import BatchConfig
from data.dataset.order import SampleOrder
from data.dataset.order_state import BatchSizes, Population, SizesRecord, Stage
from data.types import Bucket
from ops.geometry import Geometry

GEOMETRY = Geometry()
BUCKETS = tuple(Bucket(frames, pixels, pixels) for pixels, table in STAGE_2.items() for frames, _ in table)
LIMITS = BatchConfig(memory_tokens=174336, text_tokens=STAGE_2_TEXT)  # as configs/data/open-sora-v2-stage2.yaml
CHANGE = 0.15
MODES = ("equal tokens", "dual constraint", "with re-sizing", "true costs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Throughput of the second half of a run."""

    mode: str
    tokens_per_s: float
    idle: float
    step_s: float
    spread: float  # standard deviation over mean of the seconds of a worker in a step
    resized: int  # decisions


def run(
    steps: Annotated[int, typer.Option(help="Steps of a run; the second half counts.")] = 240,
    every: Annotated[int, typer.Option(help="Steps between looks at the sizes (recalibrate_steps).")] = 40,
    seed: Annotated[int, typer.Option(help="Of the order of the data and of noise.")] = 0,
    workers: Annotated[str, typer.Option(help="Sizes of the cluster, nodes of eight.")] = "8,16",
    strategy: Annotated[
        str, typer.Option(help="Of the planner; static: a batch per worker, as AdaptiveLoad.")
    ] = "static",
) -> None:
    """A table of the ways for every size of the cluster."""
    logging.getLogger("actors").setLevel(logging.ERROR)  # timings that cannot be true are part of the machine
    print("| workers | batches | tokens/s | x equal tokens | idle | s per step | CV of seconds | decisions |")
    print("|---|---|---|---|---|---|---|---|")
    for count in [int(number) for number in workers.split(",")]:
        found = [simulate(mode, count, steps, every, seed, strategy) for mode in MODES]
        for one in found:
            print(
                f"| {count} | {one.mode} | {one.tokens_per_s:,.0f} | {one.tokens_per_s / found[0].tokens_per_s:.3f} | "
                f"{one.idle:.1%} | {one.step_s:.2f} | {one.spread:.1%} | {one.resized} |",
                flush=True,
            )


def simulate(mode: str, workers: int, steps: int, every: int, seed: int, strategy: str = "static") -> Throughput:
    """One run on a machine of its own."""
    machine = Machine(
        np.random.default_rng(seed), late=0.0, nodes=(8,) * max(1, workers // 8), slow=-1, ran=EveryShape()
    )
    limits = limits_of(mode, every)
    sizes = {bucket: batch_size(bucket, limits, GEOMETRY) for bucket in BUCKETS}
    data = BatchSource(order_of(sizes, workers, seed))
    planner = Planner(wrong_profile(), PlannerConfig(strategy=strategy, static_degree=1, lookahead=0, budget_s=0.02))
    cluster = Cluster(nodes=machine.nodes)
    heard = DecisionCounter()
    tokens, seconds, busy, spreads = 0.0, 0.0, 0.0, []
    with tempfile.TemporaryDirectory() as folder:
        loop = Recalibration.of(
            Path(folder),
            [StageSizes(0, limits, sizes, tuple(sizes))],
            cast(Any, LocalPlanner(planner)),  # what the loop asks of its client, without an actor between
            cast(Any, data),  # likewise, of its source
            Events(heard),
        )
        for step in range(steps):
            items = data.items(step)
            assigned = planner.plan(step, [items], cluster, (), 0.02)
            reports, took = machine.execute(assigned.cascades, items, step)
            planner.observe(
                [s for r in reports for s in r.spans], dict.fromkeys([i.id for i in items], STAGE_2_TEXT), cluster
            )
            loop.collected(step)
            if step >= steps // 2:
                used = [sum(s.end - s.start - s.wait_s for s in r.spans if s.module != "finish") for r in reports]
                tokens += sum(i.batch * GEOMETRY.tokens(i.frames, i.height, i.width) for i in items)
                seconds, busy = seconds + took, busy + sum(used)
                spreads.append(statistics.pstdev(used) / statistics.fmean(used))
    return Throughput(
        mode=mode,
        tokens_per_s=tokens / seconds,
        idle=1 - busy / (workers * seconds),
        step_s=seconds / (steps - steps // 2),
        spread=statistics.fmean(spreads),
        resized=len(heard.decisions),
    )


def limits_of(mode: str, every: int) -> BatchConfig:
    """The batch limits of a run that begins with the wrong profile. The wanted seconds are what the longest clip truly
    takes."""
    if mode == "equal tokens":
        return LIMITS
    longest = max(BUCKETS, key=lambda b: GEOMETRY.tokens(*b.shape))
    wanted = true_profile().seconds("dit", Samples.of(1, longest.shape, STAGE_2_TEXT), 1)
    asked = replace(
        LIMITS,
        auto=True,
        target_s=wanted,
        recalibrate="on" if mode == "with re-sizing" else "off",
        recalibrate_steps=every,
        recalibrate_change=CHANGE,
    )
    return fitted_limits(true_profile() if mode == "true costs" else wrong_profile(), BUCKETS, asked)[0]


def order_of(sizes: Mapping[Bucket, int], workers: int, seed: int) -> SampleOrder:
    """Samples of every bucket equally often, a batch per worker and step."""
    count = 200 * len(BUCKETS)
    rows = Population(
        name="clips",
        shard_bounds=np.linspace(0, count, 9).astype(np.int64),
        shape=np.arange(count, dtype=np.int32) % len(BUCKETS),
        window=8,
    )
    stage = Stage(
        until_step=0,
        choices=tuple((Choice(bucket=bucket, keep=1.0, step_down=1.0, resolution=""),) for bucket in BUCKETS),
        batch=sizes,
        tokens={b: STAGE_2_TEXT + GEOMETRY.tokens(*b.shape) for b in BUCKETS},
        weights=(1.0,),
        items_per_step=workers,
        max_wait=10**9,
    )
    return SampleOrder([rows], [stage], seed)


class BatchSource:
    """Items of coming steps from the order of the data; sizes change where nobody has looked yet."""

    def __init__(self, order: SampleOrder) -> None:
        self._order, self._state = order, order.start()

    @property
    def next_unasked(self) -> int:
        return self._state.step

    def resize(self, record: SizesRecord) -> None:
        self._order.adopt([BatchSizes.from_json(record)])

    def items(self, step: int) -> list[Item]:
        assert step == self._state.step, "steps are asked for in their order"
        return [
            Item(
                id=f"s{step}.{n}",
                batch=len(batch.draws),
                frames=batch.bucket.frames,
                height=batch.bucket.height,
                width=batch.bucket.width,
                text_tokens=STAGE_2_TEXT,
            )
            for n, batch in enumerate(self._order.advance(self._state))
        ]


@dataclass
class DecisionCounter:
    """A listener that counts decisions."""

    decisions: list[BatchesResized] = field(default_factory=list)

    def on_event(self, event: RunEvent) -> None:
        if isinstance(event, BatchesResized):
            self.decisions.append(event)

    def newest_line(self) -> None: ...

    def on_step(self, *told: object) -> None: ...
    def before_checkpoint(self) -> None: ...
    def on_checkpoint(self, *told: object) -> None: ...


@dataclass(frozen=True)
class LocalAnswer:
    """An answer that is there at once."""

    best: dict[Bucket, int]
    there: bool = True

    def sizes(self) -> dict[Bucket, int]:
        return self.best


@dataclass(frozen=True)
class LocalPlanner:
    """The planner without an actor around it."""

    planner: Planner

    def ask_sizes(self, buckets: Sequence[Bucket], limits: BatchConfig, room_gib: float) -> LocalAnswer:
        return LocalAnswer(best_sizes(self.planner.learned(), buckets, limits, room_gib))
