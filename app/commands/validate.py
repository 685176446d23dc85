"""`heddle validate`. Heavy imports come after parsing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.options import After


def validate(
    checkpoint: Annotated[
        Path,
        typer.Option(
            "--checkpoint", help="Run folder (its latest), a checkpoint, an exported folder, or a published pipeline."
        ),
    ],
    after: After = None,
    sources: Annotated[
        list[str] | None,
        typer.Option(
            "--source", metavar="PATH", help="Held-out clips: shards, a table or a folder. Default: validation.sources."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Of a published pipeline: folder or file of a run that trains it.")
    ] = None,
    clips: Annotated[int | None, typer.Option(help="How many; default: validation.clips of the run.", min=1)] = None,
    draws: Annotated[
        int | None, typer.Option(help="Noise levels of each; default: validation.draws of the run.", min=1)
    ] = None,
    ema: Annotated[bool, typer.Option(help="Averaged weights, where the run keeps them.")] = True,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """Measure the loss of held-out clips at a checkpoint, by noise level and by bucket."""
    from app.sampling.model import chosen_checkpoint
    from app.validation.checkpoint import validate as run

    folder = chosen_checkpoint(checkpoint, after)
    run(folder, tuple(sources or ()), config=config, clips=clips, draws=draws, ema=ema, device=device)
