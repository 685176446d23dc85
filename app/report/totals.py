"""What a report says of a run, taken from its records one by one: memory does not grow with the length of the run.

    totals = StepTotals(count=run.metrics().count())
    for line in run.metrics():
        totals.add(line)

Counts, sums and extremes are exact. A median is exact up to MAX_VALUES values; beyond that it is the median of at least
half as many of them, at even distances. A curve has at most MAX_POINTS points, each the mean of its bin.
"""

from __future__ import annotations

import heapq
import math
import statistics
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.records.events import RunEvent, RunFinished, RunStarted
from actors.records.metrics_line import StepMetrics
from actors.records.span_record import SpanRecord
from app.drawing.svg import MAX_POINTS
from app.records.timeline import StepWindow, WindowTimes
from app.report.facts import (
    CASCADES,
    BucketRow,
    Deviation,
    Generation,
    Key,
    Shape,
    is_telling,
    pieces,
    worst_deviations,
)

MAX_VALUES = 100_000  # 0.8 MB for each figure
MAX_GENERATIONS = 100  # first ones and last ones that are listed
MAX_SLOW = 8
MAX_DEVIATIONS = 12
MAX_EVENTS = 60
_SMOOTHING = 0.9  # an exponential mean over about ten steps


class Values:
    """Finite values of a figure, all of them or, of very many, some at even distances."""

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
    """A figure over the steps, as a chart draws it: `count` values in at most `limit` bins."""

    def __init__(self, count: int, limit: int = MAX_POINTS) -> None:
        self._count, self._bins = count, max(1, min(count, limit))
        self._added = 0
        self._xs: list[list[float]] = []  # per bin: sum, count
        self._ys: list[list[float]] = []

    def add(self, x: float, y: float | None) -> None:
        begun = len(self._xs)
        if begun < self._bins and self._added >= round(begun * self._count / self._bins):
            self._xs.append([0.0, 0])
            self._ys.append([0.0, 0])
        self._added += 1
        for bins, value in ((self._xs, x), (self._ys, y)):
            if value is not None and math.isfinite(value):
                bins[-1][0] += value
                bins[-1][1] += 1

    @property
    def xs(self) -> list[float]:
        return [_mean(*bin_) for bin_ in self._xs]

    @property
    def ys(self) -> list[float]:
        return [_mean(*bin_) for bin_ in self._ys]


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


class Smoothed:
    """Exponential mean without the bias of its start; NaN values are stepped over."""

    def __init__(self) -> None:
        self._total = self._norm = 0.0

    def add(self, value: float) -> float:
        if math.isfinite(value):
            self._total = _SMOOTHING * self._total + (1 - _SMOOTHING) * value
            self._norm = _SMOOTHING * self._norm + (1 - _SMOOTHING)
        return self._total / self._norm if self._norm else math.nan


class Generations:
    """The generations of the run in their order: the first and the last ones, and how many there were."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[Generation] = []
        self._last: deque[Generation] = deque(maxlen=MAX_GENERATIONS)

    def add(self, line: StepMetrics) -> None:
        running = self._last[-1] if self._last else self._first[-1] if self._first else None
        if running is not None and running.number == line.generation:
            running.last, running.workers = line.step, line.workers
            return
        self.count += 1
        found = Generation(number=line.generation, first=line.step, last=line.step, workers=line.workers)
        (self._first if len(self._first) < MAX_GENERATIONS else self._last).append(found)

    @property
    def listed(self) -> list[Generation]:
        return [*self._first, *self._last]


class StepTotals:
    """All that a report says of metrics.jsonl. `count` lines are expected."""

    CURVES = ("loss", "step_s", "predicted_s", "data_wait_s", "idle_ratio", "wir", "cv_step", "cv_compute")
    MEDIANS = (*CURVES[1:], "tokens_per_s")

    def __init__(self, count: int) -> None:
        self._half, self._tail = count // 2, count - max(count // 10, 1)
        self.count = self.recomputed = 0
        self.first: StepMetrics | None = None
        self.last: StepMetrics | None = None
        self.seconds = self.data_wait_s = 0.0
        self.workers: set[int] = set()
        self.values = {name: Values() for name in self.MEDIANS}
        self.last_losses = Values()  # of the last tenth
        self.curves = {name: Curve(count) for name in self.CURVES}
        self.smoothed = Curve(count)
        self._smoothing = Smoothed()
        self.generations = Generations()
        self.slowest: list[tuple[float, int, StepMetrics]] = []  # a heap: seconds, minus place in the file, line
        self._halves: tuple[dict[str, list[float]], ...] = ({}, {})  # of the run: bucket -> sum and count of losses

    def add(self, line: StepMetrics) -> None:
        """Take in the next step."""
        if self.first is None:
            self.first = line
        self.last = line
        for name, values in self.values.items():
            values.add(getattr(line, name))
        for name, curve in self.curves.items():
            curve.add(line.step, getattr(line, name))
        self.smoothed.add(line.step, self._smoothing.add(line.loss))
        if self.count >= self._tail:
            self.last_losses.add(line.loss)
        if math.isfinite(line.step_s):
            self.seconds += line.step_s
            self._note_slow(line)
        if math.isfinite(line.data_wait_s):
            self.data_wait_s += line.data_wait_s
        if line.workers:
            self.workers.add(line.workers)
        self.recomputed += line.recomputed
        self.generations.add(line)
        self._add_losses(line)
        self.count += 1

    def _note_slow(self, line: StepMetrics) -> None:
        place = (line.step_s, -self.count, line)
        if len(self.slowest) < MAX_SLOW:
            heapq.heappush(self.slowest, place)
        elif place[:2] > self.slowest[0][:2]:
            heapq.heapreplace(self.slowest, place)

    def _add_losses(self, line: StepMetrics) -> None:
        half = self._halves[self.count >= self._half]
        for name, loss in line.loss_by_bucket.items():
            total = half.setdefault(name, [0.0, 0])
            if math.isfinite(loss):
                total[0] += loss
                total[1] += 1

    def slow(self, factor: float = 1.3) -> list[StepMetrics]:
        """The slowest of the steps that took more than `factor` times the median, in step order."""
        usual = self.values["step_s"].median
        found = [line for _, _, line in self.slowest if line.step_s > factor * usual]
        return sorted(found, key=lambda line: line.step)

    def losses_by_bucket(self) -> list[tuple[str, float, float]]:
        """(bucket, mean loss in the first half of the run, in the second), by name."""
        first, second = self._halves
        return [
            (name, _mean(*first.get(name, (0.0, 0))), _mean(*second.get(name, (0.0, 0))))
            for name in sorted({*first, *second})
        ]


@dataclass(kw_only=True, slots=True)
class BucketTotals:
    """Work done in one bucket so far."""

    items: int = 0
    samples: int = 0
    cascades: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CASCADES, 0.0))


class SpanTotals:
    """All that a report says of the last execution of every step, and whole windows of the steps in `wanted`."""

    def __init__(self, final: Mapping[int, WindowTimes], wanted: Iterable[int]) -> None:
        self._final, self._wanted = final, set(wanted)
        self.windows: dict[int, StepWindow] = {}  # of the wanted steps
        self._buckets: dict[Shape, BucketTotals] = defaultdict(BucketTotals)
        self._errors = Values()
        self._worst: dict[Key, Deviation] = {}

    def add(self, window: StepWindow) -> None:
        """Take in the next window; one that was executed again later does not count."""
        if self._final.get(window.step) != window.times:
            return
        if window.step in self._wanted:
            self.windows[window.step] = window
        for span in window.spans:
            if times := span.planned:
                self._errors.add(abs(span.seconds / (times[1] - times[0]) - 1))
        self._add_deviations(window.spans)
        self._add_buckets(window.spans)

    def _add_deviations(self, spans: Sequence[SpanRecord]) -> None:
        """Keep the cascades that differed most from their plan, each by its worst worker."""
        for key, found in worst_deviations(spans).items():
            if is_telling(found) and (key not in self._worst or found.size > self._worst[key].size):
                self._worst[key] = found
        for key in sorted(self._worst, key=lambda key: -self._worst[key].size)[MAX_DEVIATIONS:]:
            del self._worst[key]

    def _add_buckets(self, spans: Sequence[SpanRecord]) -> None:
        """A bag counts its samples once: all its workers report the same cascade, in the same window."""
        batches: dict[Shape, dict[tuple[str, str], int]] = defaultdict(dict)
        for span in spans:
            if span.module not in CASCADES:
                continue
            for bucket, item, batch, part in pieces(span):
                self._buckets[bucket].seconds[span.module] += part * span.seconds
                if span.module == "dit":
                    batches[bucket][f"{span.step}/{span.cascade}", item] = batch
        for bucket, held in batches.items():
            total = self._buckets[bucket]
            total.cascades += len(held)
            total.samples += sum(held.values())
            total.items += len({item for _, item in held})

    @property
    def plan_error(self) -> float:
        """Median |measured / planned - 1| over cascades; NaN without planned times."""
        return self._errors.median

    @property
    def deviations(self) -> list[Deviation]:
        """The largest differences between planned and measured cascade times, worst first; trifles are left out."""
        return sorted(self._worst.values(), key=lambda found: -found.size)

    @property
    def shapes(self) -> set[Shape]:
        return set(self._buckets)

    def buckets(self, tokens_of: Mapping[Shape, int]) -> list[BucketRow]:
        """Samples, batch size, tokens and seconds of each bucket, heaviest first."""
        total = sum(sum(found.seconds.values()) for found in self._buckets.values()) or 1.0
        rows = [
            BucketRow(
                bucket=bucket,
                items=found.items,
                samples=found.samples,
                batch=found.samples / found.cascades if found.cascades else 0.0,
                tokens=tokens_of.get(bucket),
                worker_seconds=sum(found.seconds.values()),
                share=sum(found.seconds.values()) / total,
                text_s=found.seconds["text"],
                vae_s=found.seconds["vae"],
                dit_s=found.seconds["dit"],
            )
            for bucket, found in self._buckets.items()
        ]
        return sorted(rows, key=lambda row: -row.worker_seconds)


class EventTotals:
    """The first events that have words, how many there are, what disturbed the `slow` steps, and the last ledger."""

    def __init__(self, slow: Sequence[StepMetrics]) -> None:
        self._slow = slow
        self.told: list[tuple[RunEvent, str]] = []
        self.num_told = 0
        self.during: dict[int, list[str]] = {line.step: [] for line in slow}
        self.ledger: Mapping[str, Any] = {}  # what became of the data, as told last: at a start, or at the end

    def add(self, event: RunEvent) -> None:
        if isinstance(event, RunStarted):
            self.ledger = event.data
        elif isinstance(event, RunFinished):
            self.ledger = event.ledger
        text = event.describe()
        if text:
            self.num_told += 1
            if len(self.told) < MAX_EVENTS:
                self.told.append((event, text))
        if event.disturbs:
            for line in self._slow:
                if line.time - line.step_s <= event.time <= line.time and len(self.during[line.step]) < 2:
                    self.during[line.step].append(text)
