"""A figure of a run of any length in bounded memory: its median, its curve, its smoothed curve.

A median is exact up to MAX_VALUES values; beyond that it is the median of at least half as many of them, at even
distances. A curve has at most MAX_POINTS points, each the mean of its bin, and knows the least and most of each: one
step of a month is no part of a mean.
"""

from __future__ import annotations

import math
import statistics
from array import array

from app.drawing.svg import MAX_POINTS

MAX_VALUES = 100_000  # 0.8 MB for each figure
_SMOOTHING = 0.9  # an exponential mean over about ten steps


class Values:
    """Finite values of a figure: all of them or, if there are very many, every n-th."""

    def __init__(self, limit: int = MAX_VALUES) -> None:
        self.kept = array("d")
        self._limit, self._every, self._seen = limit, 1, 0

    def add(self, value: float | None) -> None:
        if value is None or not math.isfinite(value):
            return
        if self._seen % self._every == 0:
            self.kept.append(value)
            if len(self.kept) > self._limit:
                self.kept, self._every = self.kept[::2], 2 * self._every
        self._seen += 1

    @property
    def median(self) -> float:
        return statistics.median(self.kept) if self.kept else math.nan


class Curve:
    """A figure over the steps, as a chart draws it: `count` values in at most MAX_POINTS bins."""

    def __init__(self, count: int) -> None:
        self._count, self._bins = count, max(1, min(count, MAX_POINTS))
        self._added = 0
        self._xs: list[list[float]] = []  # per bin: sum, count
        self._ys: list[list[float]] = []
        self._ranges: list[list[float]] = []  # per bin: least and most value

    def add(self, x: float, y: float | None) -> None:
        begun = len(self._xs)
        if begun < self._bins and self._added >= round(begun * self._count / self._bins):
            self._xs.append([0.0, 0])
            self._ys.append([0.0, 0])
            self._ranges.append([math.inf, -math.inf])
        self._added += 1
        for bins, value in ((self._xs, x), (self._ys, y)):
            if value is not None and math.isfinite(value):
                bins[-1][0] += value
                bins[-1][1] += 1
        if y is not None and math.isfinite(y):
            held = self._ranges[-1]
            held[0], held[1] = min(held[0], y), max(held[1], y)

    @property
    def xs(self) -> list[float]:
        return [mean_of(*bin_) for bin_ in self._xs]

    @property
    def ys(self) -> list[float]:
        return [mean_of(*bin_) for bin_ in self._ys]

    @property
    def ranges(self) -> list[tuple[float, float]]:
        """Least and most value of each bin; empty where every bin has one."""
        return [(low, high) for low, high in self._ranges] if self._added > self._bins else []


class RunningMean:
    """Exponential mean without the bias of its start; NaN values are stepped over."""

    def __init__(self) -> None:
        self._total = self._norm = 0.0

    def add(self, value: float) -> float:
        if math.isfinite(value):
            self._total = _SMOOTHING * self._total + (1 - _SMOOTHING) * value
            self._norm = _SMOOTHING * self._norm + (1 - _SMOOTHING)
        return self._total / self._norm if self._norm else math.nan


def mean_of(total: float, count: float) -> float:
    """The mean of `count` values, NaN of none."""
    return total / count if count else math.nan
