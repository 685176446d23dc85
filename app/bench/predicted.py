"""`heddle bench predicted`: what plans say of seconds, beside the seconds of real runs on this machine.

A tiny model is profiled as `heddle profile` does it, and trained by 1, 2 and 4 workers, each run with a feeder, a
planner and processes of its own; then the demo, which begins without a profile. Of the second half of their steps: by
how much predicted seconds of a cascade are off its work (that of the bag's last member), and what a plan says of a
step, its end and remainder included, over what the step took apart from waiting for data.

More workers than cores slow each other down: how long a cascade takes depends on what else runs, which plans do not
know. So every error stands beside how far the same cascade (module, shape, batch, degree) is off the median of its
other runs in the same steps: no plan that does not know the moment can be nearer. What is systematic shows as planned
over worked seconds, 1 where plans are right in the middle; in sum it is lower where a few cascades take many times
as long, as a point is the median of its runs. And how far is the same cascade off its median when nothing
runs beside it, in CPU seconds of one process?
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from actors.plan.types import MODULES
from actors.records.metrics_line import StepMetrics
from actors.records.span_record import SpanRecord
from app.bench.lab import Lab, LabRun
from app.settings.config import RunConfig
from app.settings.out_files import check_writable
from data.types import Bucket
from ops.code_path import ROOT
from ops.counted import counted

DEMO = ROOT / "configs/runs/demo.yaml"
_PATIENCE_S = 1800.0
CASCADE_OFF, STEP_RATIO = 0.10, (0.95, 1.05)  # what must be reached
_ALIKE = 4  # runs of a cascade, from which on each is compared with the others
_ALONE = 30  # runs of a cascade in a process of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanComparison:
    """Plans of a run beside what was measured, over the second half of its steps."""

    run: str
    workers: int
    steps: int
    cascades: int
    cascade_off: float  # median of |planned / worked - 1|
    by_module: dict[str, float]
    again_off: float  # the same of the median of the same cascade's other runs, over those that ran often enough
    again_by_module: dict[str, float]
    bias: dict[str, float]  # median of planned / worked, by module
    in_sum: dict[str, float]  # planned over worked seconds of all: below that where a few take many times as long
    step_ratio: float  # median of predicted / measured seconds
    step_s: float  # median, without waiting for data
    remainder_s: float  # that the plans counted on at the end

    def markdown(self) -> str:
        bias = ", ".join(f"{module} {ratio:.2f} ({self.in_sum[module]:.2f})" for module, ratio in self.bias.items())
        return (
            f"| {self.run} | {self.cascades} | {self.cascade_off:.1%} ({_shares(self.by_module)}) | "
            f"{self.again_off:.1%} ({_shares(self.again_by_module)}) | {bias} | {self.step_ratio:.3f} | "
            f"{self.step_s:.3f} | {self.remainder_s:.3f} |"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RanCascade:
    """A cascade of a run: what it was, what a plan said of it, and what its last member worked."""

    module: str
    alike: tuple[object, ...]  # equal for cascades of the same shapes, batches and degree
    planned_s: float
    worked_s: float

    @property
    def off(self) -> float:
        return abs(self.planned_s / self.worked_s - 1.0)


def run(
    workers: Annotated[str, typer.Option(help="Numbers of workers of the tiny model.")] = "1,2,4",
    steps: Annotated[int, typer.Option(help="Steps of each of its runs.")] = 60,
    demo_steps: Annotated[int, typer.Option(help="Steps of the demo; 0 leaves it out.")] = 120,
    repeats: Annotated[int, typer.Option(help="Timed runs of every point of the profile.")] = 5,
    out: Annotated[Path | None, typer.Option(help="JSON with all figures.")] = None,
) -> None:
    """Measure and print one row per run."""
    check_writable([out])
    logging.getLogger("actors").setLevel(logging.ERROR)
    counts = [int(count) for count in workers.split(",") if count.strip()]
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder)) as lab:
        found = [of_tiny(lab, count, steps, repeats) for count in counts]
        if demo_steps:
            found.append(of_demo(lab, demo_steps))
        alone = off_alone(lab.config("alone"))
    again, ratio = "the same again off its median", "planned / worked (in sum)"
    print(f"| run | cascades | median off | {again} | {ratio} | predicted / measured step | step s | remainder s |")
    print("|---|---|---|---|---|---|---|---|")
    for one in found:
        print(one.markdown())
    print(f"the same cascade alone in one process, CPU seconds off their median: {_shares(alone)}")
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
    """Planned beside measured seconds in the second half of a run's steps."""
    late = run.metrics[len(run.metrics) // 2 :]
    cascades = ran_cascades(run.spans, {line.step for line in late})
    modules = sorted({one.module for one in cascades})
    again = again_errors(cascades)
    of = {module: [one for one in cascades if one.module == module] for module in modules}
    return PlanComparison(
        run=f"{name}, {counted(workers, 'worker')}",
        workers=workers,
        steps=len(late),
        cascades=len(cascades),
        cascade_off=statistics.median(one.off for one in cascades),
        by_module={module: statistics.median(one.off for one in ran) for module, ran in of.items()},
        again_off=statistics.median([off for found in again.values() for off in found] or [0.0]),
        again_by_module={module: statistics.median(found) for module, found in again.items()},
        bias={module: statistics.median(one.planned_s / one.worked_s for one in ran) for module, ran in of.items()},
        in_sum={
            module: sum(one.planned_s for one in ran) / sum(one.worked_s for one in ran) for module, ran in of.items()
        },
        step_ratio=statistics.median(step_ratios(late)),
        step_s=statistics.median(line.step_s - line.data_wait_s for line in late),
        remainder_s=run.plans[-1].remainder_s,
    )


def step_ratios(lines: Iterable[StepMetrics]) -> list[float]:
    """Predicted over measured seconds of steps, which waiting for data is no part of."""
    return [line.predicted_s / max(line.step_s - line.data_wait_s, 1e-9) for line in lines]


def ran_cascades(spans: Sequence[SpanRecord], steps: set[int]) -> list[RanCascade]:
    """Every cascade of these steps: of a bag its last member's work counts."""
    found: dict[tuple[int, str], RanCascade] = {}
    for span in spans:
        if span.step in steps and span.module != "finish" and span.work_s:
            key = span.step, span.cascade
            before = found[key].worked_s if key in found else 0.0
            found[key] = RanCascade(
                module=span.module,
                alike=(span.module, span.degree, *sorted((piece.bucket, piece.batch) for piece in span.pieces)),
                planned_s=span.planned_end_s - span.planned_start_s,
                worked_s=max(before, span.work_s),
            )
    return list(found.values())


def again_errors(cascades: Iterable[RanCascade]) -> dict[str, list[float]]:
    """`off_median` of the work seconds of equal cascades that ran at least four times, by module."""
    alike: dict[tuple[object, ...], list[float]] = {}
    for one in cascades:
        alike.setdefault(one.alike, []).append(one.worked_s)
    found: dict[str, list[float]] = {}
    for (module, *_), seconds in sorted(alike.items(), key=str):
        if len(seconds) >= _ALIKE:
            found.setdefault(str(module), []).extend(off_median(seconds))
    return found


def off_median(seconds: Sequence[float]) -> list[float]:
    """How far each is off the median of the others, as a share of itself like a prediction's error. 1, 1 and 2 s: 0.5,
    0.5 and 0.5."""
    return [
        abs(statistics.median([*seconds[:place], *seconds[place + 1 :]]) / one - 1.0)
        for place, one in enumerate(seconds)
    ]


def off_alone(config: RunConfig) -> dict[str, float]:
    """Median of `off_median` of the CPU seconds of a cascade repeated in this process, by module."""
    import torch

    from app.device.bench import Bench
    from app.device.points import ProfiledShape
    from ops.models.folders import resolve

    torch.set_num_threads(config.workers.torch_threads)
    bench = Bench(config, *resolve(config.model), torch.device("cpu"))
    shape = ProfiledShape(batch=2, bucket=Bucket(17, 64, 96), text_tokens=config.data.batch.text_tokens)
    found: dict[str, float] = {}
    for module in MODULES:
        work, _ = bench.begun(module, shape)
        took = []
        for _ in range(_ALONE):
            began = time.process_time()
            work()
            took.append(time.process_time() - began)
        found[module] = statistics.median(off_median(took))
    return found


def _shares(by_module: dict[str, float]) -> str:
    return ", ".join(f"{module} {off:.1%}" for module, off in by_module.items())
