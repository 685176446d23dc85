"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Option("--config", "-c", help="YAML of the run, e.g. configs/runs/demo.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. train.steps=100. Repeatable."),
]
After = Annotated[
    int | None,
    typer.Option("--after", help="Of a run: its checkpoint after this many steps; default: its latest.", min=1),
]
