"""The default strategy: every cascade gets its own degree, place and time; encodes of the next steps fill the gaps.

Where packed bags end earlier, the plan of knapsack, which costs milliseconds, is taken instead.
"""

from __future__ import annotations

from actors.plan.schedule.figures import end_with_credit
from actors.plan.schedule.problem import Problem
from actors.plan.schedule.strategy import Strategy, one_by_one
from actors.plan.strategies.knapsack import knapsack_step
from actors.plan.strategies.search import native
from actors.plan.strategies.search.horizon import plan_horizon
from actors.plan.types import Cascade, PlanError


class CascadeSearch:
    """The only strategy that lets steps overlap."""

    name = "cascade"

    def __init__(self) -> None:
        native.library()  # compiled on the first call of a machine

    def plan(self, problem: Problem, seed: int) -> list[Cascade]:
        options = problem.options
        found = plan_horizon(problem, seed, options.budget_s)
        if options.budget_s <= 0 or not problem.numbers:
            return found
        try:
            packed = one_by_one(problem, lambda step: knapsack_step(problem, step))
        except PlanError:  # knapsack has no legal plan here
            return found
        last = problem.numbers[0] if options.replans else problem.numbers[-1]
        gain = max(options.least_gain, 1e-9)
        earlier = end_with_credit(problem, packed, last) * (1 + gain) < end_with_credit(problem, found, last)
        return packed if earlier else found


STRATEGY: type[Strategy] = CascadeSearch
