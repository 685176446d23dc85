"""`heddle profile`. Heavy imports come after parsing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.options import Config, Overrides
from ops.typed import ConfigError


def profile(
    config: Config,
    out: Annotated[Path, typer.Option("--out", help="Profile JSON to write.")] = Path("profile.json"),
    overrides: Overrides = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each point; the median is kept.", min=1)] = 3,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    write: Annotated[bool, typer.Option("--write", help="Put the limits of batches into the config.")] = False,
    degrees: Annotated[str, typer.Option(help="Degrees of the DiT, 1,2,4; empty: all that this machine can run.")] = "",
    minutes: Annotated[float, typer.Option(help="The most informative points first, for so long.", min=0.0)] = 0.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure also what --out has already.")] = False,
) -> None:
    """Measure text, VAE and DiT cascades of the config's buckets on this machine's devices, and fit their costs."""
    from app.device.profile import run_profile

    wanted = numbers_of(degrees)
    run_profile(
        config,
        overrides or [],
        out=out,
        repeats=repeats,
        device=device,
        write=write,
        degrees=wanted,
        minutes=minutes,
        fresh=fresh,
    )


def numbers_of(text: str) -> list[int]:
    """1,2,4 as numbers. Raises ConfigError."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--degrees {text!r} is not a list of numbers such as 1,2,4.") from None
