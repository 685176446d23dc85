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
    to: Annotated[Path, typer.Option("--to", help="Folder to write: none yet, or an empty one.")],
    base: Annotated[
        Path | None,
        typer.Option("--base", help="Diffusers folder that the frozen parts come from; default: those the run used."),
    ] = None,
    lora_only: Annotated[
        bool,
        typer.Option("--lora-only", help="Of a LoRA run the files of its factors alone, for Diffusers and ComfyUI."),
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="Of what was trained, factors too: float32, which rounds nothing, bfloat16 or float16.")
    ] = "float32",
    ema: Annotated[bool, typer.Option(help="Averaged weights, where the run keeps them.")] = True,
) -> None:
    """Write a Diffusers pipeline folder, or the factors of a LoRA run, and compare before reporting success.

    A whole folder needs host memory for the transformer in fp32, and a little more; --lora-only needs none of it.
    """
    from app.run.signals import unwinds_on_signal

    with unwinds_on_signal():  # what is half written is as large as the model
        from app.export.export import run
        from app.sampling.model import chosen_checkpoint

        run(chosen_checkpoint(checkpoint, after), to, base=base, dtype=dtype, ema=ema, lora_only=lora_only)
