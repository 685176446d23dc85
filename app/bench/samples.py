"""`heddle bench samples`: what samples cost a run that are made beside its steps, against one call between two steps.

The same training on a few workers of this machine three times: without samples, with a share of its time for them
(`sample.share`), and with each clip made in one call at a step's end, as nothing limits it. In turns, so that all see
the same noise; seconds are from a step before the first samples to the end of the last step, or of the last sample.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from actors.records.events import RunFinished, SamplesMade
from app.bench.lab import Lab
from app.sampling.live import LiveSamples

PROMPTS = ["a red disc", "a green square", "a blue disc", "a white square"]
AT_ONCE = 1e6  # a share that any clip fits into
WAYS = {"none": None, "beside": 0.05, "at once": AT_ONCE}


def run(
    workers: Annotated[int, typer.Option(help="Of the pool.")] = 2,
    steps: Annotated[int, typer.Option(help="Of each run.")] = 60,
    every: Annotated[int, typer.Option(help="Steps between samples.")] = 20,
    sampler_steps: Annotated[int, typer.Option(help="Denoising steps of a clip.")] = 20,
    repeats: Annotated[int, typer.Option(help="Runs of each way, in turns.")] = 2,
) -> None:
    found: dict[str, list[tuple[float, float, int]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder)) as lab:
        lab.add_node(workers=workers)
        for repeat in range(repeats):
            for way, share in WAYS.items():
                name = f"{way.replace(' ', '-')}-{repeat}"
                found[way].append(_measured(lab, name, share, workers, steps, every, sampler_steps))
    plain = statistics.median(total for total, _, _ in found["none"])
    print(f"{workers} workers, {steps} steps, {len(PROMPTS)} clips every {every} steps, median of {repeats}")
    print("samples   seconds   over none   longest step   rounds")
    for way, runs in found.items():
        total = statistics.median(total for total, _, _ in runs)
        longest = statistics.median(longest for _, longest, _ in runs)
        rounds = statistics.median(rounds for _, _, rounds in runs)
        print(f"{way:<9} {total:7.1f} {total / plain - 1:+10.1%} {longest:12.2f} s {rounds:8.0f}")


def _measured(
    lab: Lab, name: str, share: float | None, workers: int, steps: int, every: int, sampler_steps: int
) -> tuple[float, float, int]:
    """(seconds, the longest step, finished rounds of samples) from the step before the first samples."""
    sample = {"prompts": PROMPTS, "steps": sampler_steps, "frames": 17, "height": 64, "width": 96}
    if share is not None:
        sample |= {"every": every, "share": share}
    config = lab.config(
        name,
        train={"steps": steps},
        workers={"min": workers, "max": workers},
        checkpoint={"every": every, "keep_last": 2},
        sample=sample,
    )
    live = LiveSamples(config, Path(config.run.dir) / config.run.name)
    one = lab.start(config, asides=live)
    one.on_checkpoint = lambda folder, step: live.on_checkpoint(step)  # type: ignore[method-assign]
    one.wait_for_step(every - 2)
    begin = time.time()
    one.join(1200)
    ends = [event.time for event in one.events if isinstance(event, RunFinished | SamplesMade)]
    times = [metrics.step_s for metrics in one.metrics if metrics.step >= every]
    return max(ends) - begin, max(times), sum(isinstance(event, SamplesMade) for event in one.events)
