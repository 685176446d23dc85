"""`heddle report`. Heavy imports come after parsing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Run directory, e.g. runs/demo.")],
    out: Annotated[Path | None, typer.Option("--out", help="HTML file; default RUN/report.html.")] = None,
) -> None:
    """One self-contained HTML of a run: loss, planned against measured time, buckets, events, samples."""
    from app.records.rundir import RunDir
    from app.records.timeline import write_timeline
    from app.report.page import write_report

    folder = RunDir.open(run)
    timeline = write_timeline(folder)
    page = write_report(folder, out)
    print(f"report    {page}")
    print(f"timeline  {timeline}  (open it at ui.perfetto.dev)")
