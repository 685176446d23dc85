"""What a report says of a run, taken from its records one by one: memory does not grow with the length of the run.

    totals = StepTotals(count=run.metrics().count())
    for line in run.metrics():
        totals.add(line)

Counts, sums and extremes are exact; `app/report/figures.py` says how exact medians and curves are.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from actors.records.events import EnvironmentSeen, HeldOutMeasured, RunEvent, RunFinished, RunStarted
from actors.records.lines import record_of
from actors.records.metrics_line import StepMetrics
from actors.records.span_record import SpanRecord
from app.records.timeline import StepWindow, WindowTimes
from app.report.facts import (
    CASCADES,
    BucketRow,
    Deviation,
    Generation,
    StepCascade,
    is_telling,
    pieces,
    worst_deviations,
)
from app.report.figures import Curve, RunningMean, Values, mean_of
from ops.counted import by_numbers
from ops.geometry import PixelShape

MAX_GENERATIONS = 100  # listed from the start of the run, and as many from its end
MAX_SLOW = 8
MAX_DEVIATIONS = 12
MAX_ENVIRONMENTS = 12  # the newest
FIRST_EVENTS, LAST_EVENTS = 20, 60  # listed: how it began, and what it is like now


class Generations:
    """The generations of the run in their order: the first and the last ones, and how many there were."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[Generation] = []
        self._last: deque[Generation] = deque(maxlen=MAX_GENERATIONS)

    def add(self, line: StepMetrics) -> None:
        running = self._last[-1] if self._last else self._first[-1] if self._first else None
        # numbers begin anew with every start, and the workers of a generation are the same in all of its steps
        if running is not None and (running.number, running.workers) == (line.generation, line.workers):
            running.last = line.step
            return
        self.count += 1
        found = Generation(number=line.generation, first=line.step, last=line.step, workers=line.workers)
        (self._first if len(self._first) < MAX_GENERATIONS else self._last).append(found)

    @property
    def listed(self) -> list[Generation]:
        return [*self._first, *self._last]


class StepTotals:
    """All that a report says of metrics.jsonl. `count` lines are expected."""

    CURVES = (
        *("loss", "grad_norm", "lr", "d", "step_s", "predicted_s", "data_wait_s", "idle_ratio", "wir"),
        *("cv_step", "cv_compute", "cv_tflops", "mfu", "hfu", "wait_sync_s", "exposed_s"),
    )
    MEDIANS = (*CURVES[1:], "tokens_per_s", "tokens_per_s_with_text", "tflops", "fbl_s")

    def __init__(self, count: int) -> None:
        self._expected, self._half, self._tail = count, count // 2, count - max(count // 10, 1)
        self.count = self.recomputed = 0
        self.first: StepMetrics | None = None
        self.last: StepMetrics | None = None
        self.highest: StepMetrics | None = None  # by its loss
        self.seconds = self.data_wait_s = 0.0
        self.workers: set[int] = set()
        self.values = {name: Values() for name in self.MEDIANS}
        self.last_losses = Values()  # of the last tenth
        self.curves = {name: Curve(count) for name in self.CURVES}
        self.smoothed = Curve(count)
        self._smoothing = RunningMean()
        self.smoothed_by_expert: dict[str, Curve] = {}
        self._smoothing_by_expert: dict[str, RunningMean] = defaultdict(RunningMean)
        self.generations = Generations()
        self.slowest: list[tuple[float, int, StepMetrics]] = []  # a heap: seconds, minus place in the file, line
        self._halves: tuple[dict[str, list[float]], ...] = ({}, {})  # of the run: bucket -> sum and count of losses

    def add(self, line: StepMetrics) -> None:
        """Take in the next step."""
        if self.first is None:
            self.first = line
        self.last = line
        if math.isfinite(line.loss) and (self.highest is None or line.loss > self.highest.loss):
            self.highest = line
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

    @property
    def began(self) -> float:
        """Unix seconds when the first step began."""
        assert self.first is not None
        return self.first.time - (self.first.step_s if math.isfinite(self.first.step_s) else 0.0)

    def _note_slow(self, line: StepMetrics) -> None:
        place = (line.step_s, -self.count, line)
        if len(self.slowest) < MAX_SLOW:
            heapq.heappush(self.slowest, place)
        elif place[:2] > self.slowest[0][:2]:
            heapq.heapreplace(self.slowest, place)

    def _add_losses(self, line: StepMetrics) -> None:
        for name in sorted({*line.loss_by_expert, *self.smoothed_by_expert}):
            curve = self.smoothed_by_expert.setdefault(name, Curve(self._expected))
            curve.add(line.step, self._smoothing_by_expert[name].add(line.loss_by_expert.get(name, math.nan)))
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
        """(bucket, mean loss in the first half of the run, in the second), by the numbers of the names."""
        first, second = self._halves
        return [
            (name, mean_of(*first.get(name, (0.0, 0))), mean_of(*second.get(name, (0.0, 0))))
            for name in sorted({*first, *second}, key=by_numbers)
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
        self._buckets: dict[PixelShape, BucketTotals] = defaultdict(BucketTotals)
        self._errors = Values()
        self._worst: dict[StepCascade, Deviation] = {}

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
        batches: dict[PixelShape, dict[tuple[str, str], int]] = defaultdict(dict)
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
    def shapes(self) -> set[PixelShape]:
        return set(self._buckets)

    def buckets(self, tokens_of: Mapping[PixelShape, int]) -> list[BucketRow]:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceAccount:
    """Rows and draws of one source, as the ledger of the data counts them (`data/ledger.py`)."""

    name: str
    indexed: int
    planned: int
    scheduled: int
    delivered: int
    rejected: Mapping[str, int]  # reason -> rows
    skipped: Mapping[str, int]  # reason -> draws


@dataclass(frozen=True, kw_only=True, slots=True)
class DataAccount:
    """Rows and draws of all sources together, and of each; of none in records of version 0.1."""

    indexed: int
    planned: int
    scheduled: int
    delivered: int
    rejected: Mapping[str, int]
    skipped: Mapping[str, int]
    sources: tuple[SourceAccount, ...]

    @property
    def rows(self) -> tuple[SourceAccount, ...]:
        """The sources and, unless there is only one, the sum of all."""
        whole = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sources"}
        return self.sources if len(self.sources) == 1 else (*self.sources, SourceAccount(name="all", **whole))


class EventTotals:
    """What a report says of events.jsonl. Of the events that have words the first and the last ones are kept; `during`
    holds what disturbed the `slow` steps."""

    def __init__(self, slow: Sequence[StepMetrics]) -> None:
        self._slow = slow
        self.first: list[tuple[RunEvent, str]] = []
        self.last: deque[tuple[RunEvent, str]] = deque(maxlen=LAST_EVENTS)
        self.num_told = 0
        self.during: dict[int, list[str]] = {line.step: [] for line in slow}
        self.data: DataAccount | None = None  # as counted last, at a start or at the end of the run
        self.environments: deque[EnvironmentSeen] = deque(maxlen=MAX_ENVIRONMENTS)  # each unlike the one before
        self.held_out: dict[int, HeldOutMeasured] = {}  # by step; the last one where a step was computed again

    def add(self, event: RunEvent) -> None:
        if isinstance(event, RunStarted):
            self.data = record_of(DataAccount, event.data)
        elif isinstance(event, RunFinished):
            self.data = record_of(DataAccount, event.ledger) if event.ledger else self.data
        elif isinstance(event, EnvironmentSeen):
            if not self.environments or event.after(self.environments[-1]).changed:
                self.environments.append(event)
        elif isinstance(event, HeldOutMeasured):
            self.held_out.pop(event.step, None)
            self.held_out[event.step] = event
        text = event.describe()
        if text:
            self.num_told += 1
            (self.first if len(self.first) < FIRST_EVENTS else self.last).append((event, text))
        if event.disturbs:
            for line in self._slow:
                if line.time - line.step_s <= event.time <= line.time and len(self.during[line.step]) < 2:
                    self.during[line.step].append(text)
