"""`heddle train`. Heavy imports come after parsing."""

from __future__ import annotations

from typing import Annotated

import typer

from app.commands.options import Config, Overrides


def train(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the latest checkpoint.")] = False,
    back_to: Annotated[
        int | None,
        typer.Option(
            "--back-to",
            metavar="N",
            min=1,
            help="With --resume: from the checkpoint after N steps. Later ones are moved aside.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start again: all that is in the run's folder is deleted.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check files and data, plan, show all that is known before a start, and stop."),
    ] = False,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            metavar="SPEC",
            help="What the cluster looks like, no address: NODESxGPUS, e.g. 2x8, or a YAML file (workers.cluster).",
        ),
    ] = "",
) -> None:
    """Train a model as the config says.

    It runs on the Ray cluster that RAY_ADDRESS names (HOST:PORT, given on one of its nodes), or of which it is a job;
    else on a Ray of this machine, which ends with the run.
    """
    settings = [*(overrides or []), *([f"workers.cluster={cluster}"] if cluster else [])]
    if dry_run:
        from app.plan.dry_run import dry_run as preview

        preview(config, settings, resume=resume, overwrite=overwrite, back_to=back_to)
        return
    from app.run.cluster import leave_if_stuck
    from app.run.launch import train as run
    from app.run.signals import heed_no_more
    from app.settings.terminal import flush_or_drop

    code = run(config, settings, resume=resume, overwrite=overwrite, back_to=back_to)
    leave_if_stuck(code)
    heed_no_more()
    flush_or_drop()
    raise typer.Exit(code)
