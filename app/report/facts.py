"""What single records of a run say: deviations from the plan, work per bucket, why a step was slow. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actors.records.metrics_line import StepMetrics
from actors.records.span_record import PieceRecord, SpanRecord
from ops.geometry import PixelShape

CASCADES = ("text", "vae", "dit")
StepCascade = tuple[int, str]  # of a cascade: step of its samples, id


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

    @property
    def size(self) -> float:
        return abs(self.excess_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketRow:
    """Work done in one bucket over the whole run."""

    bucket: PixelShape
    items: int
    samples: int
    batch: float  # mean samples per cascade
    tokens: int | None  # of one sample; None when the geometry is not known here
    worker_seconds: float
    share: float  # of all cascade seconds
    text_s: float
    vae_s: float
    dit_s: float


@dataclass(kw_only=True, slots=True)
class Generation:
    """One membership of the pool: its first and last step, and how many workers it had at the end."""

    number: int
    first: int
    last: int
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UsualStep:
    """Medians of the run that a slow step is compared with."""

    step_s: float
    data_wait_s: float
    predicted_s: float


def worst_deviations(spans: Sequence[SpanRecord]) -> dict[StepCascade, Deviation]:
    """Per cascade, how far it was from its plan on the worker where it differed most."""
    worst: dict[StepCascade, Deviation] = {}
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
        if key not in worst or found.size > worst[key].size:
            worst[key] = found
    return worst


def is_telling(found: Deviation) -> bool:
    """Whether a deviation is worth showing: more than 2% of the planned time, and more than 0.1 ms."""
    return found.size > max(0.02 * found.planned_s, 1e-4)


def _longest_phase(span: SpanRecord) -> str:
    phases = {name: seconds for name, seconds in span.phases.items() if seconds > 0}
    if not phases:
        return ""
    name = max(phases, key=lambda name: phases[name])
    return f"{name} {phases[name]:.2f} s"


def pieces(span: SpanRecord) -> list[tuple[PixelShape, str, int, float]]:
    """(bucket, item, samples, share of the seconds) of what one cascade holds; seconds go by pixels. A record without
    pieces is of one bucket."""
    held = span.pieces
    if not held and span.bucket is not None:
        held = (PieceRecord(item=span.item, bucket=span.bucket, batch=span.batch),)
    pixels = [max(1, piece.batch) * math.prod(piece.bucket) for piece in held]
    return [
        (piece.bucket, piece.item, piece.batch, size / sum(pixels)) for piece, size in zip(held, pixels, strict=True)
    ]


def why_slow(line: StepMetrics, spans: Sequence[SpanRecord], told: Sequence[str], usual: UsualStep) -> str:
    """A sentence for a slow step: how slow, and what took the time. `told` says what happened to the workers then."""
    causes = [*told, *_causes(line, spans, usual)]
    because = "; ".join(causes) if causes else "no single cascade explains it"
    return f"Step {line.step} took {line.step_s:.2f} s, {line.step_s / usual.step_s:.1f}x the median: {because}."


def _causes(line: StepMetrics, spans: Sequence[SpanRecord], usual: UsualStep) -> list[str]:
    causes = []
    if line.data_wait_s - usual.data_wait_s > 0.15 * usual.step_s:
        causes.append(f"it waited {line.data_wait_s:.2f} s for data ({usual.data_wait_s:.2f} s is usual)")
    if line.predicted_s > 1.25 * usual.predicted_s:
        causes.append(
            f"its items are heavy, {line.predicted_s:.2f} s were planned ({usual.predicted_s:.2f} s is usual)"
        )
    if (late := late_cascade(spans)) and late.excess_s > 0.1 * usual.step_s:
        causes.append(
            f"on worker {late.worker}, which finished last, '{late.name}' took {late.measured_s:.2f} s "
            f"instead of {late.planned_s:.2f} s{f' ({late.phase})' if late.phase else ''}"
        )
    return causes


def late_cascade(spans: Sequence[SpanRecord]) -> Deviation | None:
    """The cascade furthest over its plan, on the worker whose own work ended last; None if all kept to their plan.
    Waiting for others is not work."""
    work = [span for span in spans if span.module in CASCADES]
    if not work:
        return None
    last_worker = max(work, key=lambda span: span.end).worker
    found = worst_deviations([span for span in work if span.worker == last_worker]).values()
    over = [deviation for deviation in found if is_telling(deviation) and deviation.excess_s > 0]
    return max(over, key=lambda deviation: deviation.excess_s, default=None)
