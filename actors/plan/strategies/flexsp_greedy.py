"""Baseline FlexSP by its published rule: workers go to the slowest item while any are left."""

from __future__ import annotations

from actors.plan.schedule.problem import ItemKey, Problem
from actors.plan.schedule.strategy import Strategy, one_by_one
from actors.plan.strategies.flexsp import Times, groups_step
from actors.plan.types import Cascade


class GreedyFlexSp:
    """Every item starts at its smallest legal degree."""

    name = "flexsp_greedy"

    def plan(self, problem: Problem, seed: int) -> list[Cascade]:
        return one_by_one(problem, lambda step: groups_step(problem, step, _greedy))


def _greedy(problem: Problem, times: Times) -> dict[ItemKey, int]:
    chosen = {key: min(sizes) for key, sizes in times.items()}
    left = problem.topology.num_workers - sum(chosen.values())
    while True:
        grown = False
        for key in sorted(times, key=lambda key: (-times[key][chosen[key]], key)):
            larger = [
                k
                for k in times[key]
                if k > chosen[key] and k - chosen[key] <= left and times[key][k] < times[key][chosen[key]]
            ]
            if larger:
                left -= larger[0] - chosen[key]
                chosen[key] = larger[0]
                grown = True
                break
        if not grown:
            return chosen


STRATEGY: type[Strategy] = GreedyFlexSp
