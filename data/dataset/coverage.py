"""Where every sample of a dataset goes, before anything is trained: the figures of `heddle plan --from-data`."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from dataclasses import dataclass
from itertools import islice

import numpy as np

from data.dataset.dataset import Dataset
from data.dataset.dropped import DroppedSample, dropped_samples
from data.dataset.epochs import forecast, names_of
from data.dataset.order_state import OrderState
from data.errors import DataError
from data.in_words import LIST_ALL, EpochForecast, dropped_sentence, reasons_in_words
from data.ledger import Ledger
from data.types import Bucket
from ops.counted import counted

log = logging.getLogger(__name__)

LINE_S = 30.0  # between two lines of an account: it takes an hour of 100 million samples
NAMED = 1000  # dropped samples that are listed by name
PATIENCE = 5  # epochs after which a sample counts as never trained


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketAccount:
    """What one bucket trains in the steps looked at."""

    bucket: Bucket
    batch: int  # clips of a full batch
    limit: str  # what sets the batch size: memory, compute, cap, table, profile
    tokens: int  # of one sample
    samples: int  # distinct rows
    draws: int
    items: int
    short_items: int  # emitted before they were full, after max_wait


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounting:
    """`indexed == planned + sum(rejected)` and `planned == trained + waiting + not_reached + passed_over`."""

    steps: int
    indexed: int
    planned: int
    rejected: dict[str, int]  # by reason
    reasons: dict[str, int]  # the same in words, with the settings that decide it
    rules: dict[str, int]  # the rejected ones that a filter or the bucket table refused, in detail
    draws: int
    trained: int  # distinct samples
    repeated: int  # of these, trained more than once
    waiting: int  # drawn, and in a bucket queue when the steps end
    passed_over: int  # drawn, and left out by the probabilities of the table
    not_reached: int  # not drawn in these steps
    by_source: dict[str, int]  # draws trained
    buckets: tuple[BucketAccount, ...]
    dropped: tuple[DroppedSample, ...]  # the first NAMED of them

    forecast: EpochForecast | None  # of the whole run, where its steps are known

    @property
    def coverage(self) -> float:
        """Share of the indexed samples that is trained in these steps."""
        return self.trained / self.indexed if self.indexed else 0.0

    @property
    def identity(self) -> str:
        """One line that adds up."""
        reasons = " + ".join(f"{count} {reason}" for reason, count in sorted(self.rejected.items()) if count)
        return (
            f"{self.indexed} indexed = {self.trained} trained + {self.waiting} waiting + {self.not_reached} not "
            f"reached + {self.passed_over} passed over" + (f" + {reasons}" if reasons else "")
        )


def account(dataset: Dataset, steps: int | None = None, run_steps: int = 0, line_s: float = LINE_S) -> Accounting:
    """Where every sample goes: per bucket, trained, repeated, dropped and why. Runs the order of draws alone, about
    30 000 samples/s; without `steps` until every admitted sample is trained, 5 epochs of draws are over, or the run's
    own `run_steps`, if that is given. Logs every `line_s` how far it is."""
    planner, state = dataset.planner, dataset.planner.start()
    times = [np.zeros(len(code), np.int32) for code in dataset.curriculum.codes]
    drawn_rows = [np.zeros(len(code), bool) for code in dataset.curriculum.codes]
    draws, items, short, rows = Counter[Bucket](), Counter[Bucket](), Counter[Bucket](), Counter[Bucket]()
    planned = dataset.ledger.planned
    last = run_steps or math.inf
    said = time.monotonic()

    def goes_on() -> bool:
        if steps is not None:
            return state.step < steps
        return rows.total() < planned and state.drawn < PATIENCE * planned and state.step < last

    while goes_on():
        if time.monotonic() - said >= line_s:
            said = time.monotonic()
            log.info(
                "account of the data: %s of %s samples are trained within %s",
                f"{rows.total():,}",
                f"{planned:,}",
                counted(state.step, "step"),
            )
        micros = planner.advance(state)  # may enter the next segment
        batch = planner.stages[state.stage].batch
        for micro in micros:
            items[micro.bucket] += 1
            draws[micro.bucket] += len(micro.draws)
            short[micro.bucket] += len(micro.draws) < batch[micro.bucket]
            for draw in micro.draws:
                rows[micro.bucket] += int(times[draw.source][draw.row] == 0)
                times[draw.source][draw.row] += 1
    waiting = [draw for queue in state.queues.values() for draw in queue]
    waiting += [draw for micro in state.ready for draw in micro.draws]
    for draw in waiting:
        drawn_rows[draw.source][draw.row] = times[draw.source][draw.row] == 0
    trained = rows.total()
    waits = sum(int(flags.sum()) for flags in drawn_rows)
    passed = _passed_over(dataset, times, drawn_rows, state)
    return Accounting(
        steps=state.step,
        indexed=dataset.ledger.indexed,
        planned=planned,
        rejected={str(reason): count for reason, count in dataset.ledger.rejected.items()},
        reasons=reasons_in_words(dataset.ledger),
        rules=dict(sorted(dataset.ledger.details.items())),
        draws=draws.total(),
        trained=trained,
        repeated=sum(int((count > 1).sum()) for count in times),
        waiting=waits,
        passed_over=passed,
        not_reached=planned - trained - waits - passed,
        by_source={name: int(count.sum()) for name, count in zip(names_of(dataset.indexes), times, strict=True)},
        buckets=tuple(
            _bucket_account(dataset, bucket, rows[bucket], draws[bucket], items[bucket], short[bucket])
            for bucket in sorted({bucket for stage in planner.stages for bucket in stage.batch})
        ),
        forecast=forecast(dataset, run_steps) if run_steps else None,
        dropped=tuple(islice(dropped_samples(dataset.curriculum, dataset.indexes), NAMED)),
    )


def check_coverage(ledger: Ledger, least: float) -> None:
    """Raises DataError when less than this share of the indexed samples can be drawn (`data.min_coverage`)."""
    if not ledger.indexed or ledger.planned / ledger.indexed >= least:
        return
    dropped = dropped_sentence(ledger.indexed, ledger.planned, reasons_in_words(ledger))
    raise DataError(
        f"only {100 * ledger.planned / ledger.indexed:.1f}% of the indexed samples can be trained; data.min_coverage "
        f"asks for {100 * least:g}%. {dropped} ({LIST_ALL} lists them). Widen data.buckets, relax the filters, or "
        f"lower data.min_coverage."
    )


def _passed_over(dataset: Dataset, times: list[np.ndarray], waits: list[np.ndarray], state: OrderState) -> int:
    """Rows of complete epochs that were drawn and met no bucket, by the probabilities of the table."""
    passed = 0
    for source, (code, count, wait) in enumerate(zip(dataset.curriculum.codes, times, waits)):
        if state.cursors[source].epoch > 0:
            passed += int(((code >= 0) & (count == 0) & ~wait).sum())
    return passed


def _bucket_account(
    dataset: Dataset, bucket: Bucket, samples: int, draws: int, items: int, short: int
) -> BucketAccount:
    number, stage = next((n, stage) for n, stage in enumerate(dataset.planner.stages) if bucket in stage.batch)
    batch, limit = dataset.curriculum.batches[number][bucket]
    return BucketAccount(
        bucket=bucket,
        batch=batch,
        limit=limit,
        tokens=stage.tokens[bucket],
        samples=int(samples),
        draws=draws,
        items=items,
        short_items=int(short),
    )
