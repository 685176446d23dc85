"""`heddle export`. Heavy imports come after parsing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.options import After


def export(
    checkpoint: Annotated[Path, typer.Option("--checkpoint", help="Run folder (its latest) or a checkpoint.")],
    after: After = None,
    *,
    to: Annotated[Path, typer.Option("--to", help="Folder to write; it must not exist.")],
    base: Annotated[
        Path | None,
        typer.Option("--base", help="Diffusers folder that the frozen parts come from; default: those the run used."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    ema: Annotated[bool, typer.Option(help="Averaged weights, where the run keeps them.")] = True,
) -> None:
    """Write a Diffusers pipeline folder, load it back, and compare before reporting success."""
    from app.export.export import run
    from app.sampling.model import chosen_checkpoint

    run(chosen_checkpoint(checkpoint, after), to, base=base, dtype=dtype, ema=ema)
