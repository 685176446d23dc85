"""`heddle plan`. Heavy imports come after parsing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from actors.plan.registry import STRATEGIES
from app.commands.options import Overrides
from ops.typed import ConfigError


def plan(
    workload: Annotated[Path | None, typer.Option("--workload", help="JSON: items of consecutive steps.")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Plan this run's buckets instead.")] = None,
    overrides: Overrides = None,
    from_data: Annotated[
        bool, typer.Option("--from-data", help="Open the config's data: real items, and an account of every sample.")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="Measured latencies (file, or folder of a run); with --config optional."),
    ] = None,
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="SPEC", help="NODESxGPUS, e.g. 2x8, or a YAML file.")
    ] = "",
    strategy: Annotated[
        str, typer.Option("--strategy", help=f"One of {', '.join(STRATEGIES)}; default: the config's.")
    ] = "",
    compare: Annotated[str, typer.Option("--compare", help="Several strategies, separated by commas.")] = "",
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            help="Planning seconds per step; default: planner.budget_s, of a workload 0.2, or 1 where it has several "
            "steps.",
            min=0,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="With --config: steps planned; default 8.", show_default=False, min=0)] = 0,
    seed: Annotated[
        int | None, typer.Option(help="With --config: seed of the drawn buckets; default: 0.", min=0)
    ] = None,
    shares: Annotated[
        list[str] | None,
        typer.Option(
            "--share",
            metavar="BUCKET=SHARE",
            help="With --config: how often a bucket is drawn, e.g. 33x32x48=0.5; the others share what is left. "
            "Repeatable.",
        ),
    ] = None,
    codes: Annotated[
        str,
        typer.Option(
            "--codes",
            help="With --config: KnapFormer's data codes, e.g. g16b4i256f1s0,g4b1i512f85s1, on as many workers unless "
            "--cluster or workers.cluster names others.",
        ),
    ] = "",
    json_out: Annotated[
        Path | None,
        typer.Option("--json", help="Write the plan here, with the account of --from-data; /dev/stdout prints it."),
    ] = None,
    gantt: Annotated[
        Path | None, typer.Option("--gantt", help="Write the plan as a picture here (.png, .svg or .pdf).")
    ] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Write a page here.")] = None,
) -> None:
    """Preview: step times, idle share, memory and the account of the data, before a GPU is touched.

    Columns of the table: bound is the least that any plan can take, over is how much more this one takes. WIR is the
    busiest worker's time over the least busy one's, - where that one has nothing to do. CV step and CV comp say how
    unevenly workers get tokens and computation; 0 is even. peak is the memory of the largest cascade, planning the
    longest that one step took to plan.
    """
    from app.plan.preview import PlanRequest, run_plan
    from app.settings.standard_out import talk_beside

    # What is to be said of the fits is printed beside the plan.
    logging.getLogger("actors.plan.costs.known").setLevel(logging.WARNING)
    if strategy and compare:
        raise ConfigError(f"--strategy is for one plan; name {strategy} in --compare and leave --strategy out.")
    strategies = [name.strip() for name in compare.split(",") if name.strip()] or [strategy] * bool(strategy)
    with talk_beside(json_out, page):
        run_plan(
            PlanRequest(
                workload=workload,
                config=config,
                overrides=overrides or [],
                from_data=from_data,
                profile=profile,
                cluster=cluster,
                strategies=strategies,
                budget_s=budget,
                steps=steps,
                seed=seed,
                shares=shares or [],
                codes=codes,
            ),
            out=json_out,
            gantt=gantt,
            page=page,
        )
