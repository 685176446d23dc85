"""Baseline KnapFormer: packed bags balanced by its published greedy rule alone (section 3.3), without our moves and
swaps. Beside `knapsack` it shows what those are worth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.plan.schedule.balance import Balance, by_occupancy
from actors.plan.schedule.problem import Problem
from actors.plan.schedule.strategy import Strategy, one_by_one
from actors.plan.strategies.knapsack import knapsack_step
from actors.plan.types import Cascade, PlanError


class KnapFormer:
    """Every step alone, on the options' topology as published, or on the best one found under the same rule."""

    name = "knapformer"

    def plan(self, problem: Problem, seed: int) -> list[Cascade]:
        return one_by_one(problem, lambda step: knapsack_step(problem, step, _published, cut=True))


def _published(costs: np.ndarray, sizes: Sequence[int], tokens: np.ndarray, max_tokens: float | None) -> Balance:
    """The rule knows no memory: a topology on which it overfills a worker is taken only where each one does."""
    if not np.isfinite(costs).any(axis=1).all():
        raise PlanError(f"a sequence can run on no bag of sizes {sorted(set(sizes))}. Add a bag of a legal degree.")
    found = by_occupancy(costs, sizes)
    held = np.zeros(len(sizes))
    np.add.at(held, list(found.bag_of), tokens)
    if max_tokens is not None and (held > max_tokens * np.array(sizes)).any():
        raise PlanError(f"the published rule gives a worker more than {max_tokens:.0f} tokens.")
    return found


STRATEGY: type[Strategy] = KnapFormer
