"""`heddle data`: make, index, check, look at and convert data sets. Heavy imports come inside the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from data.kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from data.config import LimitsConfig, SourceConfig
    from data.dataset.index import Index
    from data.ledger import Ledger, LedgerRecord, SourceRecord

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

Paths = Annotated[list[str] | None, typer.Argument(metavar="PATH...", help="Shards, tables, folders; or --config.")]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="Take all sources of this run instead.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting.")]
Kind = Annotated[str, typer.Option(help=f"{', '.join(KINDS)}; default: by the files.")]
Media = Annotated[str, typer.Option(help="Folder of the videos a table names; default: beside the table.")]
Caption = Annotated[str, typer.Option(help="Caption fields: a|b tries in order, a+b offers both.")]
Cache = Annotated[Path | None, typer.Option(help="Folder of the index; default: beside the data.")]
Workers = Annotated[int, typer.Option(help="Processes that read shards.", min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def index(
    paths: Paths = None,
    config: Config = None,
    overrides: Overrides = None,
    kind: Kind = "",
    media: Media = "",
    caption: Caption = "",
    cache: Cache = None,
    workers: Workers = 1,
    as_json: AsJson = False,
) -> None:
    """Read the headers of all samples once; changed shards only, the next time."""
    from data.ledger import Ledger

    sources, limits = _sources(paths, config, overrides, kind, media, caption)
    ledger = Ledger(limits)
    indexes = _open(sources, limits, cache, ledger, workers)
    for index in indexes:
        ledger.add_planned(index.num_ok, index.ordinal)
    ledger.check()
    if as_json:
        print(json.dumps({"sources": [_index_facts(index) for index in indexes], "ledger": ledger.summary()}, indent=1))
        return
    for index in indexes:
        print(
            f"{index.name}: {index.num_ok} of {len(index) + index.missing} samples usable in "
            f"{_shards(index.num_shards)}, media of {index.coverage:.1%} found, index {index.hash}"
        )
    _print_ledger(ledger)


@app.command()
def lint(
    paths: Paths = None,
    config: Config = None,
    overrides: Overrides = None,
    kind: Kind = "",
    media: Media = "",
    caption: Caption = "",
    cache: Cache = None,
    workers: Workers = 1,
    headers_only: Annotated[bool, typer.Option("--headers-only", help="Do not decode.")] = False,
    out: Annotated[Path, typer.Option("--out", help="List of all faults.")] = Path("bad.jsonl"),
    as_json: AsJson = False,
) -> None:
    """Check every sample as training would, decode included; lists the faults. Exit code 4 beyond the limits.

    With --config the run's filters and buckets apply too: what they refuse is counted and not decoded.
    """
    from data.errors import DataError
    from data.ledger import Ledger
    from data.tools.lint import lint as check

    sources, limits = _sources(paths, config, overrides, kind, media, caption)
    out.unlink(missing_ok=True)
    ledger = Ledger(limits, out)
    indexes = _open(sources, limits, cache, ledger, workers, allow_empty=True)
    for fault in (fault for index in indexes for fault in index.missing_faults()):
        ledger.add_line(fault)
    admitted = None if config is None else _admitted(config, overrides, indexes, ledger)
    with _progress("decoding", quiet=as_json or headers_only) as progress:
        check(indexes, ledger, admitted=admitted, decode=not headers_only, progress=progress)
    ledger.close()
    ledger.check()
    long = None if config is None or admitted is None else _long_captions(config, overrides, indexes, admitted)
    if as_json:
        print(json.dumps(ledger.summary() | ({"long_captions": long["count"]} if long else {}), indent=1))
    else:
        _print_ledger(ledger)
        if long and long["count"]:
            words = (
                "{count} of {captions} captions have more than model.text.max_length {most} tokens and are cut there"
            )
            print(words.format_map(long))
        if out.exists():
            print(f"faults    {out}")
    ledger.check_limits()
    if not ledger.planned:
        why = ", ".join(f"{count} {reason}" for reason, count in ledger.rejected.most_common(3))
        raise DataError(f"none of {ledger.indexed} samples can be used: {why}; {out} lists them.")


@app.command()
def stats(
    paths: Paths = None,
    config: Config = None,
    overrides: Overrides = None,
    kind: Kind = "",
    media: Media = "",
    caption: Caption = "",
    cache: Cache = None,
    workers: Workers = 1,
    as_json: AsJson = False,
) -> None:
    """Shapes, lengths, frame rates, captions and scores of a data set."""
    from data.ledger import Ledger
    from data.tools.stats import statistics

    sources, limits = _sources(paths, config, overrides, kind, media, caption)
    found = [statistics(index) for index in _open(sources, limits, cache, Ledger(limits), workers)]
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for facts in found:
        _print_stats(facts)


@app.command()
def convert(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Shards, table or folder to convert.")],
    out: Annotated[Path, typer.Argument(help="Empty folder for the shards.")],
    kind: Kind = "",
    media: Media = "",
    caption: Caption = "",
    cache: Cache = None,
    workers: Workers = 1,
    shard_mb: Annotated[int, typer.Option(help="Largest shard in MB.", min=1)] = 500,
    shard_samples: Annotated[int, typer.Option(help="Most samples of a shard.", min=1)] = 10_000,
    crf: Annotated[int, typer.Option(help="H.264 quality of clips cut out of longer videos.")] = 18,
) -> None:
    """Write any source as WebDataset shards (.mp4 .txt .json)."""
    from data.ledger import Ledger
    from data.tools.convert import convert as write

    sources, limits = _sources([path], None, None, kind, media, caption)
    ledger = Ledger(limits, out / "bad.jsonl")
    (source,) = _open(sources, limits, cache, ledger, workers)
    with _progress("writing") as progress:
        shards = write(
            source, out, ledger, shard_bytes=shard_mb * 10**6, shard_count=shard_samples, crf=crf, progress=progress
        )
    ledger.close()
    ledger.check()
    print(f"{ledger.delivered} samples in {_shards(len(shards))}: {out}")
    _print_ledger(ledger)


@app.command()
def synth(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")],
    clips: Annotated[int | None, typer.Option(help="Video clips.", min=0)] = None,
    images: Annotated[int | None, typer.Option(help="Still images.", min=0)] = None,
    shards: Annotated[int | None, typer.Option(help="Shards.", min=1)] = None,
    seed: int = 0,
    koala: Annotated[bool, typer.Option(help="Also write the clips as a Koala-36M table.")] = True,
) -> None:
    """Make a small data set of moving shapes: WebDataset shards and a Koala-36M table."""
    from app.inputs.synthetic import synth as make

    make(folder, clips=clips, images=images, shards=shards, seed=seed, koala=koala)


@app.command()
def preview(
    config: Annotated[Path, typer.Option("--config", "-c", help="The run to look at.")],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder of the pictures.")] = Path("preview"),
    samples: Annotated[int, typer.Option(help="Clips per bucket.", min=1)] = 8,
    frames: Annotated[int, typer.Option(help="Pictures per clip.", min=1)] = 5,
) -> None:
    """A contact sheet per bucket: the frames, crops and captions that training would see."""
    from app.data_tools.preview import preview as make
    from app.settings.config import RunConfig, from_here

    make(from_here(RunConfig.load(config, overrides or [])), out, samples, frames)


def _sources(
    paths: list[str] | None, config: Path | None, overrides: list[str] | None, kind: str, media: str, caption: str
) -> tuple[tuple[SourceConfig, ...], LimitsConfig]:
    """Sources of the command line or of a run's config, and the limits that apply."""
    from data.config import LimitsConfig, SourceConfig
    from data.readers.registry import guess_kind

    if bool(paths) == (config is not None):
        raise typer.BadParameter("give PATH or --config, one of them")
    if config is not None:
        from app.settings.config import RunConfig, from_here

        data = from_here(RunConfig.load(config, overrides or [])).data
        return data.sources, data.limits
    path = "::".join(paths or [])  # a shell expands braces and globs before we see them
    if kind and kind not in KINDS:
        raise typer.BadParameter(f"--kind {kind} is not one of {', '.join(KINDS)}")
    options: dict[str, Any] = {"caption": caption} if caption else {}
    return (SourceConfig(path=path, kind=kind or guess_kind(path), media=media, **options),), LimitsConfig()  # type: ignore[arg-type]


def _admitted(config: Path, overrides: list[str] | None, indexes: list[Index], ledger: Ledger) -> list[np.ndarray]:
    """Masks of the rows that a run trains; what its filters and buckets refuse is counted in the ledger."""
    from actors.feed.batching import TargetBatch
    from app.inputs.items import profile_of
    from app.settings.config import RunConfig, from_here
    from data.dataset.dataset import Dataset
    from ops.models.folders import resolve

    run = from_here(RunConfig.load(config, overrides or []))
    model, geometry = resolve(run.model)
    timed = TargetBatch(profile=profile_of(run, model, geometry), geometry=geometry)
    return [codes >= 0 for codes in Dataset(run.data, indexes, run.train.seed, geometry, ledger, timed).codes]


def _long_captions(
    config: Path, overrides: list[str] | None, indexes: list[Index], admitted: list[np.ndarray]
) -> dict[str, int]:
    """How many captions the run's text encoder cuts."""
    from app.settings.config import RunConfig, from_here
    from data.tools.lint import count_long_captions
    from ops.models.text import token_counter

    text = from_here(RunConfig.load(config, overrides or [])).model.text
    long, captions = count_long_captions(indexes, admitted, token_counter(text), text.max_length)
    return {"count": long, "captions": captions, "most": text.max_length}


def _open(
    sources: tuple[SourceConfig, ...],
    limits: LimitsConfig,
    cache: Path | None,
    ledger: Ledger,
    workers: int,
    allow_empty: bool = False,
) -> list[Index]:
    from data.dataset.index import build_index

    with _progress("indexing") as progress:
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


class _progress:
    """A Rich bar on a terminal, nothing elsewhere. Gives a function (done, total)."""

    def __init__(self, what: str, quiet: bool = False) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._bar = Progress(console=console, transient=True, disable=quiet or not console.is_terminal)
        self._task = self._bar.add_task(what, total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self._bar.start()
        return lambda done, total: self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _index_facts(index: Index) -> dict[str, Any]:
    return {
        "name": index.name,
        "kind": index.config.kind,
        "hash": index.hash,
        "shards": index.num_shards,
        "rows": len(index),
        "usable": index.num_ok,
        "missing": index.missing,
        "coverage": index.coverage,
    }


def _print_ledger(ledger: Ledger) -> None:
    facts = ledger.summary()
    print(_row_counts(facts))
    for rule, count in facts["details"].items():
        print(f"  {count} {rule}")
    if facts["scheduled"]:
        print(_draw_counts(facts))
    for counts in facts["sources"] if len(facts["sources"]) > 1 else ():
        drawn = f"; {_draw_counts(counts)}" if counts["scheduled"] else ""
        print(f"source {counts['name']}: {_row_counts(counts)}{drawn}")
    if facts["shard_faults"]:
        print(f"shard faults{_reasons(facts['shard_faults'])}")
    if facts["notes"]:
        print(f"members that are no samples{_reasons(facts['notes'])}")


def _row_counts(facts: LedgerRecord | SourceRecord) -> str:
    """Of the whole ledger, or of one source."""
    rejected = sum(facts["rejected"].values())
    return f"indexed {facts['indexed']} = usable {facts['planned']} + rejected {rejected}{_reasons(facts['rejected'])}"


def _draw_counts(facts: LedgerRecord | SourceRecord) -> str:
    skipped = facts["skipped"]
    return f"checked {facts['scheduled']} = good {facts['delivered']} + bad {sum(skipped.values())}{_reasons(skipped)}"


def _shards(count: int) -> str:
    return f"{count} shard{'s' if count != 1 else ''}"


def _reasons(counts: dict[str, int]) -> str:
    return f" ({', '.join(f'{count} {reason}' for reason, count in counts.items())})" if counts else ""


def _print_stats(facts: dict[str, Any]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{facts['name']}[/bold]: {facts['usable']} of {facts['indexed']} samples usable "
        f"({facts['videos']} videos, {facts['images']} images), {facts['hours']:.2f} h, "
        f"{facts['bytes'] / 1e6:.1f} MB in {_shards(facts['shards'])}{_reasons(facts['rejected'])}"
    )
    shapes = Table("width", "height", "samples", title="shapes", box=SIMPLE)
    for shape in facts["shapes"]:
        shapes.add_row(*(str(shape[name]) for name in ("width", "height", "count")))
    if facts["other_shapes"]:
        shapes.add_row("others", str(facts["other_shapes"]), str(facts["other_samples"]))
    console.print(shapes)
    table = Table(title="distributions", box=SIMPLE, padding=0, pad_edge=False)
    table.add_column("", no_wrap=True, min_width=max(map(len, facts["scores"]), default=0))  # the names filters take
    for name in ("min", "5 %", "25 %", "median", "75 %", "95 %", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = {name: facts[name] for name in ("aspect", "fps", "frames", "seconds", "caption_chars")} | facts["scores"]
    for name, values in rows.items():
        if values:
            table.add_row(name, *(f"{value:.4g}" for value in values))
    console.print(table)
