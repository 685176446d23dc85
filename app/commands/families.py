"""`heddle families`. Heavy imports come after parsing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def families(
    presets: Annotated[
        list[Path] | None,
        typer.Argument(help="Config files with a model; default: those of configs/models/.", show_default=False),
    ] = None,
) -> None:
    """The model families, and the size, heads, legal degrees and memory of each preset."""
    from app.plan.families import print_families

    print_families(presets or [])
