"""`heddle train`. Heavy imports come after parsing."""

from __future__ import annotations

from typing import Annotated

import typer

from app.commands.options import Config, Overrides
from ops.typed import ConfigError


def train(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the latest checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again in an existing folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Resolve, open the data, plan, show, stop.")] = False,
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="SPEC", help="With --dry-run: plan for NODESxGPUS or a YAML file.")
    ] = "",
) -> None:
    """Train a model as the config says."""
    if cluster and not dry_run:
        raise ConfigError("--cluster describes a cluster for --dry-run; a run takes the one that it is started on.")
    if dry_run:
        from app.plan.dry_run import dry_run as preview

        preview(config, overrides or [], cluster)
        return
    from app.run.launch import train as run

    raise typer.Exit(run(config, overrides or [], resume=resume, overwrite=overwrite) or 0)
