"""`heddle compare`. Heavy imports come after parsing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two to four run directories; the first is the reference.")],
    out: Annotated[Path, typer.Option("--out", help="HTML file.")] = Path("runs/compare.html"),
    peak_tflops: Annotated[
        float, typer.Option("--peak-tflops", min=0.0, help="Peak of a worker's device, to show MFU; 989 for an H100.")
    ] = 0.0,
) -> None:
    """Loss, step time, idle share and FLOPs of several runs over each other, as one HTML page."""
    from app.report.compare import write_comparison

    for line in write_comparison(runs, out, peak_tflops):
        print(line)
    print(f"page      {out}")
