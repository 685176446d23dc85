"""What `heddle bench cluster` prints of its runs, and the curves through them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from app.bench.cluster.ddp import DdpFigures
    from app.bench.cluster.figures import ClusterFigures

FAR = 10_000  # GPUs that the curves are continued to
_LEAST_S = 0.002  # of a step, for a thread to be named


HEAD = (
    "| workers | strategy | steps per hour, executed / planned | idle | s per step, executed / planned | "
    "controller, CPU s a step (its process) | of a 10 s step | dispatch, ms (calls) | plan waited for, s | "
    "memory, MiB |"
    "\n|---|---|---|---|---|---|---|---|---|---|"
)


def row(one: ClusterFigures) -> str:
    """A line of the table."""
    return (
        f"| {one.workers} | {one.strategy} | {one.steps_per_hour:.1f} / {one.planned_steps_per_hour:.1f} | "
        f"{one.idle:.1%} | {one.executed_s:.2f} / {one.planned_s:.2f} | {one.controller_s:.3f} ({one.process_s:.3f}) | "
        f"{one.share:.1%} | {one.dispatch_ms:.1f} ({one.calls:.0f}) | {one.planning_s:.3f} | "
        f"{one.rss_mib:.0f} ({one.rss_growth_mib:+.0f} after step 10) |"
    )


def thread_line(one: ClusterFigures) -> str:
    """What the process of the controller took in a step, by its threads; "" where nobody knows."""
    told = ", ".join(f"{name} {seconds:.3f}" for name, seconds in one.threads_s.items() if seconds >= _LEAST_S)
    return f"CPU s a step of its process by thread: {told}" if told else ""


def steps_line(one: ClusterFigures) -> str:
    """What all steps took, from the end of each to that of the next, beside what was planned: of a sequence of which
    the last ones find what the first ones have encoded, none may be left out."""
    executed, planned = zip(*one.every_step_s, strict=True)
    later = [statistics.fmean(of[1:]) if len(of) > 1 else of[0] for of in (executed, planned)]
    return (
        f"all {len(executed)} steps, virtual s a step: executed {statistics.fmean(executed):.2f}, planned "
        f"{statistics.fmean(planned):.2f}; without the first executed {later[0]:.2f}, planned {later[1]:.2f}"
    )


def change_rows(found: Sequence[ClusterFigures]) -> tuple[list[str], list[list[str]]]:
    """A table of what losses and joins took: its head and its rows."""
    head = ["workers", "strategy", "what", "next generation, real s", "step again, virtual s", "workers then"]
    rows = []
    for one in found:
        rows.append([f"{one.workers}", one.strategy, "start", f"{one.form_s:.3f}", "-", f"{one.workers}"])
        rows += [
            [
                f"{one.workers}",
                one.strategy,
                seen.what,
                f"{seen.form_s:.3f}",
                f"{seen.step_s:.1f}",
                f"{seen.workers}",
            ]
            for seen in one.recovered
        ]
    return head, rows


def way_rows(ways: Sequence[WayRow]) -> tuple[list[str], list[list[str]]]:
    """A table of what is trained beside DDP: its head and its rows."""
    head = ["GPUs", "way", "s per step, mean", "samples per s", "of ddp's", "idle", ""]
    rows = [
        [
            f"{one.workers}",
            one.name,
            f"{one.mean_step_s:.2f}",
            f"{one.samples_per_s:.4f}",
            f"{one.ratio:.2f}",
            f"{one.idle:.1%}",
            "executed" if one.executed else "evaluated",
        ]
        for one in ways
    ]
    return head, rows


@dataclass(frozen=True, kw_only=True, slots=True)
class WayRow:
    """A way to train on `workers` GPUs. Times are virtual seconds; `ratio` is of samples per second, to DDP's."""

    workers: int
    name: str
    mean_step_s: float
    samples_per_s: float
    ratio: float
    idle: float
    executed: bool  # else evaluated
    same_steps: bool  # as many items in a step as the others, of as many buckets


def ways_of(evaluated: Sequence[DdpFigures], found: Sequence[ClusterFigures]) -> list[WayRow]:
    """All ways on the sizes on which DDP was evaluated, the smallest first."""
    rows = []
    for workers in sorted({one.workers for one in evaluated}):
        ddp = [one for one in evaluated if one.workers == workers]
        named: list[tuple[str, DdpFigures | ClusterFigures, bool, bool]] = [
            (f"{one.way} (SP {', '.join(map(str, one.degrees))})", one, False, one.same_steps) for one in ddp
        ]
        named += [(one.strategy, one, True, True) for one in found if one.workers == workers]
        rows += [
            WayRow(
                workers=workers,
                name=name,
                mean_step_s=one.mean_step_s,
                samples_per_s=one.samples_per_s,
                ratio=one.samples_per_s / ddp[0].samples_per_s,
                idle=one.idle,
                executed=executed,
                same_steps=same,
            )
            for name, one, executed, same in named
        ]
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthCurve:
    """y = factor * workers ** power, by least squares of the logarithms; `r2` is of these."""

    what: str
    factor: float
    power: float
    r2: float
    at_far: float

    def line(self) -> str:
        """A sentence for a person."""
        return (
            f"{self.what} = {self.factor:.3g} * workers^{self.power:.2f} (R2 {self.r2:.3f} of the logarithms); "
            f"at {FAR:,} workers {self.at_far:.3g}"
        )


def curves_of(found: Sequence[ClusterFigures]) -> list[GrowthCurve]:
    """What grows with the cluster; nothing is fitted to less than three sizes."""
    if len({one.workers for one in found}) < 3:
        return []
    size = [one.workers for one in found]
    return [
        fitted("controller's CPU seconds of a step", size, [one.controller_s for one in found]),
        fitted("milliseconds of a dispatch", size, [one.dispatch_ms for one in found]),
        fitted("MiB of the controller's process", size, [one.rss_mib for one in found]),
    ]


def fitted(what: str, size: Sequence[int], values: Sequence[float]) -> GrowthCurve:
    """The curve through these points."""
    x, y = np.log(np.array(size, float)), np.log(np.maximum(np.array(values, float), 1e-9))
    power, offset = np.polyfit(x, y, 1)
    left = float(np.sum((y - power * x - offset) ** 2))
    total = float(np.sum((y - y.mean()) ** 2))
    return GrowthCurve(
        what=what,
        factor=math.exp(offset),
        power=float(power),
        r2=1.0 - left / total if total > 0 else 1.0,
        at_far=math.exp(offset + power * math.log(FAR)),
    )
