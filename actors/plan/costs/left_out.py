"""How well a way to price cascades prices points that it has not seen: what chooses between ways that fit poorly.

R^2 asks how much of the differences between points is explained. Where launches are most of every cascade there are
hardly any, and R^2 is near 0 however small the errors are. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.plan.costs.forms import Load

_FOLDS = 10  # parts of the points, each of which is left out once; of fewer points every one
_LEAST_S = 1e-12

Pricing = Callable[[Load], float]  # seconds of a load


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Errors at points that were left out: relative ones, and what counts, the mean of |log(price / measured)|, in
    which half of what is measured is as wrong as twice."""

    median: float
    worst: float
    log_error: float

    def __str__(self) -> str:
        return f"{self.median:.0%} (median; worst {self.worst:.0%})"


def left_out(
    made_from: Callable[[Sequence[Load], Sequence[float]], Pricing], loads: Sequence[Load], seconds: Sequence[float]
) -> LeftOut:
    """The errors of prices that are `made_from` the other points. Needs two points at least."""
    folds = min(_FOLDS, len(loads))
    errors, logs = [], []
    for fold in range(folds):
        rest = [number for number in range(len(loads)) if number % folds != fold]
        price = made_from([loads[number] for number in rest], [seconds[number] for number in rest])
        for number in range(fold, len(loads), folds):
            ratio = max(price(loads[number]), _LEAST_S) / seconds[number]
            errors.append(abs(ratio - 1.0))
            logs.append(abs(math.log(ratio)))
    return LeftOut(median=statistics.median(errors), worst=max(errors), log_error=statistics.mean(logs))
