"""`heddle bench sampling`: clips a minute of workers apart, and seconds to a clip of workers together.

    heddle bench sampling --checkpoint runs/demo --workers 3 --prompts 24

The same prompts by the same workers, one way after the other: apart, each with some prompts; together as one bag; and
together as two halves for guidance's two branches. Seconds count from the moment at which the workers have loaded the
model. What each way of making clips together is expected to take stands beside it.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ops.counted import counted

if TYPE_CHECKING:
    from app.sampling.clip_worker import ClipJob

ClipWay = Literal["apart", "one bag", "two halves"]
_CLIPS = re.compile(r"(\d+)/\d+ clips")
_STEP = re.compile(r"([\d.e+-]+) s a step expected")


@dataclass(kw_only=True)
class WayTimes:
    """When a way of making clips reported its progress; seconds of any clock."""

    way: ClipWay
    ready_s: float | None = None  # all workers have loaded the model
    clips_s: list[float] = field(default_factory=list)  # one for each clip
    step_s: float | None = None  # expected

    def hear(self, line: str, now: float) -> None:
        """A line that `spread` prints."""
        if told := _CLIPS.match(line):
            self.clips_s += [now] * (int(told[1]) - len(self.clips_s))
        elif "have loaded the model" in line or "each clip is made by" in line:
            self.ready_s = now
            step = _STEP.search(line)
            self.step_s = float(step[1]) if step else None

    @property
    def per_minute(self) -> float:
        """Clips a minute since the workers were ready."""
        assert self.ready_s is not None, "the workers were never ready"
        after = [at for at in self.clips_s if at > self.ready_s]
        return 60 * len(after) / (after[-1] - self.ready_s) if after else float("nan")

    @property
    def first_s(self) -> float:
        """Until the first clip that was made since then."""
        assert self.ready_s is not None, "the workers were never ready"
        return min((at for at in self.clips_s if at > self.ready_s), default=float("nan")) - self.ready_s


def run(
    checkpoint: Annotated[Path, typer.Option(help="Run, checkpoint or exported folder.")],
    workers: Annotated[int, typer.Option(min=2, help="That make clips.")] = 2,
    prompts: Annotated[int, typer.Option(help="Clips of each way, of the run's own prompts in turn.", min=1)] = 12,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    cluster: Annotated[str | None, typer.Option(help="Address of a Ray cluster; default: this machine.")] = None,
) -> None:
    """Throughput of workers apart and latency of workers together, of one run's samples."""
    from app.run.borrowed_ray import borrowed_ray
    from app.sampling.clip_worker import ClipJob
    from app.sampling.clips import ClipSettings, batch_limit
    from app.sampling.model import one_checkpoint, saved_model
    from app.sampling.ways import has_two_branches
    from app.settings.prompt_line import text_of
    from ops.typed import ConfigError

    saved = saved_model(checkpoint, device=device)
    settings, own = ClipSettings.of(saved.config), saved.config.sample.prompts
    if not own:
        raise ConfigError(f"{checkpoint} has no sample.prompts; give a run that has some.")
    ways: list[ClipWay] = ["apart", "one bag"]
    if has_two_branches(saved.config.model.dit, settings.sampler):
        ways.append("two halves")
    texts = [text_of(own[number % len(own)]) for number in range(prompts)]  # all of one size
    batch = batch_limit(settings, saved.geometry)
    job = ClipJob(checkpoint=str(one_checkpoint(checkpoint).resolve()), ema=True, device=device, settings=settings)
    with borrowed_ray(cluster, workers), tempfile.TemporaryDirectory() as folder:
        found = [
            _timed(way, job, texts, Path(folder) / f"{number}.mp4", workers, batch) for number, way in enumerate(ways)
        ]
    size = f"{settings.frames} x {settings.height} x {settings.width}"
    print(f"{counted(workers, 'worker')}, {counted(prompts, 'clip')} of {size}, {settings.sampler.steps} steps")
    print(table(found, settings.sampler.steps))


def table(found: Sequence[WayTimes], steps: int) -> str:
    """A line per way: clips a minute, seconds to the first clip, and of its denoising what was expected."""
    lines = ["way          clips/minute   first clip   denoising expected"]
    for one in found:
        expected = "" if one.step_s is None else f"{steps * one.step_s:18.2f} s"
        lines.append(f"{one.way:<12} {one.per_minute:12.1f} {one.first_s:10.2f} s {expected}".rstrip())
    return "\n".join(lines)


def _timed(way: ClipWay, job: ClipJob, prompts: Sequence[str], out: Path, workers: int, batch: int) -> WayTimes:
    from app.sampling.spread import spread

    times = WayTimes(way=way)
    spread(
        replace(job, halves="always" if way == "two halves" else "never"),
        prompts,
        out,
        workers,
        batch=batch,
        together=way != "apart",
        tell=lambda line: times.hear(line, time.monotonic()),
    )
    return times
