"""The default strategy: every cascade gets its own degree, place and time; encodes of the next steps fill the gaps.

Consecutive steps are planned in order: each knows which encodes have run already and how long workers are busy. A
long horizon is planned by beam search: the best few plans of the steps so far are kept, and each is continued with
different values of running ahead. The earliest end of the whole horizon decides between them. The trials of a step
share its budget.

Where packed bags end earlier, the plan of knapsack, which costs milliseconds, is taken instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from actors.plan.schedule.check import check_each
from actors.plan.schedule.constructive import allot, list_by_tail
from actors.plan.schedule.evaluator import simulate, to_cascades
from actors.plan.schedule.figures import end_with_credit
from actors.plan.schedule.problem import EncodeKey, Placement, PlannedJob, Problem, StepContext
from actors.plan.schedule.strategy import Strategy, concatenated
from actors.plan.strategies.knapsack import knapsack_step
from actors.plan.strategies.search import native
from actors.plan.strategies.search.step import PlannedStep, plan_step
from actors.plan.strategies.search.step_jobs import StepsAhead, own_jobs
from actors.plan.types import Cascade, PlanError

WORTHS = ((1.05, 0.8), (1.4, 1.1))  # see StepsAhead.worths; a short horizon is planned with the first pair only
BEAM = 2  # pasts that are kept over a long horizon
LONG_HORIZON = 4  # steps


class CascadeSearch:
    """The only strategy that lets steps overlap."""

    name = "cascade"

    def __init__(self) -> None:
        native.library()  # loaded on the first call of a process

    def plan(self, problem: Problem, seed: int) -> list[Cascade]:
        options = problem.options
        found = plan_horizon(problem, seed, options.budget_s)
        if options.budget_s <= 0 or not problem.numbers:
            return found
        last = problem.numbers[0] if options.replans else problem.numbers[-1]
        gain = max(options.least_gain, 1e-9)
        try:
            packs = [knapsack_step(problem, step) for step in problem.numbers if step <= last]
            packed = simulate(problem, concatenated(packs))  # on workers that may still be at an early encode
            if end_with_credit(problem, packed, last) * (1 + gain) >= end_with_credit(problem, found, last):
                return found
            packs += [knapsack_step(problem, step) for step in problem.numbers if step > last]
            packed = simulate(problem, concatenated(packs))
            check_each(packed, problem.items, problem.profile, problem.topology)  # a pack may not be what ends a run
            return packed
        except PlanError:  # knapsack has no legal plan here
            return found


def plan_horizon(problem: Problem, seed: int, budget_s: float) -> list[Cascade]:
    """Cascades of all steps, timed. `budget_s` is that of one step."""
    numbers = problem.numbers
    long = len(numbers) >= LONG_HORIZON and budget_s > 0
    width, worths = (BEAM, WORTHS) if long else (1, WORTHS[:1])
    beam = [EarlierSteps(problem.start, [], [])]
    for step in numbers:
        ahead = tuple(s for s in range(step + 1, step + 1 + problem.options.lookahead) if s in numbers)
        rough = problem.options.replans and step != numbers[0]
        share = budget_s / (len(beam) * len(worths))
        trials = []
        for past in beam:
            for number, worth in enumerate(worths):
                if not rough:
                    later = StepsAhead(ahead, worth)
                    planned = plan_step(problem, past.context, step, later, seed + number, share)
                else:
                    planned = _rough_step(problem, past.context, step)
                trials.append(past.after(planned))
        beam = _best(problem, trials, width)
    return min(beam, key=lambda past: past.context.barrier_s).cascades(problem)


def _rough_step(problem: Problem, context: StepContext, step: int) -> PlannedStep:
    """Some legal plan of the step's own jobs, in a millisecond: a run plans the step again before it is executed."""
    jobs = own_jobs(problem, context, step)
    degrees = allot(problem, jobs, sum(job.area for job in jobs) / sum(problem.topology.speed))
    schedule = list_by_tail(problem, jobs, degrees, context)
    return PlannedStep(schedule, tuple(schedule.free))


def _best(problem: Problem, trials: list[EarlierSteps], width: int) -> list[EarlierSteps]:
    """At most `width` pasts, the most promising first, no two of the same promise."""
    ranked = sorted(trials, key=lambda past: past.least_end(problem))
    ends = [past.least_end(problem) for past in ranked]
    return [past for number, past in enumerate(ranked) if all(ends[number] > other + 1e-9 for other in ends[:number])][
        :width
    ]


@dataclass(frozen=True, slots=True)
class EarlierSteps:
    """Steps decided so far, and what they leave."""

    context: StepContext
    jobs: list[PlannedJob]
    placed: list[Placement]

    def after(self, planned: PlannedStep) -> EarlierSteps:
        """The steps decided so far and one more."""
        schedule = planned.schedule
        ran: dict[EncodeKey, tuple[float, tuple[int, ...]]] = dict(self.context.ran)
        barrier = self.context.barrier_s
        for decision in schedule.placed:
            job, end = schedule.jobs[decision.job], schedule.end[decision.job]
            if job.module == "dit":
                barrier = max(barrier, end)
            else:
                ran[job.item, job.module, job.first, job.count] = (end, decision.workers)
        placed = self.placed + [Placement(len(self.jobs) + p.job, p.workers) for p in schedule.placed]
        return EarlierSteps(StepContext(planned.free_s, barrier, ran), [*self.jobs, *schedule.jobs], placed)

    def least_end(self, problem: Problem) -> float:
        """When all steps of the horizon can be over at the earliest, up to a constant.

        An encode that ran ahead is worth its share of all workers' time. A worker that is busy after the step costs
        its share.
        """
        context = self.context
        total = sum(problem.topology.speed)
        over = sum(max(time_s - context.barrier_s, 0.0) for time_s in context.free_s)
        ran = {(item, module) for item, module, _, _ in context.ran}
        return context.barrier_s + (over - sum(problem.cheapest(*key)[0] for key in ran)) / total

    def cascades(self, problem: Problem) -> list[Cascade]:
        """All that was placed, timed."""
        keep = sorted({decision.job for decision in self.placed})
        index = {old: new for new, old in enumerate(keep)}
        placed = [replace(decision, job=index[decision.job]) for decision in self.placed]
        return to_cascades(problem, [self.jobs[i] for i in keep], placed)


STRATEGY: type[Strategy] = CascadeSearch
