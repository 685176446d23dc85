"""What a strategy is. Each is one file in strategies/ under its name; `make_plan` finds it there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from actors.plan.schedule.problem import Problem
from actors.plan.types import Cascade


class Strategy(Protocol):
    """Finds cascades. Its file is `strategies/NAME.py` and ends with `STRATEGY: type[Strategy] = ITS_CLASS`.

    An instance is made before its time is taken: what is needed once per process belongs into `__init__`.
    """

    name: str

    def plan(self, problem: Problem, seed: int) -> list[Cascade]:
        """Timed cascades of all steps of the problem; the same for the same problem and seed. Raises PlanError."""
        ...


def one_by_one(problem: Problem, plan_step: Callable[[int], list[Cascade]]) -> list[Cascade]:
    """Every step planned alone by `plan_step(number)`: steps run one after the other, nothing overlaps."""
    return concatenated(plan_step(step) for step in problem.numbers)


def concatenated(plans: Iterable[Sequence[Cascade]]) -> list[Cascade]:
    """Steps one after the other."""
    offset = 0.0
    result: list[Cascade] = []
    for plan in plans:
        result += [replace(c, start_s=c.start_s + offset, end_s=c.end_s + offset) for c in plan]
        offset = max((c.end_s for c in result), default=offset)
    return result
