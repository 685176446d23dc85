"""`heddle convert`. Heavy imports come after parsing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    file: Annotated[
        Path,
        typer.Argument(
            help="A .safetensors file with the names of the original code; of several shards one of them, their index "
            "or their folder."
        ),
    ],
    config: Annotated[
        Path, typer.Option("--config", help="Config with the sizes of the model, as configs/models/ has.")
    ],
    to: Annotated[Path, typer.Option("--to", help="Folder of the pipeline; its transformer/ must not exist.")],
) -> None:
    """Write a transformer's weights from one file, or its shards, as the Diffusers folder that model.dit.path takes."""
    from app.export.single_file import convert as run

    run(file, config, to)
