"""Arachne's genetic search (Algorithm 1), for comparison.

A chromosome is a degree per cascade, its fitness the makespan of a critical-path list schedule on a homogeneous pool;
placement comes afterwards, of the few fittest, as the pool knows neither nodes nor handoffs nor slow workers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

from actors.plan.schedule.constructive import list_by_tail, tails
from actors.plan.schedule.evaluator import to_cascades
from actors.plan.schedule.listing import ListSchedule
from actors.plan.schedule.problem import PlannedJob, Problem
from actors.plan.schedule.strategy import Strategy, one_by_one
from actors.plan.types import Cascade

POPULATION = 40
GENERATIONS = 50
MUTATION = 0.1
ELITE = 4
SCHEDULE_S = 2.5e-5  # calibration: one job of one list schedule
PLACED, PLACE_S = 4, 4e-5  # of the last generation, more where PLACING of the budget pays for it at PLACE_S a job
PLACING = 0.5
PATIENCE = 4.0  # budgets after which the wall clock ends what a slow machine has not finished


class Genetic:
    """Every step alone, within the options' budget."""

    name = "genetic"

    def plan(self, problem: Problem, seed: int) -> list[Cascade]:
        return one_by_one(problem, lambda step: _plan_step(problem, step, seed))


def _plan_step(problem: Problem, step: int, seed: int) -> list[Cascade]:
    jobs = problem.jobs(steps=[step])
    if not jobs:
        return []
    source = random.Random(f"{seed} {step}")  # with the seed alone its luck would be the same in every step
    return to_cascades(problem, jobs, genetic_step(problem, jobs, source, problem.options.budget_s).placed)


def genetic_step(problem: Problem, jobs: Sequence[PlannedJob], source: random.Random, budget_s: float) -> ListSchedule:
    """The best of the last of GENERATIONS, or of the budget's worth of them, placed on nodes."""
    choices = [[k for k, _ in job.modes] for job in jobs]
    population = [[source.choice(options) for options in choices] for _ in range(POPULATION)]
    generations = max(1, min(GENERATIONS, int((1 - PLACING) * budget_s / (POPULATION * len(jobs) * SCHEDULE_S))))
    deadline = problem.options.clock_end(time.perf_counter() + PATIENCE * budget_s)
    seconds = [dict(job.at_best(problem.topology)) for job in jobs]

    def makespan(genes: list[int]) -> float:
        return _pool_makespan(problem, jobs, seconds, genes)

    for _ in range(generations):
        if time.perf_counter() > deadline:
            break
        ranked = sorted(population, key=makespan)
        population = ranked[:ELITE]
        while len(population) < POPULATION:
            mother, father = source.sample(ranked[: POPULATION // 2], 2)
            child = [source.choice(pair) for pair in zip(mother, father)]
            population.append(
                [
                    source.choice(options) if source.random() < MUTATION else gene
                    for gene, options in zip(child, choices)
                ]
            )
    found = dict.fromkeys(tuple(genes) for genes in sorted(population, key=makespan))
    placed: list[ListSchedule] = []
    for genes in list(found)[: max(PLACED, int(PLACING * budget_s / (len(jobs) * PLACE_S)))]:
        if not placed or time.perf_counter() <= deadline:
            placed.append(list_by_tail(problem, jobs, genes))
    return min(placed, key=lambda schedule: schedule.step_end)


def _pool_makespan(
    problem: Problem, jobs: Sequence[PlannedJob], seconds: Sequence[Mapping[int, float]], degrees: Sequence[int]
) -> float:
    """Critical-path list schedule on one pool of equal workers, blind to nodes but for bags that none can hold."""
    tail = tails(jobs, degrees)
    free = [0.0] * problem.topology.num_workers
    end = [0.0] * len(jobs)
    for index in sorted(range(len(jobs)), key=lambda i: (-tail[i], i)):
        degree = degrees[index]
        start = max([free[degree - 1]] + [end[p] for p in jobs[index].preds])
        end[index] = start + seconds[index][degree]
        free[:degree] = [end[index]] * degree
        free.sort()
    return max(end, default=0.0)


STRATEGY: type[Strategy] = Genetic
