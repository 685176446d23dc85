"""One line of metrics.jsonl: what a committed step cost and gave. Every field of a line is a field here, and so are the
figures of single workers, which lie in workers.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.records.lines import finite, line_of, record_of

# Key of versions 0.1 and early 0.2 -> field.
RENAMED = {"planned_s": "predicted_s", "plan_s": "planning_s"}


# Fields that earlier versions did not write; left out of a line where nothing is known.
_LATER = (
    *("room_gib", "tokens", "tokens_per_s_with_text", "fbl_s", "mfu", "hfu", "tflops", "cv_tflops", "wait_sync_s"),
    *("exposed_s", "corr_tokens", "corr_load", "load_exponent", "tflops_by_worker", "wait_sync_by_worker"),
    *("mfu_by_worker", "hfu_by_worker", "exposed_by_worker", "loss_by_expert", "epoch", "d"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """Figures of one step, made by `actors.run.step_metrics`. Ratios are explained there.

    A number that a file lacks, or that is not finite, is NaN after reading; a count that it lacks is 0.
    """

    step: int
    time: float  # unix seconds when the step was finished
    loss: float
    grad_norm: float
    lr: float
    workers: int
    generation: int
    step_s: float  # from the end of the previous step to the end of this one
    data_wait_s: float  # the workers had no step because the clips of the next one were not decoded yet
    idle_ratio: float
    cv_step: float
    cv_compute: float
    wir: float | None  # None: a worker had no DiT cascade
    tokens_per_s: float
    videos_per_s: float
    predicted_s: float  # the plan's makespan, the end of the step and what it takes besides, as far as they are known
    planning_s: float  # finding the plan took so long
    sync_s: float  # the longest gradient sum and update of a worker
    snapshot_s: float  # the longest that a worker was held up by snapshots
    handoff_bytes: int
    handoff_s: float
    peak_memory_gib: float  # of a GPU, the highest of all workers
    rss_gib: float  # of a worker's process, the highest of all
    dispatch_s: float  # the controller's time to submit the step's calls
    calls: int
    applied: bool  # False: the gradient was not finite and nothing was changed
    good_weight: float  # share of the step's samples that could be decoded
    loss_by_bucket: Mapping[str, float]  # "17x64x96" -> mean loss of its samples, without loss_weight of their sources
    room_gib: float | None = None  # memory for cascades, of the worker that has the least; None: no limit is known
    recomputed: bool = False  # an earlier execution of this step had been written before
    # What earlier versions did not write; formulas and sources are in actors/plan/measures.py.
    tokens: int = 0  # of the step's samples, text and video
    tokens_per_s_with_text: float = math.nan
    fbl_s: float = math.nan  # from the first DiT cascade's start to the last one's end
    mfu: float | None = None  # None: the peak of a device is not known
    hfu: float | None = None
    tflops: float = math.nan  # TFLOP/s of a worker's DiT cascades over the step, recomputation included, mean
    cv_tflops: float = math.nan
    wait_sync_s: float = math.nan  # mean of the workers
    exposed_s: float = math.nan  # communication that no computation hid, mean of the workers
    corr_tokens: float | None = None  # of step time and tokens, over the last steps
    corr_load: float | None = None  # of step time and the sum of B S^p
    load_exponent: float | None = None  # p, for which it is largest
    tflops_by_worker: Mapping[str, float] = field(default_factory=dict)
    mfu_by_worker: Mapping[str, float] = field(default_factory=dict)
    hfu_by_worker: Mapping[str, float] = field(default_factory=dict)
    wait_sync_by_worker: Mapping[str, float] = field(default_factory=dict)
    exposed_by_worker: Mapping[str, float] = field(default_factory=dict)
    # of a run that trains two transformers, one for high noise and one for low: "high" -> mean loss of the samples that
    # this one was trained on; in a step without such samples it is not here
    loss_by_expert: Mapping[str, float] = field(default_factory=dict)
    d: float | None = None  # what Prodigy has found, by which the next step multiplies the learning rate
    epoch: float | None = None  # how often a sample has been drawn on average, this step included

    def line(self) -> dict[str, object]:
        """The line's object in metrics.jsonl; numbers that are not finite are null there, as JSON has none."""
        line = {name: finite(value) for name, value in line_of(self).items()}
        if not self.recomputed:
            del line["recomputed"]
        for name in _LATER:
            if line[name] in (None, {}) or (name == "tokens" and not self.tokens):
                del line[name]
        return line


def metrics_of(line: Mapping[str, object]) -> StepMetrics:
    """An object of metrics.jsonl, of this or an earlier version. Raises RecordError for a value of the wrong type."""
    return record_of(StepMetrics, line, RENAMED)
