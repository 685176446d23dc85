"""`heddle bench cluster`: runs on virtual clusters of up to 1,024 workers, with losses and joins.

heddle bench cluster --nodes 2..8 --speed 20        # all in this process, without what Ray's calls take
heddle bench cluster --nodes 2..8 --speed 20 --ray  # Ray actors of this machine host the workers
heddle bench cluster --nodes 1,2,4 --calm --strategy ddp --strategy static --strategy cascade --out page.html
heddle bench cluster --set A-16gpu --exact --lookahead 2 --speed 5  # the published steps, one after the other

The controller is the real one, with its planner, membership, heartbeats, dispatch, commits and recovery; what is not
real is said in `app/bench/cluster/parts.py`. Workers wait as long as latencies published for HunyuanVideo on H100s say,
with noise, stragglers and seconds on the link (`app/bench/cluster/physics.py`); a step has Arachne's mix, four clips'
batches for 16 GPUs. A virtual second takes 1 / --speed real ones, while the controller takes what it takes: its CPU
seconds, and the milliseconds of a dispatch, are real ones, and a high speed makes steps look longer. Its share is that
of a step of ten seconds: with `--ray` of the whole process, whose seconds a line tells by thread (the controller's own
has that of the command, the others are Ray's), else of the controller's thread. The bench ends with exit code
1 if a step was not committed once and whole.

With `--set` the steps are those of a published workload (`configs/bench/`), in their order, on its own cluster, of
which nothing is lost; its items need no text encode, as the published costs have none. With `--exact` its cascades take
what the profile says, and neither the link nor the end of a step takes time, as in plans of `heddle bench planner`:
then executed seconds are above the planned ones by what the controller takes.

`ddp` is no strategy and takes no real time: it is evaluated on the same items with the same seconds
(`app/bench/cluster/ddp.py`), on machines of which none is lost; no time of a controller is added.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actors.config import PlannerConfig
from app.bench.cluster.tables import HEAD, change_rows, curves_of, row, steps_line, thread_line, way_rows, ways_of
from app.bench.markdown import markdown_table
from app.bench.page import command_of, facts_of
from app.settings.option_groups import in_groups
from app.settings.out_files import check_writable
from ops.code_path import ROOT
from ops.counted import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from app.bench.cluster.ddp import DdpFigures
    from app.bench.cluster.figures import ClusterFigures
    from app.bench.cluster.setups import Disturbance, Setup

CONFIGS = ROOT / "configs"
SETS = tuple(sorted(path.stem for path in (CONFIGS / "bench").glob("*gpu.json")))
STRATEGIES = ("static", "flexsp", "knapsack", "cascade")
DDP = "ddp"  # evaluated beside them
WAYS = (DDP, *STRATEGIES)
NODES, GPUS, STEPS = "2..8", 8, 50  # unless given
MOST = 1024  # workers: larger ones take one process many minutes to form, and have not been measured


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """What is run, how, and how often."""

    nodes: Annotated[
        str | None, typer.Option(help=f"Sizes: 4, or 2,8,32, or 2..128, which doubles; default: {NODES}.")
    ] = None
    gpus: Annotated[int | None, typer.Option(min=1, help=f"Virtual workers of a node; default: {GPUS}.")] = None
    steps: Annotated[int | None, typer.Option(min=1, help=f"Steps of a run; default: {STEPS}.")] = None
    strategy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"One of {', '.join(WAYS)}; default: cascade. Repeatable.")
    ] = None
    speed: Annotated[float, typer.Option(help="Virtual seconds in a real one.")] = 10.0
    on_ray: Annotated[bool, typer.Option("--ray", help="Workers, planner, monitor and feeder are Ray actors.")] = False
    direct: Annotated[bool, typer.Option("--direct", help="Every worker is called by itself, without relays.")] = False
    calm: Annotated[bool, typer.Option("--calm", help="No worker is lost, no node, and none joins.")] = False
    seed: Annotated[int, typer.Option(help="Of items and noise.")] = 0
    published: Annotated[
        str, typer.Option("--set", help=f"Steps and cluster of a published workload: {', '.join(SETS)}.")
    ] = ""
    exact: Annotated[bool, typer.Option("--exact", help="No noise, stragglers, seconds on the link, ends.")] = False
    lookahead: Annotated[int, typer.Option(min=0, max=64, help="Steps whose encodes may run early.")] = (
        PlannerConfig().lookahead
    )
    budget: Annotated[
        float, typer.Option(min=0.0, help="Real seconds of planning a step: more where other work slows it down.")
    ] = PlannerConfig().budget_s

    @property
    def ways(self) -> list[str]:
        return self.strategy or ["cascade"]

    @property
    def strategies(self) -> list[str]:
        """The ways that are run, not only evaluated."""
        return [name for name in self.ways if name != DDP]

    @property
    def size(self) -> tuple[str, int, int]:
        """(nodes as they are written, virtual workers of each, steps) without a published workload."""
        return self.nodes or NODES, self.gpus or GPUS, self.steps or STEPS

    def check(self) -> None:
        """Raises BadParameter where options are wrong, or do not go together."""
        own_size = [f"--{name}" for name in ("nodes", "gpus", "steps") if getattr(self, name)]
        if self.published and own_size:
            raise typer.BadParameter(
                f"{self.published} has its own cluster and steps; leave out {' and '.join(own_size)}.",
                param_hint="--set",
            )
        nodes, gpus, _ = self.size
        sizes = sizes_of(nodes)
        if unknown := [name for name in self.ways if name not in WAYS]:
            raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(WAYS)}.", param_hint="--strategy")
        if DDP in self.ways and not self.calm:
            raise typer.BadParameter(
                "ddp is evaluated on machines of which none is lost; add --calm, so that all have the same.",
                param_hint="--strategy",
            )
        if self.strategies and not self.published and (largest := max(sizes) * gpus) > MOST:
            raise typer.BadParameter(
                f"{max(sizes):,} nodes of {gpus} are {largest:,} workers; at most {MOST:,} are run. Give "
                f"fewer, or ddp alone, which is evaluated.",
                param_hint="--nodes",
            )
        if not 0 < self.speed < math.inf:
            raise typer.BadParameter(f"{self.speed:g} is not above 0, as 1 is for real time.", param_hint="--speed")
        if self.published and self.published not in SETS:
            raise typer.BadParameter(f"{self.published!r} is none of {', '.join(SETS)}.", param_hint="--set")
        if self.published and DDP in self.ways:
            raise typer.BadParameter("ddp is not evaluated on published steps; leave it out.", param_hint="--strategy")

    def setups(self) -> list[Setup]:
        """A run of each size, or of the published workload, whatever its strategy."""
        from app.bench.cluster.physics import Physics
        from app.bench.cluster.setups import Setup

        physics = Physics(speed=self.speed, seed=self.seed)
        if self.exact:
            physics = replace(physics, noise=0.0, stragglers=0.0, link_s=0.0, update_s=0.0)
        if self.published:
            return [Setup.of_published(CONFIGS / "bench" / f"{self.published}.json", physics)]
        nodes, gpus, steps = self.size
        return [
            Setup(
                nodes=count,
                gpus=gpus,
                steps=steps,
                physics=physics,
                disturbances=() if self.calm else disturbances(steps, count),
            )
            for count in sizes_of(nodes)
        ]

    def command(self, out: Path) -> str:
        """The command line that writes this page."""
        size = zip(("--nodes", "--gpus", "--steps"), self.size, strict=True)
        options: list[tuple[str, object]] = [
            *([("--set", self.published)] if self.published else size),
            ("--strategy", self.ways),
            ("--speed", f"{self.speed:g}"),
            ("--ray", self.on_ray),
            ("--direct", self.direct),
            ("--calm", self.calm),
            ("--seed", self.seed),
            ("--exact", self.exact),
            ("--lookahead", self.lookahead),
            ("--budget", f"{self.budget:g}"),
            ("--out", out.name),
        ]
        return command_of("cluster", options)


@in_groups
def run(
    *,
    options: _Options,
    out: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="A page if it ends in .html, else JSON with all figures. Repeatable."),
    ] = None,
) -> None:
    """A table per size and strategy, what losses and joins took, and the curve of the controller's seconds."""
    options.check()
    check_writable(out or [])
    logging.getLogger("actors").setLevel(logging.CRITICAL)  # workers are lost on purpose
    setups = options.setups()
    evaluated = _evaluated(setups) if DDP in options.ways else []
    found = _run_all(setups, options)
    compared = ways_of(evaluated, found)
    curves = curves_of([one for one in found if one.strategy in options.strategies[-1:]])
    if found:
        print(f"\n{markdown_table(*change_rows(found))}")
    if compared:
        print(f"\n{markdown_table(*way_rows(compared))}")
    for curve in curves:
        print(curve.line())
    for path in out or []:
        if path.suffix == ".html":
            from app.bench.cluster.page import html

            path.write_text(html(compared, found, curves, options.command(path), facts_of()), encoding="utf-8")
        else:
            told = {"figures": [asdict(one) for one in found], "curves": [asdict(one) for one in curves]}
            told["ddp"] = [asdict(one) for one in evaluated]
            path.write_text(
                json.dumps({"speed": options.speed, "ray": options.on_ray, "direct": options.direct, **told}, indent=1)
            )


def _evaluated(setups: Sequence[Setup]) -> list[DdpFigures]:
    """Figures of DDP. Raises BadParameter where it has no degree for a cluster."""
    from app.bench.cluster.ddp import NoDegree, ddp_of

    try:
        return [figures for setup in setups for figures in ddp_of(setup)]
    except NoDegree as failed:
        raise typer.BadParameter(str(failed), param_hint="--nodes") from None


def _run_all(setups: Sequence[Setup], options: _Options) -> list[ClusterFigures]:
    """Run every setup with every strategy, and print a row of each as it ends. Ends the command where a run fails."""
    from app.bench.cluster.figures import VirtualRunFailed
    from app.bench.cluster.setups import RELAY_FROM
    from app.bench.cluster.simulate import run_here, run_on_ray

    if options.strategies:
        print(HEAD, flush=True)
    found: list[ClusterFigures] = []
    relay_from = 0 if options.direct else RELAY_FROM
    for one, name in product(setups, options.strategies):
        setup = replace(one, strategy=name, relay_from=relay_from, lookahead=options.lookahead, budget_s=options.budget)
        try:
            if options.on_ray:
                with _ray():
                    found.append(run_on_ray(setup))
            else:
                found.append(run_here(setup))
        except VirtualRunFailed as failed:
            print(f"{counted(setup.nodes, 'node')}, {name}: {failed}")
            raise typer.Exit(1) from None
        print(row(found[-1]), flush=True)
        if options.on_ray and (line := thread_line(found[-1])):
            print(line, flush=True)
        if options.published:
            print(steps_line(found[-1]), flush=True)
    return found


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
    from app.bench.cluster.setups import Disturbance

    if steps < 10:
        return ()
    whole = (("worker", steps // 5), ("node", 2 * steps // 5), ("join", 3 * steps // 5))
    return tuple(Disturbance(step=step, what=what) for what, step in whole if what == "worker" or nodes > 1)


@contextmanager
def _ray() -> Iterator[None]:
    """A Ray of this machine alone, with nothing else on it."""
    import ray

    from actors.names import NAMESPACE

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
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
