"""What a committed step writes: its line of metrics and its bars of the timeline, from the reports of its workers.

idle_ratio  1 - busy / (workers * step time), busy: inside a cascade     Arachne sec. 2; the gradient sum is idle
Of a packed cascade (several items in one) every number is the sum over its pieces.

cv_step     (len_max - len_min) / len_max of tokens per worker         AdaptiveLoad sec. 4.1
cv_compute  standard deviation / mean of B S^2 per worker              AdaptiveLoad sec. 4.1
wir         largest / smallest DiT seconds per worker                  KnapFormer sec. 4 (workload imbalance ratio)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.messages import Piece, Span, StepReport
from actors.plan.types import StepPlan
from actors.records.metrics_line import StepMetrics
from actors.records.span_record import PieceRecord, SpanRecord
from actors.step import CollectedStep
from ops.geometry import Geometry


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """What the controller knows of a step besides the workers' reports."""

    step: int
    generation: int
    plan: StepPlan
    planning_s: float
    step_s: float  # from the end of the previous step to the end of this one
    data_wait_s: float  # the workers had no step because the next one's clips were not decoded yet
    finished_at: float  # unix seconds
    num_samples: int
    num_tokens: int
    dispatch_s: float  # the controller's time to submit the step's calls
    num_calls: int


@dataclass(kw_only=True)
class StepAccount:
    """Turns collected steps into records, in the order in which they are committed."""

    geometry: Geometry
    node_of: Callable[[str], str]  # of a worker, as people read it
    _last_ended_at: float = 0.0  # unix seconds: when the step before the next one ended, or the generation began
    _data_wait_s: float = 0.0  # since the last committed step

    def begin(self, at: float) -> None:
        """The run or a generation begins (unix seconds): its first step is counted from here."""
        self._last_ended_at = at

    def waited_for_data(self, seconds: float) -> None:
        """The workers had nothing to do meanwhile; the next committed step says so."""
        self._data_wait_s += seconds

    def records(self, done: CollectedStep) -> tuple[StepMetrics, list[SpanRecord]]:
        """The line of metrics.jsonl and the lines of timeline.jsonl. To be called once per committed step."""
        started, self._last_ended_at = self._last_ended_at, done.collected_at
        facts = self._facts(done, started)
        self._data_wait_s = 0.0
        begin = min((s.start for r in done.reports for s in r.spans if s.module != "finish"), default=started)
        timeline = [
            record for r in done.reports for record in timeline_records(facts, r, self.node_of(r.worker), begin)
        ]
        return step_metrics(facts, done.reports, self.geometry), timeline

    def _facts(self, done: CollectedStep, started: float) -> StepFacts:
        running, samples = done.running, done.running.data.samples
        return StepFacts(
            step=running.step,
            generation=running.generation,
            plan=running.assignment.step,
            planning_s=running.planning_s,
            step_s=done.collected_at - started,
            data_wait_s=self._data_wait_s,
            finished_at=done.collected_at,
            num_samples=sum(len(s) for s in samples.samples.values()),
            dispatch_s=running.dispatch_s,
            num_calls=running.num_calls,
            num_tokens=sum(len(s) * self.geometry.tokens(*samples.buckets[i]) for i, s in samples.samples.items()),
        )


def step_metrics(facts: StepFacts, reports: Sequence[StepReport], geometry: Geometry) -> StepMetrics:
    """One line of metrics.jsonl."""
    first = reports[0]
    spans = {r.worker: r.spans for r in reports}
    busy = [
        sum(s.end - s.start for s in of)
        for of in ([s for s in spans_ if s.module != "finish"] for spans_ in spans.values())
    ]
    tokens = [_tokens(of, geometry) for of in spans.values()]
    compute = [_pressure(of, geometry) for of in spans.values()]
    dit = [sum(s.end - s.start for s in of if s.module == "dit") for of in spans.values()]
    step_s = max(facts.step_s, 1e-9)
    finish = [s for of in spans.values() for s in of if s.module == "finish"]
    return StepMetrics(
        step=facts.step,
        time=facts.finished_at,
        loss=first.loss,
        grad_norm=first.grad_norm,
        lr=first.lr,
        workers=len(reports),
        generation=facts.generation,
        step_s=round(facts.step_s, 6),
        data_wait_s=round(facts.data_wait_s, 6),
        idle_ratio=round(max(0.0, 1 - sum(busy) / (len(reports) * step_s)), 4),
        cv_step=round((max(tokens) - min(tokens)) / max(tokens), 4) if max(tokens) else 0.0,
        cv_compute=round(statistics.pstdev(compute) / statistics.fmean(compute), 4) if any(compute) else 0.0,
        wir=round(max(dit) / min(dit), 4) if min(dit) > 0 else None,
        tokens_per_s=round(facts.num_tokens / step_s, 1),
        videos_per_s=round(facts.num_samples / step_s, 3),
        predicted_s=round(facts.plan.makespan_s, 6),
        planning_s=round(facts.planning_s, 6),
        sync_s=round(max((s.end - s.start for s in finish), default=0.0), 6),
        snapshot_s=round(max((r.snapshot_s for r in reports), default=0.0), 6),
        handoff_bytes=sum(s.handoff_bytes for of in spans.values() for s in of),
        handoff_s=round(handoff_seconds([s for of in spans.values() for s in of]), 6),
        peak_memory_gib=round(max(r.peak_memory_gib for r in reports), 3),
        rss_gib=round(max(r.rss_gib for r in reports), 3),
        dispatch_s=round(facts.dispatch_s, 6),
        calls=facts.num_calls,
        applied=first.applied,
        good_weight=round(first.weight, 6),
        loss_by_bucket=loss_by_bucket(reports),
    )


def loss_by_bucket(reports: Sequence[StepReport]) -> dict[str, float]:
    """Mean loss of each bucket's samples in this step. Every rank of a bag reports its share, so shares are summed."""
    weighted: dict[str, float] = {}
    weights: dict[str, float] = {}
    buckets: dict[str, str] = {}
    for report in reports:
        for piece in _pieces(report.spans):
            buckets[piece.item] = "x".join(map(str, piece.bucket))
    for report in reports:
        for item, loss, weight in report.item_losses:
            bucket = buckets.get(item)
            if bucket is not None:
                weighted[bucket] = weighted.get(bucket, 0.0) + loss
                weights[bucket] = weights.get(bucket, 0.0) + weight
    return {b: round(weighted[b] / weights[b], 6) for b in sorted(weighted) if weights[b] > 0}


def handoff_seconds(spans: Sequence[Span]) -> float:
    """Seconds that cascades spent on getting encode results; of a bag the quickest rank, the others wait for peers."""
    quickest: dict[str, float] = {}
    for span in spans:
        if span.handoff_bytes:
            quickest[span.cascade] = min(quickest.get(span.cascade, span.handoff_s), span.handoff_s)
    return sum(quickest.values())


def timeline_records(facts: StepFacts, report: StepReport, node: str, step_start: float) -> list[SpanRecord]:
    """Lines of timeline.jsonl for one worker."""
    return [
        SpanRecord(
            step=s.step,
            worker=report.worker,
            node=node,
            name=s.name,
            module=s.module,
            cascade=s.cascade,
            item=s.item,
            bucket=s.bucket,
            pieces=tuple(PieceRecord(item=p.item, bucket=p.bucket, batch=p.batch) for p in s.pieces),
            batch=s.batch,
            degree=s.degree,
            start=s.start,
            end=s.end,
            planned_start_s=s.planned_start_s,
            planned_end_s=s.planned_end_s,
            step_start=step_start,
            generation=facts.generation,
            phases={k: round(v, 6) for k, v in s.phases.items()},
            handoff_bytes=s.handoff_bytes,
            handoff_s=round(s.handoff_s, 6),
        )
        for s in report.spans
    ]


def _pieces(spans: Sequence[Span]) -> list[Piece]:
    return [piece for span in spans if span.module == "dit" for piece in span.pieces]


def _tokens(spans: Sequence[Span], geometry: Geometry) -> float:
    dit = [s for s in spans if s.module == "dit"]
    return sum(p.batch * geometry.tokens(*p.bucket) / s.degree for s in dit for p in s.pieces)


def _pressure(spans: Sequence[Span], geometry: Geometry) -> float:
    dit = [s for s in spans if s.module == "dit"]
    return sum(p.batch * geometry.tokens(*p.bucket) ** 2 / s.degree for s in dit for p in s.pieces)
