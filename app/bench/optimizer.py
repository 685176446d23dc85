"""What an optimizer step costs: FlatSync against a plain all-reduce plus fused AdamW of the same size.

    heddle bench optimizer --elements 16000000 --workers 2 --workers 3

Ranks are processes on this machine that talk over Gloo. Every variant runs once per round, in turn, so that other load
hits all of them alike; a round counts the slowest rank. The plain variant is what data parallelism without sharding
does: one all-reduce of the whole gradient and one fused AdamW over all weights on every rank. FlatSync sums the same
gradient, takes the global norm, clips, updates its shard, keeps an EMA and gathers the weights.

The late worker: one rank is still in its last backward (a sleep, parameter by parameter) when the others have ended
theirs. What counts is its time from the end of that backward to the end of the step, once with the sum begun there by
all, once with buckets that start as they are complete.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from torch import nn

from app.bench.markdown import markdown_table
from app.bench.ranks import rank_main, run_ranks
from ops.comm.collectives import Group
from ops.config import OptimizerConfig
from ops.update.sync import FlatSync

BARE = OptimizerConfig(max_grad_norm=0.0, ema_decay=0.0)
FULL = OptimizerConfig()
_LAYERS = 40
_LATE_S = 1.0
_WAIT_S = 900.0  # for all ranks together
_LATE = "after the last backward of a worker that is 1 s late:"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Seconds per step of one variant: every round, slowest rank."""

    workers: int
    variant: str
    seconds: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds)


def weights(elements: int, dtype: torch.dtype) -> nn.Module:
    """A model of equal layers without a forward: random numbers, the same on every rank."""
    values = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(dtype)
    return nn.ParameterList(nn.Parameter(part) for part in values.chunk(_LAYERS))


def plain_step(group: Group, elements: int) -> Callable[[], None]:
    weight = nn.Parameter(torch.randn(elements, generator=torch.Generator().manual_seed(0)))
    gradient = torch.randn(elements)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def step() -> None:
        group.all_reduce(gradient)
        weight.grad = gradient
        optimizer.step()
        gradient.mul_(1.0 / group.size)  # not part of the step's idea; keeps the numbers finite

    return step


def flat_step(group: Group, elements: int, config: OptimizerConfig, dtype: torch.dtype) -> Callable[[], None]:
    sync = FlatSync(weights(elements, dtype), config, total_steps=1000)
    sync.form(group, None)
    sync.gradient().normal_()

    def step() -> None:
        sync.finish_step(0, 1.0, 1.0, float(group.size), lambda phase: None)

    return step


def late_step(group: Group, elements: int, early: bool) -> Callable[[], float]:
    """A step whose last rank ends its backward late; returns the seconds after that, 0 on the other ranks."""
    sync = FlatSync(weights(elements, torch.float32), FULL, total_steps=1000)
    sync.form(group, None)
    late = group.rank == group.size - 1

    def step() -> float:
        sync.gradient().normal_()
        group.barrier()
        if early:
            sync.watch_backward()
        for index in reversed(range(len(sync.layout))):
            if late:
                time.sleep(_LATE_S / len(sync.layout))
            if early:
                sync.gradients.received(index)
        begin = time.perf_counter()
        sync.finish_step(0, 1.0, 1.0, float(group.size), lambda phase: None)
        return time.perf_counter() - begin if late else 0.0

    return step


def variants(group: Group, elements: int) -> dict[str, Callable[[], float | None]]:
    return {
        "plain all-reduce + fused AdamW": plain_step(group, elements),
        "FlatSync, no clip, no EMA": flat_step(group, elements, BARE, torch.float32),
        "FlatSync, clip and EMA": flat_step(group, elements, FULL, torch.float32),
        "FlatSync, clip and EMA, bf16 weights": flat_step(group, elements, FULL, torch.bfloat16),
        f"{_LATE} sum at the end": late_step(group, elements, early=False),
        f"{_LATE} buckets as they are complete": late_step(group, elements, early=True),
    }


def measure(group: Group, elements: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of this rank per variant and round, after one round that does not count."""
    steps = variants(group, elements)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            group.barrier()
            begin = time.perf_counter()
            counted = step()
            group.barrier()
            if repeat:
                seconds[name].append(time.perf_counter() - begin if counted is None else counted)
    return seconds


def measure_workers(workers: int, elements: int, repeats: int) -> list[StepCost]:
    ranks = run_ranks("app.bench.optimizer", {"elements": elements, "repeats": repeats}, workers, _WAIT_S)
    return [
        StepCost(
            workers=workers, variant=name, seconds=tuple(max(times) for times in zip(*(rank[name] for rank in ranks)))
        )
        for name in ranks[0]
    ]


def table(costs: Sequence[StepCost], elements: int) -> str:
    """Markdown: medians, and the median over rounds of the ratio to the plain variant of the same round."""
    rows = []
    for cost in costs:
        plain = next(c for c in costs if c.workers == cost.workers and c.variant.startswith("plain"))
        ratio = statistics.median(mine / other for mine, other in zip(cost.seconds, plain.seconds))
        rows.append((cost.workers, cost.variant, f"{cost.median_ms:.0f}", f"{ratio:.2f}"))
    measured = markdown_table(("workers", "step", "median ms", "x plain"), rows)
    return f"{elements / 1e6:g} M elements, fp32 gradients\n\n{measured}"


def run(
    elements: Annotated[int, typer.Option(help="Weights of the model.", min=1)] = 16_000_000,
    workers: Annotated[list[int], typer.Option(metavar="NUMBER", help="How many processes; repeatable.")] = [2, 3],  # noqa: B006 (for Typer)
    repeats: Annotated[int, typer.Option(help="Timed rounds; the median counts.", min=1)] = 9,
) -> None:
    """Measure and print the Markdown table."""
    costs = [cost for count in workers for cost in measure_workers(count, elements, repeats)]
    print(table(costs, elements))


if __name__ == "__main__":
    rank_main(measure)
