"""What `heddle prove` says of its two runs: whether they were the same training, and whether what was predicted held.

The figures come from the files of the runs alone, so that anybody can make them again.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from actors.config import TrainConfig
from actors.plan.devices import ProductPrecision
from actors.records.events import StepsLost, StepsRecovered
from actors.records.metrics_line import StepMetrics
from actors.state.checkpoint_files import CheckpointError, latest, load, root_of
from app.records.rundir import RunDir
from ops.config import OptimizerConfig
from ops.counted import counted
from ops.relative import relative

# Relative differences of a loss that other sums of the same numbers make within some dozens of steps. In fp32 1e-7 is
# usual (`heddle bench soak`, 200 steps); in bf16 every product is rounded to 2^-9, and a loss is a mean of many.
# TF32, which a run may ask for with fp32 weights, rounds them to 2^-11.
ROUNDING: dict[ProductPrecision, float] = {"float32": 1e-5, "tf32": 2.0**-10, "bfloat16": 2.0**-8}

# What rounding may do to weights, measured in the last update of the undisturbed run. A normalised update turns around
# where a gradient is nothing but rounding, so the difference grows like a random walk: LENGTH is what one step may add
# to it, in the length of an update, also in a tiny model of which a thousandth has such gradients. Of all that little
# lies along the last update: ALONG is how much of it may be missing, or done twice, in any sixteenth of the weights
# (the demo: 1e-6; in bf16, where trainings drift apart, 0.05). The last gradient is seen in the first moments, which
# are sums of gradients: nothing turns around there. MOMENTS is their relative difference (the demo: 1e-6; in bf16
# 0.03); without the last gradient it is 0.1, by a beta1 of 0.9, to 0.4 where gradients of steps have little in common.
LENGTH = 0.25
ALONG: dict[ProductPrecision, float] = {"float32": 0.03, "tf32": 0.3, "bfloat16": 0.3}
MOMENTS: dict[ProductPrecision, float] = {"float32": 0.01, "tf32": 0.05, "bfloat16": 0.1}
_PARTS = 16
_LIKE_ADAMW = 0.2  # root mean square of AdamW's updates, over the learning rate, and of Muon's (ops.update.muon)

_SUMMED = 1e-5  # shares of samples, which are added up in another order and written with six digits


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenRun:
    """Figures of one run. Medians are of the steps from the second on, which no start is part of."""

    steps: list[int]
    losses: list[float]
    good: list[float]  # share of each step's samples that could be decoded
    workers: list[int]  # that trained, from one change to the next
    step_s: float
    predicted_s: float
    idle: float
    tokens_per_s: float
    mfu: float | None
    peak_gib: float
    lr: float  # of the last step
    recovered_s: list[float]
    computed_again: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The disturbed run beside the undisturbed one. Differences are relative."""

    calm: SeenRun
    disturbed: SeenRun
    products: ProductPrecision
    loss: float  # the largest difference
    at: int  # its step
    weights: float  # |a - b| / |b| over all trained weights, after the last step
    length: float  # |a - b| / |u|, where u is the last update of the undisturbed run
    along: float  # <a - b, u> / <u, u>, the largest of parts; -1 where the last update is missing
    moments: float  # |m - n| / |n| of the first moments

    @property
    def same(self) -> bool:
        """Every step once, of the same clips, with the same losses and the same weights in the end, up to rounding."""
        return not self.odd_steps and not self.torn and self.loss <= ROUNDING[self.products] and not self.other_weights

    @property
    def other_weights(self) -> bool:
        """Whether the last update, or what was written after it, is another, which no loss has seen."""
        if not self.length <= LENGTH * math.sqrt(max(len(self.calm.steps), 1)):
            return True
        return abs(self.along) > ALONG[self.products] or not self.moments <= MOMENTS[self.products]

    @property
    def odd_steps(self) -> list[int]:
        """Steps that one run lacks, or has twice."""
        found = Counter(self.disturbed.steps)
        return sorted(step for step in {*self.calm.steps, *found} if found[step] != self.calm.steps.count(step))

    @property
    def torn(self) -> bool:
        """Whether other clips could be decoded."""
        known = dict(zip(self.calm.steps, self.calm.good, strict=True))
        pairs = zip(self.disturbed.steps, self.disturbed.good, strict=True)
        return any(relative(good, known.get(step, good)) > _SUMMED for step, good in pairs)


def verdict(calm: Path, disturbed: Path, train: TrainConfig) -> Verdict:
    """Read both runs, which have ended with all their steps. Raises CheckpointError where one has no whole checkpoint,
    or one of another model."""
    one, other = seen(RunDir.open(calm)), seen(RunDir.open(disturbed))
    known = dict(zip(one.steps, one.losses, strict=True))
    apart = [
        (relative(loss, known[step]), step)
        for step, loss in zip(other.steps, other.losses, strict=True)
        if step in known
    ]
    largest, at = max(apart, default=(math.inf, -1))
    apart_by = weights_apart(disturbed, calm, train.optimizer, one.lr)
    return Verdict(
        calm=one,
        disturbed=other,
        products=train.products,
        loss=largest,
        at=at,
        weights=apart_by.relative,
        length=apart_by.length,
        along=apart_by.along,
        moments=apart_by.moments,
    )


def seen(run: RunDir) -> SeenRun:
    lines, events = list(run.metrics()), list(run.events())
    return SeenRun(
        steps=[line.step for line in lines],
        losses=[line.loss for line in lines],
        good=[line.good_weight for line in lines],
        workers=[count for count, _ in itertools.groupby(line.workers for line in lines)],
        step_s=_median(lines, "step_s"),
        predicted_s=_median(lines, "predicted_s"),
        idle=_median(lines, "idle_ratio"),
        tokens_per_s=_median(lines, "tokens_per_s"),
        mfu=_median(lines, "mfu") if all(line.mfu is not None for line in lines) else None,
        peak_gib=max((line.peak_memory_gib for line in lines), default=math.nan),
        lr=lines[-1].lr if lines else 0.0,
        recovered_s=[event.seconds for event in events if isinstance(event, StepsRecovered)],
        computed_again=sum(event.lost_steps for event in events if isinstance(event, StepsLost)),
    )


def _median(lines: Sequence[StepMetrics], name: str) -> float:
    """Median of the numbers that are there; NaN without one."""
    values = [float(getattr(line, name)) for line in lines[1:]]
    return median([value for value in values if math.isfinite(value)] or [math.nan])


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsApart:
    """As the fields of `Verdict` of these names, `relative` as its `weights`."""

    relative: float
    length: float
    along: float
    moments: float


def weights_apart(one: Path, other: Path, optimizer: OptimizerConfig, lr: float, piece: int = 1 << 24) -> WeightsApart:
    """How far the weights a in the last checkpoint of `one` are from those of `other`, b, whose last update was by
    learning rate `lr`; `piece` at once: those of 14B fill a host. Raises CheckpointError."""
    a, b = _State(one), _State(other)
    if a.total != b.total:
        raise CheckpointError(f"{one} and {other} have {a.total} and {b.total} weights: they are of two models.")
    parts = np.zeros((_PARTS, 6))  # of each: <d, d>, <b, b>, <u, u>, <d, u>, and as the first two of moments; d = a - b
    for part, start, end in _pieces(b.total, piece):
        theirs, update = b.piece("master", start, end), b.update(start, end, optimizer, lr)
        apart = a.piece("master", start, end) - theirs
        parts[part, :4] += [apart @ apart, theirs @ theirs, update @ update, apart @ update]
        theirs = b.piece("exp_avg", start, end)
        apart = a.piece("exp_avg", start, end) - theirs
        parts[part, 4:] += [apart @ apart, theirs @ theirs]
    differences, weights, updates, _, moments, first = parts.sum(axis=0)
    usual = updates / _PARTS  # a part that hardly moved says nothing by its own length
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = parts[:, 3] / np.maximum(parts[:, 2], usual)
    return WeightsApart(
        relative=_share(math.sqrt(differences), math.sqrt(weights)),
        length=_share(math.sqrt(differences), math.sqrt(updates)),
        along=0.0 if not updates else float(shares[np.argmax(np.abs(shares))]),
        moments=_share(math.sqrt(moments), math.sqrt(first)),
    )


def _share(size: float, of: float) -> float:
    """`size` as a share of `of`; infinite where that alone is 0."""
    return size / of if of else math.inf if size else 0.0


def _pieces(total: int, piece: int) -> Iterator[tuple[int, int, int]]:
    """(part, start, end) of the whole vector: at most `piece` elements of one of its parts at a time."""
    for part in range(_PARTS):
        lo, hi = total * part // _PARTS, total * (part + 1) // _PARTS
        for start in range(lo, hi, piece):
            yield part, start, min(start + piece, hi)


class _State:
    """The state in a run's last checkpoint as vectors, whichever workers wrote its shards."""

    def __init__(self, run: Path) -> None:
        folder = latest(root_of(run))
        if folder is None:
            raise CheckpointError(
                f"{run} has no whole checkpoint of its last step, so its weights cannot be compared. Look for "
                f"checkpoint_failed in its events.jsonl, make room or mend the storage, and prove it again."
            )
        _, shards = load(folder)
        self._shards = sorted(shards, key=lambda shard: shard.lo)
        self._updates = shards[0].updates
        self._d = max((one.d for one in shards[0].distances), default=0.0)  # of Prodigy; its `lr` is the larger, too
        self.total = shards[0].total

    def piece(self, name: str, start: int, end: int) -> np.ndarray:
        """Elements [start, end) of one array, fp64."""
        parts = [
            shard.arrays[name][max(start - shard.lo, 0) : max(end - shard.lo, 0)].astype(np.float64)
            for shard in self._shards
            if shard.lo < end and start < shard.hi
        ]
        return np.concatenate(parts)

    def update(self, start: int, end: int, optimizer: OptimizerConfig, lr: float) -> np.ndarray:
        """What the last update has subtracted from [start, end), but for what decays: AdamW's by its moments. Of a
        matrix that Muon trains, which has no second moment, its momentum, as long as AdamW's updates are: the update
        is its orthogonal factor, which lies along it for the most part. Of Prodigy `lr` has d in it."""
        first, second = (self.piece(name, start, end) for name in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = (1.0 - beta ** max(self._updates, 1) for beta in optimizer.betas)
        if optimizer.kind == "prodigy":
            if not optimizer.prodigy.use_bias_correction:
                beta1 = beta2 = 1.0
            return -lr * (first / beta1 / (np.sqrt(second / beta2) + self._d * optimizer.adam_eps / math.sqrt(beta2)))
        found = first / beta1 / (np.sqrt(second / beta2) + optimizer.adam_eps)
        if optimizer.kind == "muon":
            matrices = second == 0
            of = first[matrices]
            found[matrices] = _LIKE_ADAMW * of / (math.sqrt(of @ of / max(len(of), 1)) or 1.0)
        return -lr * found


def table(found: Verdict) -> list[str]:
    """Both runs, line by line, and what they come to."""
    calm, disturbed = found.calm, found.disturbed
    rows = [
        ("", "undisturbed", "disturbed"),
        ("steps", str(len(calm.steps)), str(len(disturbed.steps))),
        ("workers, in this order", _counts(calm.workers), _counts(disturbed.workers)),
        ("seconds a step", f"{calm.step_s:.3g}", f"{disturbed.step_s:.3g}"),
        ("as planned", f"{calm.predicted_s:.3g}", f"{disturbed.predicted_s:.3g}"),
        ("idle share", f"{calm.idle:.0%}", f"{disturbed.idle:.0%}"),
        ("tokens a second", f"{calm.tokens_per_s:,.0f}", f"{disturbed.tokens_per_s:,.0f}"),
    ]
    if calm.mfu is not None and disturbed.mfu is not None:
        rows.append(("MFU", f"{calm.mfu:.1%}", f"{disturbed.mfu:.1%}"))
    if calm.peak_gib > 0:
        rows.append(("peak memory of a GPU", f"{calm.peak_gib:.2f} GiB", f"{disturbed.peak_gib:.2f} GiB"))
    recovered = ", ".join(f"{seconds:.1f}" for seconds in disturbed.recovered_s) or "-"
    rows.append(("seconds from a loss to the next finished step", "-", recovered))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ] + sentences(found)


def sentences(found: Verdict) -> list[str]:
    """What it comes to, and what speaks against it."""
    rounding, steps = ROUNDING[found.products], len(found.calm.steps)
    precision = "TF32" if found.products == "tf32" else found.products
    told = (
        f"largest difference of a loss {found.loss:.1e}, at step {found.at} (rounding of {precision}: up to "
        f"{rounding:.0e}); of the weights after {counted(steps, 'step')} {found.weights:.1e}, as long "
        f"as {found.length:.1e} updates, {abs(found.along):.1e} along the last one (up to "
        f"{LENGTH * math.sqrt(steps):.1f} and {ALONG[found.products]:g}); of the gradients' mean "
        f"{found.moments:.1e} (up to {MOMENTS[found.products]:g})"
    )
    if found.disturbed.computed_again:
        told += f"; {counted(found.disturbed.computed_again, 'step')} computed again"
    if found.same:
        return [f"the same training: {told}."]
    odd = f" Steps that one of them lacks: {', '.join(map(str, found.odd_steps[:8]))}." if found.odd_steps else ""
    torn = " Other clips could be decoded." if found.torn else ""
    other = " The last update, or what was written after it, is another." if found.other_weights else ""
    return [f"NOT the same training: {told}.{odd}{torn}{other}"]


def _counts(workers: Sequence[int]) -> str:
    return ", ".join(map(str, workers))
