"""Opens the sources of a `heddle data` command: the paths on its command line, or the sources of a run's config."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from app.settings.config import RunConfig, from_here
from data.config import LimitsConfig, SourceConfig, check_no_secret
from data.kinds import KINDS

if TYPE_CHECKING:
    import numpy as np

    from data.dataset.curriculum import Curriculum
    from data.dataset.index import Index
    from data.ledger import Ledger

_URI_AS_PATH = re.compile(r"[a-z][a-z0-9+.-]+:/")


def sources_of(
    paths: list[str] | None,
    config: Path | None,
    overrides: list[str] | None,
    kind: str,
    media: str,
    caption: str,
    default_caption: str | None,
) -> tuple[tuple[SourceConfig, ...], LimitsConfig]:
    """Sources of the command line or of a run's config, and the limits that apply."""
    from data.readers.registry import guess_kind

    if bool(paths) == (config is not None):
        raise typer.BadParameter("give PATH or --config, one of them")
    told = {"--kind": kind, "--media": media, "--caption": caption, "--default-caption": default_caption is not None}
    for option, value in told.items():
        if value and config is not None:
            raise typer.BadParameter(f"{option} is for PATH; the sources of --config have their own")
    if overrides and config is None:
        raise typer.BadParameter("--set is for --config, and PATH has no settings")
    if config is not None:
        data = from_here(RunConfig.load(config, overrides or [])).data
        return data.sources, data.limits
    path = "::".join(paths or [])  # a shell expands braces and globs before we see them
    if kind not in ("", "auto", *KINDS):
        raise typer.BadParameter(f"--kind {kind} is not one of auto, {', '.join(KINDS)}")
    check_no_secret(path)
    guessed = guess_kind(path) if kind in ("", "auto") else kind
    source = SourceConfig(path=path, kind=guessed, media=media, default_caption=default_caption)
    return (replace(source, caption=caption) if caption else source,), LimitsConfig()


def check_folder_here(folder: Path | None, option: str) -> None:
    """Raises BadParameter for a URI, which a Path holds with one slash less: it would become folders of this name."""
    if folder is not None and _URI_AS_PATH.match(str(folder)):
        raise typer.BadParameter(f"{option} {folder} is a URI; files go to local or shared folders. Give a path.")


def open_indexes(
    sources: tuple[SourceConfig, ...],
    limits: LimitsConfig,
    cache: Path | None,
    ledger: Ledger,
    workers: int,
    allow_empty: bool = False,
) -> list[Index]:
    """The index of each source, read from `cache` or made by `workers` processes. Raises DataError for an empty source
    unless `allow_empty`."""
    from app.records.progress import ProgressBar
    from data.dataset.index_build import build_index

    check_folder_here(cache, "--cache")
    with ProgressBar("indexing") as progress:
        return [
            build_index(
                source,
                cache,
                ledger,
                limits=limits,
                ordinal=ordinal,
                workers=workers,
                progress=progress,
                allow_empty=allow_empty,
            )
            for ordinal, source in enumerate(sources)
        ]


def curriculum_of(config: Path, overrides: list[str] | None, indexes: list[Index], ledger: Ledger) -> Curriculum:
    """What a run draws of these indexes; what its filters and buckets refuse is counted in the ledger."""
    from actors.planning.batching import TargetBatch
    from app.inputs.profiles import profile_of
    from data.dataset.curriculum import Curriculum
    from ops.models.folders import resolve

    run = from_here(RunConfig.load(config, overrides or []))
    model, geometry = resolve(run.model)
    timed = TargetBatch(profile=profile_of(run, model, geometry), geometry=geometry)
    return Curriculum(run.data, indexes, geometry, ledger, timed)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutCaptions:
    """How many captions of how many have more tokens than the text encoder takes."""

    count: int
    captions: int
    most_tokens: int


def count_cut_captions(
    config: Path, overrides: list[str] | None, indexes: list[Index], admitted: list[np.ndarray]
) -> CutCaptions:
    """Captions that the run's text encoder cuts."""
    from data.tools.lint import count_long_captions
    from ops.models.load import token_counter

    text = from_here(RunConfig.load(config, overrides or [])).model.text
    long, captions = count_long_captions(indexes, admitted, token_counter(text), text.max_length)
    return CutCaptions(count=long, captions=captions, most_tokens=text.max_length)
