"""`heddle profile`. Heavy imports come after parsing."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from app.commands.options import Config, Overrides
from ops.typed import ConfigError

_RAY_CPUS = 2  # of a Ray of this machine: two workers that hand over to each other


def profile(
    config: Config,
    out: Annotated[Path, typer.Option("--out", help="Profile JSON to write.")] = Path("profile.json"),
    overrides: Overrides = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each point; the median is kept.", min=1)] = 3,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    write: Annotated[
        bool, typer.Option("--write", help="Write the limits of batches that are found into the config's file.")
    ] = False,
    degrees: Annotated[
        str, typer.Option(help="Degrees of the DiT, e.g. 1,2,4; empty: all that this machine can run.")
    ] = "",
    minutes: Annotated[
        float,
        typer.Option(
            help="Minutes it may take, with the most informative points first; default: 0, which measures all.",
            min=0.0,
            show_default=False,
        ),
    ] = 0.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure also what --out has already.")] = False,
    cluster: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster whose nodes are measured, too; default: RAY_ADDRESS, else none."),
    ] = None,
) -> None:
    """Measure text, VAE and DiT cascades of the config's buckets on this machine's devices and across the nodes of a
    cluster, and fit their costs."""
    from app.device.over_nodes import LentRay
    from app.device.profile import run_profile
    from app.run.borrowed_ray import borrowed_ray

    # Costs are fitted anew after every point; what is to be said of the last fits is printed at the end.
    logging.getLogger("actors.plan.costs.known").setLevel(logging.WARNING)
    wanted = numbers_of(degrees)
    has_nodes = bool(cluster or os.environ.get("RAY_ADDRESS"))
    with LentRay(partial(borrowed_ray, cluster, _RAY_CPUS), has_nodes) as ray:
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
            ray=ray,
        )


def numbers_of(text: str) -> list[int]:
    """1,2,4 as numbers. Raises ConfigError."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--degrees {text!r} is not a list of numbers such as 1,2,4.") from None
