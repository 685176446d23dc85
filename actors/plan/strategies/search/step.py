"""One step: a constructive plan first, then the search improves it until the budget ends."""

from __future__ import annotations

import time
from dataclasses import dataclass

from actors.plan.schedule.constructive import ConstructiveStarts, constructive
from actors.plan.schedule.listing import ListSchedule
from actors.plan.schedule.problem import PlannedJob, Problem, StepContext
from actors.plan.strategies.search.cells import plan_cells
from actors.plan.strategies.search.improve import improved
from actors.plan.strategies.search.step_jobs import StepsAhead, choices

FEW_JOBS = 6  # up to this number, a cut is also searched if its start is a little worse than that of whole batches
MANY_JOBS = 48  # up to this number, one search over the whole cluster is stronger than cells
# A search that counts its work is ended by the wall clock on a machine slower than its calibration: after PATIENCE
# budgets and GRACE_S seconds more, so that a budget of milliseconds does not end by chance.
PATIENCE, GRACE_S = 0.85, 0.02
FILL = 0.1  # share of a budget that filling gaps after the search may take
FILL_S = 0.05  # budget of filling the gaps of the best constructive schedule
# Listing the starts takes milliseconds. On hundreds of workers that differ it takes longer: the clock ends it then.
STARTS_S = 1.0


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


def plan_step(
    problem: Problem, context: StepContext, step: int, ahead: StepsAhead, seed: int, budget_s: float
) -> PlannedStep:
    """The best decision found for one step within the budget.

    An encode of a later step may outlast it. Where its jobs are too many to be searched together with those of
    later steps, these fill the gaps of what was found, and end by it.
    """
    started = time.perf_counter()
    cuts = choices(problem, context, step, ahead)
    later = [job for job in cuts[0] if job.optional]
    if not later or len(cuts[0]) <= MANY_JOBS:
        schedule = best_schedule(problem, context, cuts, seed, budget_s)
    else:
        own = [[job for job in jobs if not job.optional] for jobs in cuts]
        schedule = best_schedule(problem, context, own, seed, budget_s)
        schedule.fill(_deadline(problem, started, budget_s) + FILL * budget_s, later)
    return PlannedStep(schedule, tuple(schedule.free))


def best_schedule(
    problem: Problem, context: StepContext, cuts: list[list[PlannedJob]], seed: int, budget_s: float
) -> ListSchedule:
    """The best schedule found within the budget: of whole batches, the first of `cuts`, and of batches cut where that
    may pay."""
    started = time.perf_counter()
    if not cuts[0]:
        return ListSchedule(problem, cuts[0], context)
    if len(cuts[0]) <= MANY_JOBS or not context.fresh:
        return _best_variant(problem, context, cuts, seed, budget_s, started)
    # in cells without early encodes: the step's own are many enough to fill each other's gaps
    own = [job for job in cuts[0] if not job.optional]
    planned = plan_cells(problem, own, context, seed, budget_s)
    if planned is None:
        return _best_variant(problem, context, cuts, seed, budget_s, started)
    if not problem.topology.uniform:  # a cell's first plan uses whole nodes, at the pace of their slowest workers
        whole = constructive(problem, own, context, 0.0, _starts_end(problem))
        if whole.score < planned.score - 1e-9:
            return whole.schedule
    return planned


def _best_variant(
    problem: Problem, context: StepContext, cuts: list[list[PlannedJob]], seed: int, budget_s: float, started: float
) -> ListSchedule:
    variants = _variants(problem, context, cuts)
    first = min(variants, key=lambda variant: variant.starts.score * (1 + variant.handicap))
    best, schedule = first.starts.score * (1 + first.handicap), first.starts.schedule
    for number, variant in enumerate(variants if budget_s > 0 else ()):
        share = budget_s / len(variants)
        end = _deadline(problem, started, share * (number + 1))
        found = improved(problem, variant.jobs, context, variant.starts.tried, share, seed, end)
        if found is None:
            continue
        found.fill(end + FILL * share)
        reached = found.score * (1 + variant.handicap)
        if reached < best - 1e-9:
            best, schedule = reached, found
    return schedule


def _variants(problem: Problem, context: StepContext, cuts: list[list[PlannedJob]]) -> list[Variant]:
    """Whole batches, and the most promising cut. A cut has to show its worth before it may share the budget; with few
    cascades there is budget for both."""
    margin = 1.1 if len(cuts[0]) <= FEW_JOBS else 1.0
    handicaps = [0.0] + [problem.options.least_gain] * (len(cuts) - 1)
    whole, *cut = [
        Variant(
            jobs,
            constructive(problem, jobs, context, _deadline(problem, time.perf_counter(), FILL_S), _starts_end(problem)),
            handicap,
        )
        for jobs, handicap in zip(cuts, handicaps)
    ]
    promising = [variant for variant in cut if variant.starts.score < margin * whole.starts.score]
    return [whole, *sorted(promising, key=lambda variant: variant.starts.score)[:1]]


def _deadline(problem: Problem, started: float, budget_s: float) -> float:
    """When the wall clock ends what began at `started`."""
    return problem.options.clock_end(started + PATIENCE * budget_s + GRACE_S)


def _starts_end(problem: Problem) -> float:
    """When the wall clock ends the listing of starts that begins now."""
    return problem.options.clock_end(time.perf_counter() + STARTS_S)
