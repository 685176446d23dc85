"""What `heddle prove` says of its two runs: whether they were the same training, and whether what was predicted held.

The figures come from the files of the runs alone, so that anybody can make them again.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from actors.config import TrainConfig
from actors.records.events import StepsLost, StepsRecovered
from actors.records.metrics_line import StepMetrics
from actors.state.checkpoint_files import latest, load
from actors.state.checkpoint_writer import root_of
from app.records.rundir import RunDir
from ops.counted import counted

# Relative differences of a loss that other sums of the same numbers make within some dozens of steps. In fp32 1e-7 is
# usual (`heddle bench soak`, 200 steps); in bf16 every product is rounded to 2^-9, and a loss is a mean of many.
# TF32, which a run may ask for with fp32 weights, rounds them to 2^-11.
ROUNDING = {"float32": 1e-5, "TF32": 2.0**-10, "bfloat16": 2.0**-8}

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
    recovered_s: list[float]
    computed_again: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The disturbed run beside the undisturbed one. Differences are relative."""

    calm: SeenRun
    disturbed: SeenRun
    dtype: str
    loss: float  # the largest difference
    at: int  # its step
    weights: float  # |a - b| / |b| over all trained weights, after the last step

    @property
    def same(self) -> bool:
        """Every step once, of the same clips, with the same losses up to rounding."""
        return not self.odd_steps and not self.torn and self.loss <= ROUNDING[self.dtype]

    @property
    def odd_steps(self) -> list[int]:
        """Those that one run lacks, or has twice."""
        found = Counter(self.disturbed.steps)
        return sorted(step for step in {*self.calm.steps, *found} if found[step] != self.calm.steps.count(step))

    @property
    def torn(self) -> bool:
        """Whether other clips could be decoded."""
        known = dict(zip(self.calm.steps, self.calm.good, strict=True))
        pairs = zip(self.disturbed.steps, self.disturbed.good, strict=True)
        return any(_relative(good, known.get(step, good)) > _SUMMED for step, good in pairs)


def verdict(calm: Path, disturbed: Path, train: TrainConfig) -> Verdict:
    """Read both runs, which have ended with all their steps."""
    one, other = seen(RunDir.open(calm)), seen(RunDir.open(disturbed))
    known = dict(zip(one.steps, one.losses, strict=True))
    apart = [
        (_relative(loss, known[step]), step)
        for step, loss in zip(other.steps, other.losses, strict=True)
        if step in known
    ]
    largest, at = max(apart, default=(math.inf, -1))
    return Verdict(
        calm=one, disturbed=other, dtype=products_of(train), loss=largest, at=at, weights=weights_apart(calm, disturbed)
    )


def _relative(loss: float, expected: float) -> float:
    """Infinite where one alone is no number; a step whose losses are not finite in both was left out by both."""
    if math.isfinite(loss) and math.isfinite(expected):
        return abs(loss - expected) / (abs(expected) or 1.0)
    return 0.0 if math.isfinite(loss) == math.isfinite(expected) else math.inf


def products_of(train: TrainConfig) -> str:
    """The dtype in which the transformer multiplies."""
    if "bfloat16" in (train.autocast, train.parameter_dtype):
        return "bfloat16"
    return "TF32" if train.allows_tf32 else "float32"


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
        recovered_s=[event.seconds for event in events if isinstance(event, StepsRecovered)],
        computed_again=sum(event.lost_steps for event in events if isinstance(event, StepsLost)),
    )


def _median(lines: Sequence[StepMetrics], name: str) -> float:
    """Median of the numbers that are there; NaN without one."""
    values = [float(getattr(line, name)) for line in lines[1:]]
    return median([value for value in values if math.isfinite(value)] or [math.nan])


def weights_apart(one: Path, other: Path, piece: int = 1 << 24) -> float:
    """|a - b| / |b| of the weights in the last checkpoints of two runs, `piece` at once: those of 14B fill a host."""
    a, b = (_Weights(run) for run in (one, other))
    assert a.total == b.total, f"{one} and {other} have {a.total} and {b.total} weights"
    apart = norm = 0.0
    for start in range(0, a.total, piece):
        mine, theirs = (state.piece(start, min(start + piece, state.total)) for state in (a, b))
        apart += float(np.square(mine - theirs).sum())
        norm += float(np.square(theirs).sum())
    return math.sqrt(apart / norm) if norm else 0.0


class _Weights:
    """The trained weights of a run's last checkpoint as one vector, whichever workers wrote its shards."""

    def __init__(self, run: Path) -> None:
        folder = latest(root_of(run))
        assert folder is not None, f"{run} has ended without a checkpoint"
        _, shards = load(folder)
        self._shards = sorted(shards, key=lambda shard: shard.lo)
        self.total = shards[0].total

    def piece(self, start: int, end: int) -> np.ndarray:
        parts = [
            shard.arrays["master"][max(start - shard.lo, 0) : max(end - shard.lo, 0)].astype(np.float64)
            for shard in self._shards
            if shard.lo < end and start < shard.hi
        ]
        return np.concatenate(parts)


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
    rounding, steps = ROUNDING[found.dtype], len(found.calm.steps)
    told = (
        f"largest difference of a loss {found.loss:.1e}, at step {found.at} (rounding of {found.dtype}: up to "
        f"{rounding:.0e}); of the weights after {counted(steps, 'step')} {found.weights:.1e}"
    )
    if found.disturbed.computed_again:
        told += f"; {counted(found.disturbed.computed_again, 'step')} computed again"
    if found.same:
        return [f"the same training: {told}."]
    odd = f" Steps that one of them lacks: {', '.join(map(str, found.odd_steps[:8]))}." if found.odd_steps else ""
    torn = " Other clips could be decoded." if found.torn else ""
    return [f"NOT the same training: {told}.{odd}{torn}"]


def _counts(workers: Sequence[int]) -> str:
    return ", ".join(map(str, workers))
