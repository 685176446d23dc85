"""`heddle bench predicted`: what plans say of seconds, beside the seconds of real runs on this machine.

A tiny model is profiled as `heddle profile` does it, and trained by 1, 2 and 4 workers, each run with a feeder, a
planner and processes of its own; then the demo, which begins without a profile. Of the second half of their steps: by
how much predicted seconds of a cascade are off its work (that of the bag's last member), and what a plan says of a
step, its end and remainder included, over what the step took apart from waiting for data.

More workers than cores slow each other down: how long a cascade takes depends on what else runs, which plans do
not know, and its error is that of a mean.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actors.records.metrics_line import StepMetrics
from actors.records.span_record import SpanRecord
from app.bench.lab import Lab
from app.settings.config import RunConfig

if TYPE_CHECKING:
    from app.bench.lab import LabRun

DEMO = Path(__file__).resolve().parents[2] / "configs/runs/demo.yaml"
_PATIENCE_S = 1800.0
CASCADE_OFF, STEP_RATIO = 0.10, (0.95, 1.05)  # what must be reached


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanComparison:
    """Plans of a run beside what was measured, over the second half of its steps."""

    run: str
    workers: int
    steps: int
    cascades: int
    cascade_off: float  # median of |planned / worked - 1|
    by_module: dict[str, float]
    step_ratio: float  # median of predicted / measured seconds
    step_s: float  # median, without waiting for data
    remainder_s: float  # that the plans counted on at the end

    def markdown(self) -> str:
        modules = ", ".join(f"{module} {off:.1%}" for module, off in self.by_module.items())
        return (
            f"| {self.run} | {self.cascades} | {self.cascade_off:.1%} ({modules}) | {self.step_ratio:.3f} | "
            f"{self.step_s:.3f} | {self.remainder_s:.3f} |"
        )


def run(
    workers: Annotated[str, typer.Option(help="Numbers of workers of the tiny model.")] = "1,2,4",
    steps: Annotated[int, typer.Option(help="Steps of each of its runs.")] = 60,
    demo_steps: Annotated[int, typer.Option(help="Steps of the demo; 0 leaves it out.")] = 120,
    repeats: Annotated[int, typer.Option(help="Timed runs of every point of the profile.")] = 5,
    out: Annotated[Path | None, typer.Option(help="JSON with all figures.")] = None,
) -> None:
    """Measure and print one row per run."""
    logging.getLogger("actors").setLevel(logging.ERROR)
    counts = [int(count) for count in workers.split(",") if count.strip()]
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder)) as lab:
        found = [of_tiny(lab, count, steps, repeats) for count in counts]
        if demo_steps:
            found.append(of_demo(lab, demo_steps))
    print("| run | cascades | median off | predicted / measured step | step s | remainder s |")
    print("|---|---|---|---|---|---|")
    for one in found:
        print(one.markdown())
    low, high = STEP_RATIO
    print(f"must: off at most {CASCADE_OFF:.0%}, predicted / measured {low} to {high}")
    if out is not None:
        out.write_text(json.dumps([asdict(one) for one in found], indent=1))


def of_tiny(lab: Lab, workers: int, steps: int, repeats: int = 3) -> PlanComparison:
    """The tiny model on `workers` workers of one node, from a profile of this machine."""
    from app.device.profile import run_profile

    name = f"tiny{workers}"
    limits = {"min": workers, "max": workers, "wait_s": 600}
    config = lab.config(name, train={"steps": steps}, workers=limits, planner={"lookahead": 1})
    settings, profile = lab.folder / f"{name}.yaml", lab.folder / f"{name}.json"
    settings.write_text(config.to_yaml())
    degrees = [degree for degree in config.model.dit.degrees(workers, "auto") if degree <= workers]
    run_profile(settings, [], profile, repeats=repeats, device="cpu", degrees=degrees)
    config = lab.config(name, train={"steps": steps}, workers=limits, planner={"lookahead": 1, "profile": str(profile)})
    return _executed(lab, name, config, workers)


def of_demo(lab: Lab, steps: int) -> PlanComparison:
    """The demo, on the laboratory's clips."""
    shards = sorted(str(path) for path in (lab.data / "shards").glob("*.tar"))
    demo = RunConfig.load(
        DEMO,
        [
            f"run.dir={lab.folder / 'runs'}",
            f'data.sources=[{{kind: webdataset, path: "{"::".join(shards)}"}}]',
            f"train.steps={steps}",
            "workers.min=3",
            "workers.device=cpu",
            "sample.prompts=[]",
        ],
    )
    return _executed(lab, "demo", demo, demo.workers.max)


def _executed(lab: Lab, name: str, config: RunConfig, workers: int) -> PlanComparison:
    node = lab.add_node(workers=workers)
    try:
        run = lab.start(config)
        outcome = run.join(_PATIENCE_S)
    finally:
        lab.cluster.remove_node(node, allow_graceful=True)
        lab.nodes.remove(node)
    if outcome.code:
        raise RuntimeError(f"{name} ended early: {outcome.reason}")
    return foretold(name, workers, run)


def foretold(name: str, workers: int, run: LabRun) -> PlanComparison:
    """The second half of a run's steps."""
    late = run.metrics[len(run.metrics) // 2 :]
    errors = cascade_errors(run.spans, {line.step for line in late})
    every = [error for of in errors.values() for error in of]
    return PlanComparison(
        run=f"{name}, {workers} worker{'s' * (workers > 1)}",
        workers=workers,
        steps=len(late),
        cascades=len(every),
        cascade_off=statistics.median(every),
        by_module={module: statistics.median(of) for module, of in errors.items()},
        step_ratio=statistics.median(step_ratios(late)),
        step_s=statistics.median(line.step_s - line.data_wait_s for line in late),
        remainder_s=run.plans[-1].remainder_s,
    )


def step_ratios(lines: Iterable[StepMetrics]) -> list[float]:
    """Predicted over measured seconds of steps, which waiting for data is no part of."""
    return [line.predicted_s / max(line.step_s - line.data_wait_s, 1e-9) for line in lines]


def cascade_errors(spans: Sequence[SpanRecord], steps: set[int]) -> dict[str, list[float]]:
    """|planned / worked - 1| of every cascade of these steps, by module: of a bag its last member's work counts."""
    worked: dict[tuple[int, str], tuple[str, float, float]] = {}
    for span in spans:
        if span.step in steps and span.module != "finish" and span.work_s:
            planned_s = span.planned_end_s - span.planned_start_s
            _, _, longest = worked.get((span.step, span.cascade), ("", 0.0, 0.0))
            worked[span.step, span.cascade] = span.module, planned_s, max(longest, span.work_s)
    found: dict[str, list[float]] = {}
    for module, planned_s, work_s in worked.values():
        found.setdefault(module, []).append(abs(planned_s / work_s - 1.0))
    return found
