"""What a run's records say: totals, deviations from the plan, why steps were slow, work per bucket. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actors.records.events import RunEvent
from actors.records.metrics_line import StepMetrics
from actors.records.span_record import PieceRecord, SpanRecord
from app.timeline import StepWindow

CASCADES = ("text", "vae", "dit")


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """A cascade that took another time than planned, on the worker where it differed most."""

    step: int
    worker: str
    name: str
    planned_s: float
    measured_s: float
    phase: str = ""  # the longest part of it and its seconds, e.g. "backward 2.10 s"

    @property
    def excess_s(self) -> float:
        return self.measured_s - self.planned_s


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketRow:
    """Work done in one bucket over the whole run."""

    bucket: tuple[int, int, int]
    items: int
    samples: int
    batch: float  # mean samples per cascade
    tokens: int | None  # of one sample; None when the geometry is not known here
    worker_seconds: float
    share: float  # of all cascade seconds
    text_s: float
    vae_s: float
    dit_s: float


def median(values: Iterable[float]) -> float:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def column(metrics: Sequence[StepMetrics], name: str) -> list[float]:
    """A figure of every step; NaN where it is missing."""
    return [math.nan if (value := getattr(line, name)) is None else value for line in metrics]


def deviations(spans: Sequence[SpanRecord], limit: int = 12) -> list[Deviation]:
    """The largest differences between planned and measured cascade times, worst first; trifles are left out."""
    worst: dict[tuple[int, str], Deviation] = {}
    for span in spans:
        times = span.planned
        if times is None:
            continue
        found = Deviation(
            step=span.step,
            worker=span.worker,
            name=span.name,
            planned_s=times[1] - times[0],
            measured_s=span.seconds,
            phase=_longest_phase(span),
        )
        key = (span.step, span.cascade)
        if key not in worst or abs(found.excess_s) > abs(worst[key].excess_s):
            worst[key] = found
    telling = [d for d in worst.values() if abs(d.excess_s) > max(0.02 * d.planned_s, 1e-4)]
    return sorted(telling, key=lambda d: -abs(d.excess_s))[:limit]


def _longest_phase(span: SpanRecord) -> str:
    phases = {name: seconds for name, seconds in span.phases.items() if seconds > 0}
    if not phases:
        return ""
    name = max(phases, key=lambda name: phases[name])
    return f"{name} {phases[name]:.2f} s"


def buckets(spans: Sequence[SpanRecord], tokens_of: dict[tuple[int, int, int], int]) -> list[BucketRow]:
    """Samples, batch size, tokens and seconds of each bucket, heaviest first. A bag counts its samples once."""
    seconds: dict[tuple[int, int, int], dict[str, float]] = defaultdict(lambda: dict.fromkeys(CASCADES, 0.0))
    cascades: dict[tuple[int, int, int], dict[tuple[int, str], int]] = defaultdict(dict)
    items: dict[tuple[int, int, int], set[str]] = defaultdict(set)
    for span in spans:
        if span.module not in CASCADES:
            continue
        for bucket, item, batch, part in pieces(span):
            seconds[bucket][span.module] += part * span.seconds
            if span.module == "dit":
                cascades[bucket][(span.step, f"{span.cascade}/{item}")] = batch
                items[bucket].add(item)
    total = sum(sum(parts.values()) for parts in seconds.values()) or 1.0
    rows = []
    for bucket, parts in seconds.items():
        batches = list(cascades[bucket].values())
        worker_seconds = sum(parts.values())
        rows.append(
            BucketRow(
                bucket=bucket,
                items=len(items[bucket]),
                samples=sum(batches),
                batch=sum(batches) / len(batches) if batches else 0.0,
                tokens=tokens_of.get(bucket),
                worker_seconds=worker_seconds,
                share=worker_seconds / total,
                text_s=parts["text"],
                vae_s=parts["vae"],
                dit_s=parts["dit"],
            )
        )
    return sorted(rows, key=lambda row: -row.worker_seconds)


def pieces(span: SpanRecord) -> list[tuple[tuple[int, int, int], str, int, float]]:
    """(bucket, item, samples, share of the seconds) of what one cascade holds; seconds go by pixels. A record without
    pieces is of one bucket."""
    held = span.pieces
    if not held and span.bucket is not None:
        held = (PieceRecord(item=span.item, bucket=span.bucket, batch=span.batch),)
    pixels = [max(1, piece.batch) * math.prod(piece.bucket) for piece in held]
    return [
        (piece.bucket, piece.item, piece.batch, size / sum(pixels)) for piece, size in zip(held, pixels, strict=True)
    ]


def slow_steps(
    metrics: Sequence[StepMetrics],
    executed: Sequence[StepWindow],
    events: Sequence[RunEvent],
    factor: float = 1.3,
    limit: int = 8,
) -> list[str]:
    """A sentence for each of the slowest steps: how slow, and what took the time."""
    usual = median(column(metrics, "step_s"))
    if not math.isfinite(usual):
        return []
    slow = sorted((line for line in metrics if line.step_s > factor * usual), key=lambda line: -line.step_s)[:limit]
    spans_of = {window.step: window.spans for window in executed}
    usual_wait = median(column(metrics, "data_wait_s"))
    usual_plan = median(column(metrics, "predicted_s"))
    sentences = []
    for line in sorted(slow, key=lambda line: line.step):
        causes = _causes(line, spans_of.get(line.step, ()), events, usual, usual_wait, usual_plan)
        because = "; ".join(causes) if causes else "no single cascade explains it"
        sentences.append(
            f"Step {line.step} took {line.step_s:.2f} s, {line.step_s / usual:.1f}x the median: {because}."
        )
    return sentences


def _causes(
    line: StepMetrics,
    spans: Sequence[SpanRecord],
    events: Sequence[RunEvent],
    usual: float,
    usual_wait: float,
    usual_plan: float,
) -> list[str]:
    causes = _event_causes(line, events)
    if math.isfinite(usual_wait) and line.data_wait_s - usual_wait > 0.15 * usual:
        causes.append(f"it waited {line.data_wait_s:.2f} s for data ({usual_wait:.2f} s is usual)")
    if math.isfinite(usual_plan) and line.predicted_s > 1.25 * usual_plan:
        causes.append(f"its items are heavy, {line.predicted_s:.2f} s were planned ({usual_plan:.2f} s is usual)")
    if (late := late_cascade(spans)) and late.excess_s > 0.1 * usual:
        causes.append(
            f"on worker {late.worker}, which finished last, '{late.name}' took {late.measured_s:.2f} s "
            f"instead of {late.planned_s:.2f} s{f' ({late.phase})' if late.phase else ''}"
        )
    return causes


def _event_causes(line: StepMetrics, events: Sequence[RunEvent]) -> list[str]:
    """What happened to the workers during the step."""
    began = line.time - line.step_s
    during = [event for event in events if began <= event.time <= line.time and event.disturbs]
    return [event.describe() for event in during[:2]]


def late_cascade(spans: Sequence[SpanRecord]) -> Deviation | None:
    """On the worker whose own work ended last: the cascade furthest over its plan. Waiting for others is not work."""
    work = [span for span in spans if span.module in CASCADES]
    if not work:
        return None
    last_worker = max(work, key=lambda span: span.end).worker
    found = deviations([span for span in work if span.worker == last_worker])
    over = [deviation for deviation in found if deviation.excess_s > 0]
    return over[0] if over else None


def plan_error(spans: Sequence[SpanRecord]) -> float:
    """Median |measured / planned - 1| over cascades; NaN without planned times."""
    errors = []
    for span in spans:
        if times := span.planned:
            errors.append(abs(span.seconds / (times[1] - times[0]) - 1))
    return median(errors)


def generations(metrics: Sequence[StepMetrics]) -> list[tuple[int, int, int, int]]:
    """(generation, first step, last step, workers) of the run."""
    rows: list[tuple[int, int, int, int]] = []
    for line in metrics:
        if rows and rows[-1][0] == line.generation:
            rows[-1] = (line.generation, rows[-1][1], line.step, line.workers)
        else:
            rows.append((line.generation, line.step, line.step, line.workers))
    return rows


def smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential mean without the bias of its start; NaN values are stepped over."""
    result, total, norm = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            total = weight * total + (1 - weight) * value
            norm = weight * norm + (1 - weight)
        result.append(total / norm if norm else math.nan)
    return result
