"""`heddle profile`. Heavy imports come after parsing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.options import Config, Overrides


def profile(
    config: Config,
    out: Annotated[Path, typer.Option("--out", help="Profile JSON to write.")] = Path("profile.json"),
    overrides: Overrides = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each point; the median is kept.", min=1)] = 3,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """Measure text, VAE and DiT cascades of the config's buckets on this device, and fit their costs."""
    from app.device.profile import run_profile

    run_profile(config, overrides or [], out=out, repeats=repeats, device=device)
