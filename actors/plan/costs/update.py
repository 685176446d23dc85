"""What the end of a step takes: gradient sum, optimizer update, new parameters for all. Measured, and a law between.

After a step's last backward pass every worker waits for the sum of all gradients, updates its range of the flat vector
(ZeRO-1, Rajbhandari et al. 2020, sec. 5.1) and gathers those of the others. With N workers the update is 1 / N of the
weights and what a worker sends (N - 1) / N of them. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from actors.plan.costs.fit import nonnegative_fit
from actors.plan.types import refuse_below, refuse_unless_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePoint:
    """Seconds from the last backward of all workers to new parameters on each."""

    workers: int
    nodes: int = 1
    seconds: float
    count: int = 0  # steps of a run that it is the median of; 0: measured by a benchmark

    def __post_init__(self) -> None:
        refuse_below(1, self, "workers", "nodes")
        refuse_below(0, self, "count")
        refuse_unless_positive(self, "seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateCosts:
    """What is known of the end of a step, for one way to do it and one number of trained weights."""

    kind: str = ""  # engine, precision, EMA, places of gradients and state (`update_kind`)
    weights: int = 0
    points: tuple[UpdatePoint, ...] = ()

    def of_run(self, kind: str, weights: int) -> UpdateCosts:
        """These costs for a run: without points where it ends its steps in another way, or trains other weights."""
        if (self.kind, self.weights) == (kind, weights):
            return self
        return UpdateCosts(kind=kind, weights=weights)

    def with_point(self, point: UpdatePoint) -> UpdateCosts:
        """The costs with this point in place of what was known of as many workers on as many nodes."""
        place = (point.workers, point.nodes)
        others = [one for one in self.points if (one.workers, one.nodes) != place]
        return replace(self, points=tuple(sorted([*others, point], key=lambda one: (one.nodes, one.workers))))

    def seconds(self, workers: int, nodes: int = 1) -> float | None:
        """Seconds of the end of a step: as measured, else by the law a / N + b (N - 1) / N + c through the points of as
        many nodes, or of any where there are none (b and c would be those of another network). None where nothing is
        known."""
        for point in self.points:
            if (point.workers, point.nodes) == (workers, nodes):
                return point.seconds
        points = [one for one in self.points if (one.nodes > 1) == (nodes > 1)] or list(self.points)
        if not points:
            return None
        if len(points) == 1:  # one of several workers mostly sends, which hardly changes with their number
            return points[0].seconds / (workers if points[0].workers == 1 else 1)
        columns = np.array([_features(one.workers) for one in points])
        found = nonnegative_fit(columns, np.array([one.seconds for one in points]))
        return float(np.array(_features(workers)) @ found)


def _features(workers: int) -> tuple[float, ...]:
    return 1.0 / workers, (workers - 1) / workers, 1.0
