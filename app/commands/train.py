"""`heddle train`. Heavy imports come after parsing."""

from __future__ import annotations

from typing import Annotated

import typer

from app.commands.options import Config, Overrides


def train(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the latest checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again in an existing folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Resolve, open the data, plan, show, stop.")] = False,
) -> None:
    """Train a model as the config says."""
    if dry_run:
        from app.plan.dry_run import dry_run as preview

        preview(config, overrides or [])
        return
    from app.run.launch import train as run

    raise typer.Exit(run(config, overrides or [], resume=resume, overwrite=overwrite) or 0)
