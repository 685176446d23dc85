"""`heddle report`. Heavy imports come after parsing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Run directory, e.g. runs/demo.")],
    out: Annotated[Path | None, typer.Option("--out", help="HTML file; default: RUN/report.html.")] = None,
    steps: Annotated[
        str, typer.Option("--steps", metavar="FIRST-LAST", help="Steps in timeline.json; default: the newest.")
    ] = "",
) -> None:
    """One self-contained HTML of a run, also of a live one: loss, planned against measured time, buckets, events,
    samples. Beside it timeline.json, for ui.perfetto.dev."""
    from app.records.rundir import RunDir
    from app.records.timeline import StepRange, write_timeline
    from app.report.page import write_report
    from app.settings.standard_out import talk_beside

    folder = RunDir.open(run)
    try:
        timeline = write_timeline(folder, StepRange.parse(steps) if steps else None)
        shown = "" if timeline.whole else f"steps {timeline.first:,} to {timeline.last:,}, --steps shows others; "
        said = f"timeline  {timeline.path}  ({shown}open it at ui.perfetto.dev)"
    except OSError as error:
        if out is None or steps:
            raise
        said = f"note: {folder}/timeline.json cannot be written ({error.strerror or error})."
    with talk_beside(out):
        print(f"report    {write_report(folder, out)}")
        print(said)
