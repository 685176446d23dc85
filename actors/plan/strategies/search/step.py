"""One step: a constructive plan first, then the search improves it until the budget ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.plan.schedule.bounds import path_bound
from actors.plan.schedule.listing import ListSchedule
from actors.plan.schedule.problem import Placement, PlannedJob, Problem, StepContext
from actors.plan.strategies.search import anneal, native
from actors.plan.strategies.search.cells import plan_cells, worth_cells
from actors.plan.strategies.search.climb import climb
from actors.plan.strategies.search.clock import deadline
from actors.plan.strategies.search.realise import realise
from actors.plan.strategies.search.score import fill_gaps, score, step_end
from actors.plan.strategies.search.space import Space, build
from actors.plan.strategies.search.starts import ConstructiveStarts, constructive, rough_schedule, side_by_side
from actors.plan.strategies.search.step_jobs import StepsAhead, cuts, later_jobs, own_jobs, step_jobs

FEW_JOBS = 6  # a step of so few is also searched with a cut that starts a little worse
FILL = 0.1  # of a budget: so long gaps are filled after the search
CELL_POPULATION = 64  # candidates of the vectorised search of one cell


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The decision about one step: its jobs with workers and times, and when each worker is free for the next one."""

    schedule: ListSchedule
    free_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """Jobs of a step with its batches whole, or cut in one way. `handicap`: share of a step that it must save."""

    jobs: list[PlannedJob]
    starts: ConstructiveStarts
    handicap: float


def rough_step(problem: Problem, context: StepContext, step: int) -> PlannedStep:
    """A legal plan of the step's own jobs, without any search."""
    schedule = rough_schedule(problem, own_jobs(problem, context, step), context)
    return PlannedStep(schedule, tuple(schedule.free))


def plan_step(
    problem: Problem, context: StepContext, step: int, ahead: StepsAhead, seed: int, budget_s: float
) -> PlannedStep:
    """The best decision found for one step within the budget.

    Where an update waits for all workers, encodes of later steps only fill the gaps of the step's own best plan: one
    that is not over by then would delay the update.
    """
    started = time.perf_counter()
    if not (problem.options.update_waits and ahead.steps):
        schedule = best_schedule(problem, context, step, ahead, seed, budget_s)
        return PlannedStep(schedule, tuple(schedule.free))
    alone = best_schedule(problem, context, step, StepsAhead(), seed, budget_s)
    schedule = alone.with_more(later_jobs(problem, context, step, ahead))
    fill_gaps(schedule, deadline(started, budget_s) + FILL * budget_s)
    return PlannedStep(schedule, (step_end(schedule),) * problem.topology.num_workers)


def best_schedule(
    problem: Problem, context: StepContext, step: int, ahead: StepsAhead, seed: int, budget_s: float
) -> ListSchedule:
    """The best schedule found within the budget: of whole batches, and of batches cut where that may pay."""
    started = time.perf_counter()
    jobs = step_jobs(problem, context, step, ahead)
    if not jobs:
        return ListSchedule(problem, jobs, context)
    if context.fresh and worth_cells(problem, jobs):
        return _by_cells(problem, context, [job for job in jobs if not job.optional], seed, budget_s)
    variants = _variants(problem, context, step, ahead, jobs)
    first = min(variants, key=lambda variant: variant.starts.score * (1 + variant.handicap))
    best, schedule = first.starts.score * (1 + first.handicap), first.starts.schedule
    for number, variant in enumerate(variants if budget_s > 0 else ()):
        share = budget_s / len(variants)
        end = deadline(started, share * (number + 1))
        found = _improved(problem, context, variant, share, seed, end)
        if found is None:
            continue
        fill_gaps(found, end + FILL * share)
        reached = score(found) * (1 + variant.handicap)
        if reached < best - 1e-9:
            best, schedule = reached, found
    return schedule


def _variants(
    problem: Problem, context: StepContext, step: int, ahead: StepsAhead, jobs: list[PlannedJob]
) -> list[Variant]:
    """Whole batches, and the most promising cut. A cut has to show its worth before it may share the budget; with few
    cascades there is budget for both."""
    whole = Variant(jobs, constructive(problem, jobs, context), 0.0)
    margin = 1.1 if len(jobs) <= FEW_JOBS else 1.0
    cut = []
    for patterns in cuts(problem, context, step):
        pieces = step_jobs(problem, context, step, ahead, patterns)
        cut.append(Variant(pieces, constructive(problem, pieces, context), problem.options.least_gain))
    promising = [variant for variant in cut if variant.starts.score < margin * whole.starts.score]
    return [whole, *sorted(promising, key=lambda variant: variant.starts.score)[:1]]


def _improved(
    problem: Problem, context: StepContext, variant: Variant, budget_s: float, seed: int, until: float
) -> ListSchedule | None:
    """What the search makes of a variant; None when the clock ended it before it found anything."""
    jobs = variant.jobs
    space = build(problem, jobs, context)
    if space is None or not problem.topology.uniform:
        return climb(problem, jobs, context, variant.starts.tried, budget_s, seed, until)
    starts = [anneal.start_from(space, jobs, order, degrees) for order, degrees in variant.starts.tried]
    found = _searched(space, starts, budget_s, seed, _bound(problem, jobs, context), until)
    return None if found is None else realise(problem, jobs, context, found, budget_s)


def _searched(
    space: Space,
    starts: Sequence[tuple[np.ndarray, np.ndarray]],
    budget_s: float,
    seed: int,
    bound: float,
    until: float,
    population: int = 0,
) -> anneal.SearchResult | None:
    """The best candidate of the compiled search, or of the vectorised one where there is no compiler."""
    if native.fits(space):
        return native.anneal(space, starts, budget_s, seed, bound, until - time.perf_counter())
    return anneal.anneal(space, starts, budget_s, seed, bound, until, population)


def _bound(problem: Problem, jobs: Sequence[PlannedJob], context: StepContext) -> float:
    """No schedule of these jobs ends earlier; a search that reaches it may stop."""
    if context.barrier_s:
        return context.barrier_s
    own = [job for job in jobs if not job.optional]
    area = sum(job.area for job in own) / sum(problem.topology.speed)
    return max(area, path_bound(problem, own)) if context.fresh else area


def _by_cells(
    problem: Problem, context: StepContext, jobs: Sequence[PlannedJob], seed: int, budget_s: float
) -> ListSchedule:
    """A large step from idle workers, without early encodes: they are many enough to fill each other's gaps."""

    def plan_cell(part: Problem, jobs: Sequence[PlannedJob], seconds: float) -> tuple[float, list[Placement]]:
        idle = StepContext.idle(part.topology.num_workers)
        space = build(part, jobs, idle) if seconds > 0 else None
        if space is None:
            made = constructive(part, jobs, idle)
            return made.score, made.schedule.placed
        starts = [anneal.start_from(space, jobs, order, degrees) for order, degrees in side_by_side(part, jobs)]
        until = time.perf_counter() + 4 * seconds
        found = _searched(space, starts, seconds, seed, 0.0, until, CELL_POPULATION)
        if found is None:
            return float("inf"), []
        better = realise(part, jobs, idle, found, seconds)
        return max(better.end), better.placed

    schedule = ListSchedule(problem, jobs, context)
    for decision in plan_cells(problem, jobs, plan_cell, budget_s):
        schedule.fix(decision.job, decision.workers)
    return schedule
