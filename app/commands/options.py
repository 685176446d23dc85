"""Options that several commands have."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Annotated

import typer


def read_once(path: Path | None) -> Path | None:
    """A file with what a pipe gives, as --config <(printf ...) is one; any other path as it is. Commands read settings
    more than once, and processes that they start do not have the pipe."""
    if path is None or not path.is_fifo():
        return path
    import tempfile

    with tempfile.NamedTemporaryFile(prefix="config-", suffix=".yaml", delete=False) as copy:
        atexit.register(Path(copy.name).unlink, missing_ok=True)
        copy.write(path.read_bytes())
    return Path(copy.name)


Config = Annotated[
    Path, typer.Option("--config", "-c", callback=read_once, help="YAML of the run, e.g. configs/runs/demo.yaml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. train.steps=100. Repeatable."),
]
After = Annotated[
    int | None,
    typer.Option("--after", help="Of a run: its checkpoint after this many steps; default: its latest.", min=1),
]
