"""What a committed step writes: its line of metrics and its bars of the timeline, from the reports of its workers.

Of a packed cascade (several items in one) every number is the sum over its pieces; S are text and video tokens, as
plans count them.

idle_ratio    1 - busy / (workers * step time), busy: inside a cascade    Arachne sec. 2; the gradient sum is idle
cv_step       (len_max - len_min) / len_max of tokens per worker        AdaptiveLoad sec. 4.1
cv_compute    standard deviation / mean of B S^2 per worker             AdaptiveLoad sec. 4.1, 4.3.2
wir           largest / smallest seconds of DiT work per worker         KnapFormer sec. 4 (workload imbalance ratio)
tflops        computed FLOPs of a worker's DiT cascades / step time     Arachne Fig. 10; with recomputation
cv_tflops     their standard deviation / mean over the workers          Arachne Fig. 10, 11
mfu           model FLOPs / (step time * sum of peaks)                  PaLM, appendix B; without recomputation
fbl_s         first DiT cascade's start to the last one's end           KnapFormer sec. 4.2 (forward-backward latency)
hfu           computed FLOPs / (fbl_s * sum of peaks)                   KnapFormer sec. 4.2: F + 2F + F recomputed
wait_sync_s   waiting for a bag, and for the last at the gradient sum   AdaptiveLoad sec. 3.2, mean of the workers
exposed_s     waiting for results of collectives after all have come    ScaleFusion sec. 4.3; of idle fetches, too
              mfu, hfu, tflops, wait_sync and exposed also of each worker, against its own peak
corr_tokens   Pearson's r of step time and tokens, last 200 steps       AdaptiveLoad sec. 3.2: 0.35 there
corr_load     the same of step time and sum of B S^p, for the best p    AdaptiveLoad sec. 3.2: 0.92 there
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from actors.messages import Span, StepReport
from actors.plan.costs.flops import DiTWork
from actors.plan.measures import (
    EXPONENTS,
    correlation,
    cv_step,
    flops_utilization,
    variation,
    wait_sync,
    workload_imbalance,
)
from actors.plan.types import StepPlan
from actors.planning.observations import work_of
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
    text_tokens: Mapping[str, int] = field(default_factory=dict)  # by item: mean of a sample
    experts: Mapping[str, str] = field(default_factory=dict)  # by item: which of two is trained on it; {}: there is one
    epoch: float | None = None  # how often a sample has been drawn on average when the step ends


class LoadHistory:
    """Seconds of the last steps beside their tokens and their loads B S^p: does time follow the one or the other?"""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, tuple[float, ...]]] = deque(maxlen=200)

    def add(self, seconds: float, samples: Iterable[tuple[int, int]]) -> None:
        """A step of these items: (number of samples, tokens of each)."""
        counted = list(samples)
        tokens = float(sum(count * length for count, length in counted))
        loads = tuple(sum(count * float(length) ** p for count, length in counted) for p in EXPONENTS)
        self._steps.append((seconds, tokens, loads))

    def clear(self) -> None:
        """Other workers run the next steps."""
        self._steps.clear()

    @property
    def with_tokens(self) -> float | None:
        """Correlation of step time with tokens."""
        return correlation([tokens for _, tokens, _ in self._steps], [seconds for seconds, _, _ in self._steps])

    @property
    def with_load(self) -> tuple[float, float] | None:
        """(correlation of step time with B S^p, p): p by grid search, as AdaptiveLoad fits it (sec. 3.2)."""
        seconds = [seconds for seconds, _, _ in self._steps]
        found = [
            (r, p)
            for n, p in enumerate(EXPONENTS)
            if (r := correlation([loads[n] for _, _, loads in self._steps], seconds)) is not None
        ]
        return max(found, default=None)


@dataclass(kw_only=True)
class StepAccount:
    """Turns collected steps into records, in the order in which they are committed."""

    geometry: Geometry
    node_of: Callable[[str], str]  # by a worker's name: its node, as people read it
    work: DiTWork | None = None  # of the run's transformer
    experts: tuple[str, ...] = ()  # names of the transformers that are trained, by the numbers that items give them
    _history: LoadHistory = field(default_factory=LoadHistory, init=False)
    # monotonic seconds: when the step before the next one ended, or the generation began
    _last_ended_at: float = field(default=0.0, init=False)
    _data_wait_s: float = field(default=0.0, init=False)  # since the last committed step

    def begin(self, at: float) -> None:
        """The run or a generation begins (monotonic seconds): its first step is counted from here."""
        self._last_ended_at = at
        self._history.clear()

    def waited_for_data(self, seconds: float) -> None:
        """The workers had nothing to do meanwhile; the next committed step says so."""
        self._data_wait_s += seconds

    def records(self, done: CollectedStep) -> tuple[StepMetrics, list[SpanRecord]]:
        """The line of metrics.jsonl and the lines of timeline.jsonl. To be called once per committed step."""
        step_s, self._last_ended_at = done.collected_at - self._last_ended_at, done.collected_at
        facts = self._facts(done, step_s)
        self._data_wait_s = 0.0
        begin = begin_of(done.reports, done.finished_at - step_s)
        told: dict[str, Contents] = {}
        timeline = [
            record for r in done.reports for record in timeline_records(facts, r, self.node_of(r.worker), begin, told)
        ]
        return step_metrics(facts, done.reports, self.geometry, self.work, self._history), timeline

    def _facts(self, done: CollectedStep, step_s: float) -> StepFacts:
        running, items = done.running, done.running.data.items.planned
        return StepFacts(
            step=running.step,
            generation=running.generation,
            plan=running.assignment.step,
            planning_s=running.planning_s,
            step_s=step_s,
            data_wait_s=self._data_wait_s,
            finished_at=done.finished_at,
            num_samples=sum(item.batch for item in items),
            dispatch_s=running.dispatch_s,
            num_calls=running.num_calls,
            num_tokens=sum(i.batch * self.geometry.tokens(i.frames, i.height, i.width) for i in items),
            text_tokens={item.id: item.text_tokens for item in items},
            epoch=running.data.epoch,
            experts={item.id: self.experts[item.expert] for item in items} if len(self.experts) > 1 else {},
        )


def begin_of(reports: Sequence[StepReport], started: float) -> float:
    """When the first cascade of a step began (unix seconds), from where planned times count; `started` without one. An
    encode that outlasted the step before was planned to begin in that one, at less than 0 s of this one."""
    own = [s for r in reports for s in r.spans if s.module != "finish" and s.planned_start_s >= 0]
    return min((s.start for s in own), default=started)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """What each worker of a step has done; every list is in the order of the reports."""

    cascades: list[list[Span]]
    ends: list[Span]  # of the step
    dits: list[Span]  # of all workers
    sizes: Mapping[str, SampleSize]  # by item
    tokens: list[float]
    load: list[float]  # B S^2
    trained: list[float]  # TFLOP of forward and backward; 0 where nobody counts
    computed: list[float]  # the same with recomputation
    waits: list[float]  # seconds, for others
    exposed: list[float]  # seconds of communication that no computation hid

    @staticmethod
    def of(
        reports: Sequence[StepReport], text_tokens: Mapping[str, int], geometry: Geometry, work: DiTWork | None
    ) -> StepWork:
        cascades = [[s for s in r.spans if s.module != "finish"] for r in reports]
        ends = [s for r in reports for s in r.spans if s.module == "finish"]
        sizes = sizes_of((s for of in cascades for s in of), text_tokens, geometry, work)
        samples = [worker_load(of, sizes) for of in cascades]
        waits = wait_of(cascades, ends)
        return StepWork(
            cascades=cascades,
            ends=ends,
            dits=[s for of in cascades for s in of if s.module == "dit"],
            sizes=sizes,
            tokens=[sum(n * size.length for n, size in of) for of in samples],
            load=[sum(n * size.length**2 for n, size in of) for of in samples],
            trained=[sum(n * size.trained_tflop for n, size in of) for of in samples],
            computed=[sum(n * size.computed_tflop for n, size in of) for of in samples],
            waits=waits,
            exposed=exposed_of([r.spans for r in reports], waits),
        )

    @property
    def busy_s(self) -> float:
        """Seconds inside cascades, of all workers."""
        return sum(s.end - s.start for of in self.cascades for s in of)

    @property
    def fbl_s(self) -> float:
        """Seconds from the first DiT cascade's start to the last one's end."""
        return max((s.end for s in self.dits), default=0.0) - min((s.start for s in self.dits), default=0.0)


def step_metrics(
    facts: StepFacts,
    reports: Sequence[StepReport],
    geometry: Geometry,
    work: DiTWork | None = None,
    history: LoadHistory | None = None,
) -> StepMetrics:
    """One line of metrics.jsonl. It has FLOPs where `work` counts them, correlations with a `history`, which learns
    of this step."""
    first, done = reports[0], StepWork.of(reports, facts.text_tokens, geometry, work)
    step_s, fbl_s = max(facts.step_s, 1e-9), done.fbl_s
    spans = [s for r in reports for s in r.spans]
    peaks = [r.peak_tflops for r in reports] if work else []

    def of_workers(values: Iterable[float | None], digits: int = 6) -> dict[str, float]:
        each = zip(reports, values, strict=True)
        return {r.worker: round(value, digits) for r, value in each if value is not None}

    def utilization(tflop: Sequence[float], seconds: float) -> dict[str, float]:
        each = zip(tflop, peaks, strict=True)
        return of_workers((flops_utilization(own, seconds, [peak]) for own, peak in each), 4) if work else {}

    if history is not None and done.dits:
        history.add(facts.step_s, _samples_of(done.dits, done.sizes))
    with_load = history.with_load if history is not None else None
    return StepMetrics(
        step=facts.step,
        time=facts.finished_at,
        loss=first.loss,
        grad_norm=first.grad_norm,
        lr=first.lr,
        d=first.d,
        workers=len(reports),
        generation=facts.generation,
        step_s=round(facts.step_s, 6),
        data_wait_s=round(facts.data_wait_s, 6),
        idle_ratio=round(max(0.0, 1 - done.busy_s / (len(reports) * step_s)), 4),
        cv_step=round(cv_step(done.tokens), 4),
        cv_compute=round(variation(done.load), 4),
        wir=_rounded(workload_imbalance([sum(work_of(s) for s in of if s.module == "dit") for of in done.cascades])),
        tokens_per_s=round(facts.num_tokens / step_s, 1),
        videos_per_s=round(facts.num_samples / step_s, 3),
        predicted_s=round(facts.plan.seconds, 6),
        planning_s=round(facts.planning_s, 6),
        sync_s=round(max((s.end - s.start for s in done.ends), default=0.0), 6),
        snapshot_s=round(max((r.snapshot_s for r in reports), default=0.0), 6),
        handoff_bytes=sum(s.handoff_bytes for s in spans),
        handoff_s=round(handoff_seconds(spans), 6),
        peak_memory_gib=round(max(r.peak_memory_gib for r in reports), 3),
        rss_gib=round(max(r.rss_gib for r in reports), 3),
        dispatch_s=round(facts.dispatch_s, 6),
        calls=facts.num_calls,
        applied=first.applied,
        good_weight=round(first.weight, 6),
        loss_by_bucket=loss_by_bucket(reports),
        room_gib=min((round(r.room_gib, 6) for r in reports if r.room_gib is not None), default=None),
        tokens=round(sum(done.tokens)),
        tokens_per_s_with_text=round(sum(done.tokens) / step_s, 1),
        fbl_s=round(fbl_s, 6),
        mfu=_rounded(flops_utilization(sum(done.trained), step_s, peaks)),
        hfu=_rounded(flops_utilization(sum(done.computed), fbl_s, peaks)),
        tflops=round(statistics.fmean(done.computed) / step_s, 6) if work else math.nan,
        cv_tflops=round(variation(done.computed), 4) if work else math.nan,
        wait_sync_s=round(statistics.fmean(done.waits), 6),
        exposed_s=round(statistics.fmean(done.exposed), 6),
        corr_tokens=_rounded(history.with_tokens) if history is not None else None,
        corr_load=round(with_load[0], 4) if with_load is not None else None,
        load_exponent=with_load[1] if with_load is not None else None,
        tflops_by_worker=of_workers(tflop / step_s for tflop in done.computed) if work else {},
        mfu_by_worker=utilization(done.trained, step_s),
        hfu_by_worker=utilization(done.computed, fbl_s),
        wait_sync_by_worker=of_workers(done.waits),
        exposed_by_worker=of_workers(done.exposed),
        loss_by_expert=mean_losses(reports, facts.experts),
        epoch=None if facts.epoch is None else round(facts.epoch, 6),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSize:
    """One sample of an item. All its workers report it, so it is counted once per step and not per span."""

    length: int  # text and video tokens
    trained_tflop: float = 0.0  # of its forward and backward; 0 where nobody counts
    computed_tflop: float = 0.0  # the same with recomputation
    attention_tflop: float = 0.0  # of `computed_tflop`: attention that is computed again where it is not kept

    def with_kept_attention(self) -> SampleSize:
        """The size in a cascade that kept what attention gave."""
        return replace(self, computed_tflop=self.computed_tflop - self.attention_tflop, attention_tflop=0.0)


def sizes_of(
    spans: Iterable[Span], text_tokens: Mapping[str, int], geometry: Geometry, work: DiTWork | None
) -> dict[str, SampleSize]:
    """Sizes by item, of all that DiT cascades have trained."""
    found: dict[str, SampleSize] = {}
    for piece in (piece for span in spans if span.module == "dit" for piece in span.pieces):
        if piece.item not in found:
            text, (frames, height, width) = text_tokens.get(piece.item, 0), geometry.token_grid(*piece.bucket)
            tokens = frames * height * width
            found[piece.item] = SampleSize(
                length=tokens + text,
                trained_tflop=work.model_tflop(1, tokens, text, frames) if work else 0.0,
                computed_tflop=work.computed_tflop(1, tokens, text, frames) if work else 0.0,
                attention_tflop=work.attention_again_tflop(tokens, text, frames) if work else 0.0,
            )
    return found


def worker_load(spans: Iterable[Span], sizes: Mapping[str, SampleSize]) -> list[tuple[float, SampleSize]]:
    """(number of samples, size of each) of a worker's DiT cascades; of a bag of k its part is 1 / k of every sample."""
    found = []
    for span in (span for span in spans if span.module == "dit"):
        for piece in span.pieces:
            size = sizes[piece.item]
            found.append((piece.batch / span.degree, size.with_kept_attention() if span.kept_attention else size))
    return found


def wait_of(cascades: Sequence[Sequence[Span]], finish: Sequence[Span]) -> list[float]:
    """`wait_sync` of every worker of a step, which have one `finish` span each; without them only waits inside bags."""
    waited = [sum(s.wait_s for s in of) for of in cascades]
    return wait_sync(waited, [s.start for s in finish]) if len(finish) == len(cascades) else waited


def exposed_of(spans: Iterable[Sequence[Span]], waits: Iterable[float]) -> list[float]:
    """Communication of every worker that no computation hid: collectives of its bags, fetches for which it was
    idle, and the gradient sum less what was waited for the last worker there."""
    found = []
    for of, waited in zip(spans, waits, strict=True):
        bags = sum(s.exposed_s + (s.fetch_s or 0.0) for s in of if s.module != "finish")
        inside = sum(s.wait_s for s in of)
        found.append(bags + max(0.0, sum(s.exposed_s for s in of if s.module == "finish") - (waited - inside)))
    return found


def _samples_of(dits: Sequence[Span], sizes: Mapping[str, SampleSize]) -> list[tuple[int, int]]:
    """(number of samples, tokens of each) of a step; every worker of a bag reports the same cascade, counted once."""
    once = {span.cascade: span for span in dits}
    return [(piece.batch, sizes[piece.item].length) for s in once.values() for piece in s.pieces]


def loss_by_bucket(reports: Sequence[StepReport]) -> dict[str, float]:
    """Mean loss of each bucket's samples in this step."""
    buckets: dict[str, str] = {}
    for report in reports:
        for piece in (piece for span in report.spans if span.module == "dit" for piece in span.pieces):
            if piece.item not in buckets:
                buckets[piece.item] = "x".join(map(str, piece.bucket))
    return mean_losses(reports, buckets)


def mean_losses(reports: Sequence[StepReport], kinds: Mapping[str, str]) -> dict[str, float]:
    """Mean loss of the samples of each kind, by the kinds of the items; items without one are left out. Every rank of
    a bag reports its share, so shares are summed."""
    weighted: dict[str, float] = {}
    weights: dict[str, float] = {}
    for report in reports:
        for item, loss, weight in report.item_losses:
            if (kind := kinds.get(item)) is not None:
                weighted[kind] = weighted.get(kind, 0.0) + loss
                weights[kind] = weights.get(kind, 0.0) + weight
    return {kind: round(weighted[kind] / weights[kind], 6) for kind in sorted(weighted) if weights[kind] > 0}


def handoff_seconds(spans: Sequence[Span]) -> float:
    """Seconds that cascades spent on getting encode results; of a bag the quickest rank, the others wait for peers."""
    quickest: dict[str, float] = {}
    for span in spans:
        if span.handoff_bytes:
            quickest[span.cascade] = min(quickest.get(span.cascade, span.handoff_s), span.handoff_s)
    return sum(quickest.values())


Contents = tuple[str, tuple[int, int, int] | None, tuple[PieceRecord, ...]]  # of a span: item, bucket, pieces


def timeline_records(
    facts: StepFacts, report: StepReport, node: str, step_start: float, told: dict[str, Contents] | None = None
) -> list[SpanRecord]:
    """Lines of timeline.jsonl for one worker. `told` is what cascades of the step contain, by their ids: the lines of a
    bag share it."""
    told = {} if told is None else told
    contents = [told.get(s.cascade) or told.setdefault(s.cascade, _contents(s)) for s in report.spans]
    return [
        SpanRecord(
            step=s.step,
            worker=report.worker,
            node=node,
            name=s.name,
            module=s.module,
            cascade=s.cascade,
            item=item,
            bucket=bucket,
            pieces=pieces,
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
            need_gib=None if s.need_gib is None else round(s.need_gib, 6),
            work_s=None if s.work_s is None else round(s.work_s, 6),
            wait_s=round(s.wait_s, 6),
            exposed_s=round(s.exposed_s, 6),
        )
        for s, (item, bucket, pieces) in zip(report.spans, contents, strict=True)
    ]


def _contents(span: Span) -> Contents:
    pieces = tuple(PieceRecord(item=p.item, bucket=p.bucket, batch=p.batch) for p in span.pieces)
    return span.item, span.bucket, pieces
