"""`heddle bench samples`: what samples cost a run that are made beside its steps, against one call between two steps.

The same training on a few workers of this machine: without samples, with a share of its time for them (`sample.share`),
and with each clip made in one call at a step's end, as nothing limits it. In turns, so that all see the same noise. One
round of clips begins in the middle of each run; seconds are from there to the end of the last step.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from actors.records.events import CheckpointWritten, RunFinished, SamplesMade
from app.bench.lab import Lab
from app.sampling.live import LiveSamples

PROMPTS = ["a red disc", "a green square", "a blue disc", "a white square"]
AT_ONCE = 1e6  # a share that any clip fits into
WAYS = {"none": None, "beside": 0.05, "at once": AT_ONCE}


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledRun:
    """What one run took from the checkpoint that asks for samples."""

    total_s: float  # to the end of the last step
    step_s: float  # median
    longest_s: float  # step
    ready_s: float  # until the last clip is there; nan: none was


def run(
    workers: Annotated[int, typer.Option(help="Of the pool.")] = 2,
    every: Annotated[int, typer.Option(help="Steps before the samples; as many come behind.")] = 100,
    sampler_steps: Annotated[int, typer.Option(help="Denoising steps of a clip.")] = 20,
    repeats: Annotated[int, typer.Option(help="Runs of each way, in turns.")] = 3,
) -> None:
    found: dict[str, list[SampledRun]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder)) as lab:
        lab.add_node(workers=workers)
        for repeat in range(repeats):
            for way, share in WAYS.items():
                name = f"{way.replace(' ', '-')}-{repeat}"
                found[way].append(_measured(lab, name, share, workers, every, sampler_steps))
    print(f"{workers} workers, {len(PROMPTS)} clips beside {every} steps, median of {repeats}")
    print("samples   seconds   over none   median step   longest step   ready after")
    plain_s = statistics.median(one.total_s for one in found["none"])
    for way, runs in found.items():
        total_s, step_s, longest_s, ready_s = (
            statistics.median(getattr(one, name) for one in runs)
            for name in ("total_s", "step_s", "longest_s", "ready_s")
        )
        ready = "" if math.isnan(ready_s) else f"{ready_s:10.1f} s"
        print(f"{way:<9} {total_s:7.1f} {total_s / plain_s - 1:+10.1%} {step_s:11.3f} s {longest_s:12.2f} s {ready}")


def _measured(lab: Lab, name: str, share: float | None, workers: int, every: int, sampler_steps: int) -> SampledRun:
    sample = {"prompts": PROMPTS, "steps": sampler_steps, "frames": 17, "height": 64, "width": 96}
    if share is not None:
        sample |= {"every": every, "share": share}
    config = lab.config(
        name,
        train={"steps": 2 * every - 1},  # no samples of the end
        workers={"min": workers, "max": workers},
        checkpoint={"every": every, "keep_last": 1},
        sample=sample,
    )
    live = LiveSamples(config, Path(config.run.dir) / config.run.name)
    one = lab.start(config, asides=live)
    one.on_checkpoint = lambda folder, step: live.on_checkpoint(step)  # type: ignore[method-assign]
    one.join(1200)
    began = next(event.time for event in one.events if isinstance(event, CheckpointWritten))
    ended = next(event.time for event in one.events if isinstance(event, RunFinished))
    steps = [metrics.step_s for metrics in one.metrics if metrics.step >= every]
    return SampledRun(
        total_s=ended - began,
        step_s=statistics.median(steps),
        longest_s=max(steps),
        ready_s=next((event.seconds for event in one.events if isinstance(event, SamplesMade)), math.nan),
    )
