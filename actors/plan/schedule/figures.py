"""A Plan of timed cascades, with its figures: makespan, idle share, WIR, CV_step, compute CV.

CV_step and compute CV are AdaptiveLoad's (sec. 4.1): of tokens, and of B S^2, per worker, as metrics.jsonl has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.plan.measures import cv_step, variation
from actors.plan.schedule.bounds import step_bound, within
from actors.plan.schedule.problem import Problem
from actors.plan.types import Cascade, Plan, StepPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """Balance of one executed step over its workers."""

    busy_s: tuple[float, ...]  # per worker, within the step's window
    wir: float  # largest over smallest busy time (KnapFormer); infinite when a worker has none
    cv_busy: float  # standard deviation over mean of busy time
    cv_step: float  # (max - min) / max of tokens per worker; NaN where nobody counts them
    cv_compute: float  # standard deviation over mean of B S^2 per worker
    idle_ratio: float


TokensOf = Callable[[int, str], int]  # step and item -> text and video tokens of one of its samples


def windows(cascades: Sequence[Cascade], steps: Sequence[int]) -> list[tuple[float, float]]:
    """(start, end) of each step: from the end of the previous step's last dit to the end of its own last dit."""
    result = []
    start = 0.0
    for step in steps:
        own = [c for c in cascades if c.step == step]
        end = max((c.end_s for c in own if c.module == "dit"), default=max((c.end_s for c in own), default=start))
        end = max(end, start)
        result.append((start, end))
        start = end
    return result


def figures(
    cascades: Sequence[Cascade],
    window: tuple[float, float],
    num_workers: int,
    step: int = 0,
    tokens_of: TokensOf | None = None,
) -> StepFigures:
    """Busy times of every worker inside a window, and their spread; with `tokens_of` the balance of the step's load."""
    low, high = window
    busy = [0.0] * num_workers
    for cascade in cascades:
        share = min(cascade.end_s, high) - max(cascade.start_s, low)
        if share > 0:
            for worker in cascade.workers:
                busy[worker] += share
    top, bottom, mean = max(busy), min(busy), sum(busy) / num_workers
    length = high - low
    balance = None if tokens_of is None else _balance(cascades, num_workers, step, tokens_of)
    return StepFigures(
        busy_s=tuple(busy),
        wir=top / bottom if bottom > 0 else (1.0 if top == 0 else float("inf")),
        cv_busy=variation(busy),
        cv_step=float("nan") if balance is None else balance[0],
        cv_compute=float("nan") if balance is None else balance[1],
        idle_ratio=max(0.0, 1.0 - mean / length) if length > 0 else 0.0,
    )


def _balance(cascades: Sequence[Cascade], workers: int, step: int, tokens_of: TokensOf) -> tuple[float, float]:
    """(CV_step, compute CV) of a step's DiT cascades; a bag of k gives each of its workers 1 / k of every sample."""
    tokens, pressure = [0.0] * workers, [0.0] * workers
    for cascade in cascades:
        if cascade.step == step and cascade.module == "dit":
            for part in cascade.parts:
                length = tokens_of(step, part.item)
                for worker in cascade.workers:
                    tokens[worker] += part.count * length / cascade.degree
                    pressure[worker] += part.count * length**2 / cascade.degree
    return cv_step(tokens), variation(pressure)


def end_with_credit(problem: Problem, cascades: Sequence[Cascade], last: int) -> float:
    """End of step `last`, less what encodes of later steps have saved by then."""
    dits = [c for c in cascades if c.step <= last and c.module == "dit"] or [c for c in cascades if c.step <= last]
    end = max((c.end_s for c in dits), default=0.0)
    ahead = sum(c.seconds * c.degree for c in cascades if c.step > last and c.module != "dit" and c.end_s <= end + 1e-9)
    return end - ahead / problem.topology.num_workers


def assemble(problem: Problem, cascades: Sequence[Cascade], planning_s: float) -> Plan:
    """A Plan: cascades under the step of their items in start order, with the figures of each step.

    `planning_s` is what the planning of one step took on average.
    """
    place = problem.topology.num_workers, len(problem.cluster.nodes)
    update_s, remainder_s = problem.profile.update_seconds(*place), problem.profile.remainder_seconds(*place)
    steps = []
    for number, window in zip(problem.numbers, windows(cascades, problem.numbers)):
        own = sorted((c for c in cascades if c.step == number), key=lambda c: (c.start_s, c.module != "dit", c.id))
        balance = figures(cascades, window, problem.topology.num_workers)
        steps.append(
            StepPlan(
                step=number,
                cascades=tuple(own),
                makespan_s=window[1] - window[0],
                lower_bound_s=step_bound(problem, number, within(problem, number)),
                planning_s=planning_s,
                idle_ratio=balance.idle_ratio,
                update_s=update_s,
                remainder_s=remainder_s,
            )
        )
    return Plan(strategy=problem.options.strategy, steps=tuple(steps))
