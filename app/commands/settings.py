"""`heddle settings`. Heavy imports come after parsing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer


def settings(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="A section (train.flow) or a setting (flow_shift), also by another trainer's name; default: all.",
            show_default=False,
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="As tables of Markdown.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="As the JSON schema by which editors check run files.")
    ] = False,
    of: Annotated[
        Path | None,
        typer.Option(
            help="A file by which another trainer is started (TOML, YAML, JSON, Python, or a shell script with its "
            "options): where each of its settings stands here.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """What a run file can say: every setting with its default, what it takes and what it does."""
    from app.settings import theirs
    from app.settings.config import RunConfig
    from app.settings.reference import as_markdown, as_text, chosen, reference
    from app.settings.schema import json_schema

    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    if of and (names or markdown or schema):
        raise typer.BadParameter("--of is of all settings of that file; leave the rest out.")
    if schema:
        if names or markdown:
            raise typer.BadParameter("--schema is of all settings; leave the rest out.")
        typer.echo(json.dumps(json_schema(RunConfig), indent=1, ensure_ascii=False))
        return
    sections = reference(RunConfig)
    if of:
        typer.echo(theirs.as_text([theirs.translated(one, sections) for one in theirs.read_theirs(of)], width))
        return
    found = [one for name in names for one in chosen(sections, name)] if names else sections
    typer.echo(as_markdown(found) if markdown else as_text(found, width))
