"""`heddle data`: make, index, check, look at, convert and encode data sets. Heavy imports come inside the commands."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands.options import Overrides
from app.settings.option_groups import in_groups
from data.kinds import KINDS
from ops.counted import counted
from ops.typed import ConfigError

if TYPE_CHECKING:
    from data.config import LimitsConfig, SourceConfig

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

KindOption = Annotated[str, typer.Option(help=f"{', '.join(KINDS)}; default: by the files.")]
MediaOption = Annotated[str, typer.Option(help="Folder of the videos a table names; default: beside the table.")]
CaptionOption = Annotated[str, typer.Option(help="Caption fields: a|b tries in order, a+b offers both.")]
DefaultCaptionOption = Annotated[
    str | None, typer.Option(help="Caption of samples that have none, which are refused without it.")
]
CacheOption = Annotated[Path | None, typer.Option(help="Folder of the index; default: beside the data.")]
Workers = Annotated[int, typer.Option(help="Processes that read shards.", min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options of the commands that read sources: which ones, and how."""

    paths: Annotated[list[str] | None, typer.Argument(metavar="PATH", help="Shards, tables, folders; or --config.")] = (
        None
    )
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Take all sources of this run instead.")] = None
    overrides: Overrides = None
    kind: KindOption = ""
    media: MediaOption = ""
    caption: CaptionOption = ""
    default_caption: DefaultCaptionOption = None
    cache: CacheOption = None
    workers: Workers = 1

    def sources(self) -> tuple[tuple[SourceConfig, ...], LimitsConfig]:
        """The sources, and the limits that apply to them."""
        from app.data_tools.sources import sources_of

        given = (self.kind, self.media, self.caption, self.default_caption)
        return sources_of(self.paths, self.config, self.overrides, *given)


def with_sources(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of its SourceOptions; processes that read shards end with it."""

    @functools.wraps(command)
    def called(**given: object) -> None:
        from app.run.signals import unwinds_on_signal

        with unwinds_on_signal():
            command(**given)

    return in_groups(called)


@app.command()
@with_sources
def index(*, options: SourceOptions, as_json: AsJson = False) -> None:
    """Read the headers of all samples; the next time only those of changed shards."""
    from app.data_tools.printing import index_facts, print_defaults, print_ledger, print_unread
    from app.data_tools.sources import open_indexes
    from data.in_words import part_of
    from data.ledger import Ledger

    sources, limits = options.sources()
    ledger = Ledger(limits)
    indexes = open_indexes(sources, limits, options.cache, ledger, options.workers)
    for index in indexes:
        ledger.add_planned(index.num_ok, index.ordinal)
    ledger.check()
    if as_json:
        found = {"sources": [index_facts(index) for index in indexes], "ledger": ledger.summary()}
        print(json.dumps(found, indent=1, allow_nan=False))
        return
    for index in indexes:
        print(
            f"{index.name}: {index.num_ok} of {len(index) + index.missing} samples usable in "
            f"{counted(index.num_shards, part_of(index.config.kind))}, media of {index.coverage:.1%} found, "
            f"index {index.hash}"
        )
    print_unread(indexes)
    print_defaults(indexes)
    print_ledger(ledger)


@app.command()
@with_sources
def lint(
    *,
    options: SourceOptions,
    headers_only: Annotated[bool, typer.Option("--headers-only", help="Do not decode.")] = False,
    out: Annotated[Path, typer.Option("--out", help="List of all faults.")] = Path("bad.jsonl"),
    as_json: AsJson = False,
) -> None:
    """Check every sample as training would, decoding included, and list the faults. Exit code 4 beyond the limits.

    With --config the run's filters and buckets apply too: what they refuse is not decoded, and dropped.jsonl beside the
    list of faults names all that the run never trains. Samples with the clip of another are no fault; repeated.jsonl
    names them. Where --out is no file, such as /dev/null, nothing is written beside it.
    """
    from app.data_tools.printing import print_defaults, print_ledger, print_repeated, print_unread
    from app.data_tools.sources import count_cut_captions, curriculum_of, open_indexes
    from app.records.progress import ProgressBar
    from app.settings.out_files import begin_list, is_no_file
    from app.settings.standard_out import talk_beside
    from data.dataset.dropped import dropped_samples, write_dropped
    from data.errors import DataError
    from data.in_words import DROPPED
    from data.ledger import Ledger
    from data.tools.lint import lint as check
    from data.tools.repeats import repeated_samples, write_repeated

    with talk_beside(out):
        sources, limits = options.sources()
        begin_list(out)
        dropped, again = (None if is_no_file(out) else out.with_name(name) for name in (DROPPED, "repeated.jsonl"))
        ledger = Ledger(limits, out)
        indexes = open_indexes(sources, limits, options.cache, ledger, options.workers, allow_empty=True)
        for fault in (fault for index in indexes for fault in index.missing_faults()):
            ledger.add_line(fault)
        admitted, num_dropped = None, 0
        if options.config is not None:
            curriculum = curriculum_of(options.config, options.overrides, indexes, ledger)
            admitted = [codes >= 0 for codes in curriculum.codes]
            if dropped is not None:
                num_dropped = write_dropped(dropped, dropped_samples(curriculum, indexes))
        with ProgressBar("decoding", quiet=as_json or headers_only) as progress:
            check(indexes, ledger, admitted=admitted, decode=not headers_only, progress=progress)
        ledger.close()
        ledger.check()
        cut = None
        if options.config is not None and admitted is not None:
            cut = count_cut_captions(options.config, options.overrides, indexes, admitted)
        repeated = repeated_samples(indexes, admitted)
        if again is not None:
            write_repeated(again, repeated)
        if as_json:
            facts = {"repeated": len(repeated), "unread": {index.name: index.unread for index in indexes}}
            told = ledger.summary() | facts | ({"long_captions": cut.count} if cut else {})
            print(json.dumps(told, indent=1, allow_nan=False))
        else:
            print_unread(indexes)
            print_defaults(indexes)
            print_ledger(ledger)
            print_repeated(repeated, again)
            if cut and cut.count:
                print(
                    f"{cut.count} of {cut.captions} captions have more than model.text.max_length {cut.most_tokens} "
                    f"tokens and are cut there"
                )
            if out.exists():
                print(f"faults    {out}")
            if num_dropped:
                print(f"dropped   {dropped}, {counted(num_dropped, 'sample')}")
        ledger.check_limits()
        if not ledger.planned:
            why = ", ".join(f"{count} {reason}" for reason, count in ledger.rejected.most_common(3))
            raise DataError(f"none of {ledger.indexed} samples can be used: {why}; {out} lists them.")


@app.command()
@with_sources
def stats(*, options: SourceOptions, as_json: AsJson = False) -> None:
    """Shapes, lengths, frame rates, captions and scores of a data set."""
    from app.data_tools.printing import print_defaults, print_repeated, print_statistics
    from app.data_tools.sources import open_indexes
    from data.ledger import Ledger
    from data.tools.repeats import repeated_samples
    from data.tools.stats import statistics

    sources, limits = options.sources()
    indexes = open_indexes(sources, limits, options.cache, Ledger(limits), options.workers)
    repeated = repeated_samples(indexes)
    found = [statistics(index, sum(one.row.source == index.ordinal for one in repeated)) for index in indexes]
    if as_json:
        print(json.dumps(found, indent=1, allow_nan=False))
        return
    for facts in found:
        print_statistics(facts)
    print_defaults(indexes)
    print_repeated(repeated, "repeated.jsonl of heddle data lint")


@app.command()
def convert(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Shards, table or folder to convert.")],
    out: Annotated[Path, typer.Argument(help="Empty folder for the shards.")],
    kind: KindOption = "",
    media: MediaOption = "",
    caption: CaptionOption = "",
    default_caption: DefaultCaptionOption = None,
    cache: CacheOption = None,
    workers: Workers = 1,
    shard_mb: Annotated[int, typer.Option(help="Largest shard in MB.", min=1)] = 500,
    shard_samples: Annotated[int, typer.Option(help="Most samples of a shard.", min=1)] = 10_000,
    crf: Annotated[
        int, typer.Option(help="H.264 quality of clips cut out of longer videos, 0 is the best.", min=0, max=51)
    ] = 18,
) -> None:
    """Write any source as WebDataset shards (.mp4 .txt .json)."""
    from app.data_tools.printing import print_ledger
    from app.data_tools.sources import check_folder_here, open_indexes, sources_of
    from app.records.progress import ProgressBar
    from app.run.signals import unwinds_on_signal
    from data.ledger import Ledger
    from data.tools.convert import check_out
    from data.tools.convert import convert as write

    check_folder_here(out, "OUT")
    check_out(out)  # an index may take hours
    sources, limits = sources_of([path], None, None, kind, media, caption, default_caption)
    ledger = Ledger(limits, out / "bad.jsonl")
    with unwinds_on_signal():  # processes that read shards end with the command, and no shard is half of one
        (source,) = open_indexes(sources, limits, cache, ledger, workers)
        with ProgressBar("writing") as progress:
            shards = write(
                source, out, ledger, shard_bytes=shard_mb * 10**6, shard_count=shard_samples, crf=crf, progress=progress
            )
    ledger.close()
    ledger.check()
    print(f"{counted(ledger.delivered, 'sample')} in {counted(len(shards), 'shard')}: {out}")
    print_ledger(ledger, "read {} = written {} + left out {}")
    print("          whole files were copied as they are, not decoded; `heddle data lint` decodes them")


@app.command()
def synth(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")],
    clips: Annotated[int | None, typer.Option(help="Video clips; default: 240.", min=0)] = None,
    images: Annotated[int | None, typer.Option(help="Still images; default: 40.", min=0)] = None,
    shards: Annotated[int | None, typer.Option(help="Shards; default: 4.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="With another seed there are other shapes.")] = 0,
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--size",
            metavar="HxW",
            help="Height and width, e.g. 480x832. Repeatable; default: 64x96, 96x64, 80x80, 96x144 and 144x96.",
        ),
    ] = None,
    frames: Annotated[
        list[int] | None,
        typer.Option(metavar="NUMBER", help="Frames of a clip. Repeatable; default: 9, 17, 21 and 33.", min=2),
    ] = None,
    koala: Annotated[bool, typer.Option(help="Also write the clips as a Koala-36M table.")] = True,
) -> None:
    """Make a small data set of moving shapes: WebDataset shards and a Koala-36M table. Each clip has one of the sizes
    of --size and one of the lengths of --frames."""
    from app.inputs.synthetic import synth as make

    make(
        folder,
        clips=clips,
        images=images,
        shards=shards,
        seed=seed,
        sizes=[_size(text) for text in sizes or []],
        frames=frames or [],
        koala=koala,
    )


def _size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise ConfigError(f"--size {text} is no size; give height and width, for example 480x832.")
    return int(height), int(width)


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


@app.command()
def cache(
    config: Annotated[Path, typer.Option("--config", "-c", help="The run whose cache is filled.")],
    overrides: Overrides = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Address of a Ray cluster; default: RAY_ADDRESS, else this machine.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what is missing and the bytes that it takes, and stop.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Try clips once more that could not be decoded before.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="List of all faults.")] = Path("bad.jsonl"),
) -> None:
    """Encode all that a run may draw into data.cache.path, so that it trains without VAE and text encoder
    (data.cache.only). The same command continues what was stopped. Exit code 4 where more clips are bad than the
    limits allow.
    """
    from app.caching.command import cache as fill
    from app.settings.standard_out import talk_beside

    with talk_beside(out):
        fill(config, overrides or [], cluster=cluster, dry_run=dry_run, again=again, out=out)
