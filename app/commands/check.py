"""`heddle check`. Heavy imports come after parsing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.options import Overrides
from ops.typed import ConfigError


def check(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML of a run, whose files every node has to see.")
    ] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster; default: RAY_ADDRESS, else this machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at every node and GPU of a cluster before a run: software, files, memory, speed, network, and a sum over
    all. Exit code 1 where something is wrong."""
    from app.check.command import run_check
    from app.run.borrowed_ray import borrowed_ray
    from app.settings.config import RunConfig, from_here

    if overrides and config is None:
        raise ConfigError("--set is for --config: without one no run is looked at. Give --config RUN.yaml as well.")
    run = None if config is None else from_here(RunConfig.load(config, overrides or []))
    with borrowed_ray(cluster, cpus=1):
        code = run_check(run, as_json=as_json)
    raise typer.Exit(code)
