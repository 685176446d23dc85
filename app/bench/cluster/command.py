"""`heddle bench cluster`: runs on virtual clusters of up to 1,024 workers and more, with losses and joins.

heddle bench cluster --nodes 2..8 --speed 20        # all in this process, without what Ray's calls take
heddle bench cluster --nodes 2..8 --speed 20 --ray  # Ray actors of this machine host the workers
heddle bench cluster --nodes 1,2,4 --calm --strategy ddp --strategy static --strategy cascade  # beside DDP

The controller is the real one, with its planner, membership, heartbeats, dispatch, commits and recovery; what is not
real is said in `app/bench/cluster/parts.py`. Workers wait as long as latencies published for HunyuanVideo on H100s say,
with noise, stragglers and seconds on the link (`app/bench/cluster/physics.py`); a step has Arachne's mix, four clips'
batches for 16 GPUs. A virtual second takes 1 / --speed real ones, while the controller takes what it takes: its CPU
seconds, and the milliseconds of a dispatch, are real ones, and a high speed makes steps look longer. Its share is that
of a step of ten seconds. `ddp` is no strategy: it is evaluated on the same items with the
same seconds (`app/bench/cluster/ddp.py`), on machines of which none is lost, and no controller's time is added to it.
The bench ends with exit code 1 if a step was not committed once and whole.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from app.bench.cluster.ddp import DdpFigures
    from app.bench.cluster.simulate import ClusterFigures, Disturbance

STRATEGIES = ("static", "flexsp", "knapsack", "cascade")
DDP = "ddp"  # evaluated beside them
WAYS = (DDP, *STRATEGIES)
FAR = 10_000  # GPUs that the curves are continued to
SHARE = 0.05  # of a step of ten seconds that the controller may take


def run(
    nodes: Annotated[str, typer.Option(help="Sizes: 4, or 2,8,32, or 2..128, which doubles.")] = "2..8",
    gpus: Annotated[int, typer.Option(min=1, help="Virtual workers of a node.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a run.")] = 50,
    strategy: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(WAYS)}; default: cascade. Repeatable.")
    ] = None,
    speed: Annotated[float, typer.Option(help="Virtual seconds in a real one.")] = 10.0,
    on_ray: Annotated[bool, typer.Option("--ray", help="Workers, planner, monitor and feeder are Ray actors.")] = False,
    calm: Annotated[bool, typer.Option("--calm", help="No worker is lost, no node, and none joins.")] = False,
    seed: Annotated[int, typer.Option(help="Of items and noise.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON with all figures.")] = None,
) -> None:
    """A table per size and strategy, what losses and joins took, and the curve of the controller's seconds."""
    sizes, ways = sizes_of(nodes), strategy or ["cascade"]
    if unknown := [name for name in ways if name not in WAYS]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(WAYS)}.", param_hint="--strategy")
    if DDP in ways and not calm:
        raise typer.BadParameter(
            "ddp is evaluated on machines of which none is lost; add --calm, so that all have the same.",
            param_hint="--strategy",
        )
    strategies = [name for name in ways if name != DDP]
    if not 0 < speed < math.inf:
        raise typer.BadParameter(f"{speed:g} is not above 0, as 1 is for real time.", param_hint="--speed")
    from app.bench.cluster.ddp import NoDegree
    from app.bench.cluster.physics import Physics
    from app.bench.cluster.simulate import Setup, VirtualRunFailed, ddp_of, run_here, run_on_ray

    logging.getLogger("actors").setLevel(logging.CRITICAL)  # workers are lost on purpose
    found: list[ClusterFigures] = []
    evaluated: list[DdpFigures] = []
    if DDP in ways:
        try:
            for count in sizes:
                setup = Setup(nodes=count, gpus=gpus, steps=steps, physics=Physics(seed=seed))
                evaluated += ddp_of(setup)
        except NoDegree as failed:
            raise typer.BadParameter(str(failed), param_hint="--nodes") from None
    if strategies:
        print(HEAD, flush=True)
    for count in sizes:
        for name in strategies:
            setup = Setup(
                nodes=count,
                gpus=gpus,
                steps=steps,
                strategy=name,
                physics=Physics(speed=speed, seed=seed),
                disturbances=() if calm else disturbances(steps, count),
            )
            try:
                if on_ray:
                    with _ray():
                        found.append(run_on_ray(setup))
                else:
                    found.append(run_here(setup))
            except VirtualRunFailed as failed:
                print(f"{count} nodes, {name}: {failed}")
                raise typer.Exit(1) from None
            print(row(found[-1]), flush=True)
    if found:
        print(changes(found))
    if evaluated:
        print(beside_ddp(evaluated, found))
    curves = curves_of([one for one in found if one.strategy in strategies[-1:]])
    for curve in curves:
        print(curve.line())
    if out is not None:
        told = {"figures": [asdict(one) for one in found], "curves": [asdict(one) for one in curves]}
        told["ddp"] = [asdict(one) for one in evaluated]
        out.write_text(json.dumps({"speed": speed, "ray": on_ray, **told}, indent=1))


def sizes_of(text: str) -> list[int]:
    """`4`, `2,8,32`, or `2..128`, which doubles and ends with its last. Raises BadParameter."""
    if match := re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", text):
        first, last = int(match[1]), int(match[2])
        if 1 <= first <= last:
            doubled = [first << n for n in range(32) if first << n < last]
            return [*doubled, last]
    elif re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", text):
        return [int(number) for number in text.split(",")]
    raise typer.BadParameter(
        f"{text!r} is no number of nodes of at least 1, list of them, or range such as 2..128.", param_hint="--nodes"
    )


def disturbances(steps: int, nodes: int) -> tuple[Disturbance, ...]:
    """A worker is lost, whose place another takes; later a node; later a new node joins. Runs of less than ten steps
    are not disturbed, and clusters of one node lose none."""
    from app.bench.cluster.simulate import Disturbance

    if steps < 10:
        return ()
    whole = (("worker", steps // 5), ("node", 2 * steps // 5), ("join", 3 * steps // 5))
    return tuple(Disturbance(step=step, what=what) for what, step in whole if what == "worker" or nodes > 1)


@contextmanager
def _ray() -> Iterator[None]:
    """A Ray of this machine alone, with nothing else on it."""
    import ray

    from actors.names import NAMESPACE

    root = str(Path(__file__).resolve().parents[3])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # workers die here on purpose
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=300 * 2**20,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        ray.shutdown()


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


def changes(found: Sequence[ClusterFigures]) -> str:
    """A table of what losses and joins took."""
    lines = [
        "\n| workers | strategy | what | next generation, real s | step again, virtual s | workers then |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        lines.append(f"| {one.workers} | {one.strategy} | start | {one.form_s:.3f} | - | {one.workers} |")
        for seen in one.recovered:
            lines.append(
                f"| {one.workers} | {one.strategy} | {seen.what} | {seen.form_s:.3f} | {seen.step_s:.1f} | "
                f"{seen.workers} |"
            )
    return "\n".join(lines)


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


def ways_of(evaluated: Sequence[DdpFigures], found: Sequence[ClusterFigures]) -> list[WayRow]:
    """All ways on the sizes on which DDP was evaluated, the smallest first."""
    rows = []
    for workers in sorted({one.workers for one in evaluated}):
        ddp = [one for one in evaluated if one.workers == workers]
        named: list[tuple[str, DdpFigures | ClusterFigures, bool]] = [(_name_of(one), one, False) for one in ddp]
        named += [(one.strategy, one, True) for one in found if one.workers == workers]
        rows += [
            WayRow(
                workers=workers,
                name=name,
                mean_step_s=one.mean_step_s,
                samples_per_s=one.samples_per_s,
                ratio=one.samples_per_s / ddp[0].samples_per_s,
                idle=one.idle,
                executed=executed,
            )
            for name, one, executed in named
        ]
    return rows


def _name_of(one: DdpFigures) -> str:
    return f"{one.way} (SP {', '.join(map(str, one.degrees))})"


def beside_ddp(evaluated: Sequence[DdpFigures], found: Sequence[ClusterFigures]) -> str:
    """A table of what is trained beside DDP."""
    lines = ["\n| GPUs | way | s per step, mean | samples per s | of ddp's | idle | |", "|---|---|---|---|---|---|---|"]
    for one in ways_of(evaluated, found):
        lines.append(
            f"| {one.workers} | {one.name} | {one.mean_step_s:.2f} | {one.samples_per_s:.4f} | {one.ratio:.2f} | "
            f"{one.idle:.1%} | {'executed' if one.executed else 'evaluated'} |"
        )
    return "\n".join(lines)


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
