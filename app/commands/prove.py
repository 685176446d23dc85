"""`heddle prove`. Heavy imports come after parsing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.options import Config, Overrides


def prove(
    config: Config,
    overrides: Overrides = None,
    steps: Annotated[
        int,
        typer.Option(
            "--steps",
            help="A quarter of them lies before each loss or change of the pool; both runs take as many or more.",
        ),
    ] = 24,
    out: Annotated[Path | None, typer.Option("--out", help="JSON with all figures.")] = None,
    page: Annotated[Path | None, typer.Option("--page", help="HTML with the curves of both runs.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start again: all that is in the folders of both is deleted.")
    ] = False,
) -> None:
    """Train some steps of a run twice, and show that both were the same training: once undisturbed, and once while a
    worker is killed and the pool shrinks and grows. Exit code 1 where they were not.

    It runs where heddle train does: on the Ray cluster that RAY_ADDRESS names, else on this machine.
    """
    from app.proof.command import prove as run
    from app.run.cluster import leave_if_stuck
    from app.settings.out_files import check_page, check_writable

    check_writable([out])
    check_page(page, "--page")
    code = run(config, overrides or [], steps, out, page, overwrite=overwrite)
    leave_if_stuck(code)
    raise typer.Exit(code)
