"""`heddle bench samples`: what samples cost a run that are made beside its steps, against one call between two steps.

The same training on a few workers of this machine: without samples, with a share of its time for them (`sample.share`),
and with each clip made in one call at a step's end, as nothing limits it. In turns, so that all see the same noise. One
round of clips begins in the middle of each run; seconds are from there to the end of the last step, or to the last clip
where that is later. A clip that is made after the last step has cost no step anything, so a first run finds how many
steps all clips fit beside, and the figures do not count (exit 1) unless they did in every run.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from actors.aside_turns import TurnReport
from actors.records.events import CheckpointWritten, RunEvent, SamplesFailed
from actors.records.metrics_line import StepMetrics
from app.bench.lab import Lab
from app.run.asides import RunAsides
from app.sampling.live import LiveSamples
from app.settings.config import RunConfig
from ops.counted import counted

PROMPTS = ["a red disc", "a green square", "a blue disc", "a white square"]
AT_ONCE = 1e6  # a share that any clip fits into
_LONGER = 4  # times that the run is made twice as long for its clips


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledRun:
    """What one run took from the checkpoint that asks for samples."""

    total_s: float  # to the end of the last step, or to the last clip where that is later
    step_s: float  # median
    longest_s: float  # step
    ready_s: float  # until the last clip is there; nan: none was
    clips: int
    late: int  # of the clips: made after the last step

    @staticmethod
    def of(
        events: Sequence[RunEvent], metrics: Sequence[StepMetrics], clips_at: Sequence[float], every: int
    ) -> SampledRun:
        """Figures of the steps from number `every` on, before which the checkpoint is written. `clips_at`: when each
        clip was there, unix seconds. Raises RuntimeError where clips were not made."""
        if failed := next((event for event in events if isinstance(event, SamplesFailed)), None):
            raise RuntimeError(f"samples of a run failed: {failed.why}")
        began = next(event.time for event in events if isinstance(event, CheckpointWritten))
        steps = [line for line in metrics if line.step >= every]
        last_step = max(line.time for line in steps)
        return SampledRun(
            total_s=max([last_step, *clips_at]) - began,
            step_s=statistics.median(line.step_s for line in steps),
            longest_s=max(line.step_s for line in steps),
            ready_s=max(clips_at) - began if clips_at else math.nan,
            clips=len(clips_at),
            late=sum(at > last_step for at in clips_at),
        )


class TimedSamples(LiveSamples):
    """Live samples that note when each clip is there."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        self.clips_at: list[float] = []

    def ended(self, report: TurnReport) -> RunEvent | None:
        event = super().ended(report)
        if not report.failed:
            self.clips_at.append(time.time())
        return event


def run(
    workers: Annotated[int, typer.Option(help="Of the pool.")] = 2,
    every: Annotated[int, typer.Option(help="Steps before the samples; at least as many come after.")] = 100,
    sampler_steps: Annotated[int, typer.Option(help="Denoising steps of a clip.")] = 100,
    share: Annotated[float, typer.Option(help="Of the run's time, for samples beside it.")] = 0.4,
    repeats: Annotated[int, typer.Option(help="Runs of each way, in turns.")] = 3,
) -> None:
    ways: dict[str, float | None] = {"none": None, "beside": share, "at once": AT_ONCE}
    found: dict[str, list[SampledRun]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder)) as lab:
        lab.add_node(workers=workers)

        def measured(name: str, share: float | None, every: int) -> SampledRun:
            return _measured(lab, name, share, workers, every, sampler_steps)

        every = steps_that_hold(lambda steps: measured(f"first-{steps}", share, steps), every)
        for repeat in range(repeats):
            for way, of_time in ways.items():
                found[way].append(measured(f"{way.replace(' ', '-')}-{repeat}", of_time, every))
    print(f"{counted(workers, 'worker')}, {len(PROMPTS)} clips beside {every} steps, median of {repeats}")
    print(table(found))
    if left := [way for way, runs in found.items() if any(one.late for one in runs)]:
        print(f"clips of {' and '.join(left)} were made after the last step: these figures do not count; raise --every")
        raise typer.Exit(1)


def steps_that_hold(measured: Callable[[int], SampledRun], every: int) -> int:
    """Steps beside which all clips are made, from `every` on: twice as many until they are. Ends the command (exit 1)
    where that is not enough."""
    for _ in range(_LONGER):
        one = measured(every)
        if not one.late:
            return every
        print(f"{one.late} of {one.clips} clips were made after the last of {every} steps: twice as many")
        every *= 2
    print(f"not even {every // 2} steps hold {len(PROMPTS)} clips; raise --share, or lower --sampler-steps")
    raise typer.Exit(1)


def table(found: dict[str, list[SampledRun]]) -> str:
    """A line per way: medians of its runs, and the clips that its runs made before and after their last steps."""
    lines = ["samples   seconds   over none   median step   longest step   ready after   clips before, after the end"]
    plain_s = statistics.median(one.total_s for one in found["none"])
    for way, runs in found.items():
        total_s, step_s, longest_s, ready_s = (
            statistics.median(getattr(one, name) for one in runs)
            for name in ("total_s", "step_s", "longest_s", "ready_s")
        )
        ready = " " * 13 if math.isnan(ready_s) else f"{ready_s:11.1f} s"
        late, clips = sum(one.late for one in runs), sum(one.clips for one in runs)
        lines.append(
            f"{way:<9} {total_s:7.1f} {total_s / plain_s - 1:+10.1%} {step_s:11.3f} s {longest_s:12.2f} s {ready}"
            f" {clips - late:13d}, {late}"
        )
    return "\n".join(lines)


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
    live = TimedSamples(config, Path(config.run.dir) / config.run.name)
    one = lab.start(config, asides=RunAsides([live], config.sample.share))

    def on_checkpoint(folder: Path, step: int) -> None:
        live.on_checkpoint(step)

    one.on_checkpoint = on_checkpoint  # type: ignore[method-assign]
    one.join(max(1200, 6 * every))
    found = SampledRun.of(one.events, one.metrics, live.clips_at, every)
    if share is not None and found.clips != len(PROMPTS):
        raise RuntimeError(f"run {name} made {found.clips} of {len(PROMPTS)} clips.")
    return found
