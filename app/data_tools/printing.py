"""What `heddle data` prints of a data set: the account of its samples, and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data.in_words import part_of
from ops.counted import counted
from ops.units import MIB

if TYPE_CHECKING:
    from data.dataset.index import Index
    from data.ledger import Ledger, LedgerRecord, SourceRecord
    from data.tools.repeats import RepeatedSample
    from data.tools.stats import SourceStatistics

MOST_REPEATED = 3  # shown; lint writes all


def index_facts(index: Index) -> dict[str, object]:
    """What was found of a source, for `heddle data index --json`."""
    return {
        "name": index.name,
        "kind": index.config.kind,
        "hash": index.hash,
        "shards": index.num_shards,
        "rows": len(index),
        "usable": index.num_ok,
        "by_default": index.num_by_default,
        "missing": index.missing,
        "coverage": index.coverage,
        "unread": list(index.unread),
    }


def print_ledger(
    ledger: Ledger, drawn: str = "decoded {} = good {} + bad {}", tell: Callable[[str], None] = print
) -> None:
    """Every row and every draw accounted for, per source where there are several. `drawn` says what was done with
    draws: how many there were, and for how many that ended well and not."""
    facts = ledger.summary()
    tell(_row_counts(facts))
    for rule, count in facts["details"].items():
        tell(f"  {count} {rule}")
    if facts["scheduled"]:
        tell(_draw_counts(facts, drawn))
    for counts in facts["sources"] if len(facts["sources"]) > 1 else ():
        of_source = f"; {_draw_counts(counts, drawn)}" if counts["scheduled"] else ""
        tell(f"source {counts['name']}: {_row_counts(counts)}{of_source}")
    if facts["shard_faults"]:
        tell(f"shard faults{_reasons(facts['shard_faults'])}")
    if facts["notes"]:
        tell(f"members that are no samples{_reasons(facts['notes'])}")


def _row_counts(facts: LedgerRecord | SourceRecord) -> str:
    """Rows of the whole ledger or of one source: indexed, usable, rejected."""
    rejected = sum(facts["rejected"].values())
    return f"indexed {facts['indexed']} = usable {facts['planned']} + rejected {rejected}{_reasons(facts['rejected'])}"


def _draw_counts(facts: LedgerRecord | SourceRecord, drawn: str) -> str:
    skipped = facts["skipped"]
    return drawn.format(facts["scheduled"], facts["delivered"], sum(skipped.values())) + _reasons(skipped)


def _reasons(counts: dict[str, int]) -> str:
    return f" ({', '.join(f'{count} {reason}' for reason, count in counts.items())})" if counts else ""


def print_unread(indexes: Sequence[Index]) -> None:
    """Columns and members that training never sees: controls of other trainers, a second caption."""
    for index in indexes:
        if index.unread:
            print(
                f"source {index.name}: not read: {', '.join(index.unread)}. Of a sample its clip and caption are "
                f"trained (data.sources caption names others), and numbers are for filters."
            )


def print_defaults(indexes: Sequence[Index]) -> None:
    """How many samples have the caption of those without a text, and what is put before all."""
    for index in indexes:
        prefix, default, count = index.config.caption_prefix, index.config.default_caption, index.num_by_default
        before = f"caption_prefix {prefix!r} stands before every caption" if prefix else ""
        told = f"{counted(count, 'sample')} without a text: default_caption {default!r}" if count else ""
        if before or told:
            print(f"source {index.name}: {'; '.join(filter(None, (before, told)))}")


def print_repeated(repeated: Sequence[RepeatedSample], out: Path | str | None) -> None:
    """How many samples have the clip of another, and the first of them; `out` has them all, from `heddle data lint`, if
    there is one."""
    if not repeated:
        return
    print(f"repeated  {counted(len(repeated), 'sample')} with the clip of an earlier one, which so counts more often:")
    for one in repeated[:MOST_REPEATED]:
        print(f"          {one.row.key} in {one.row.shard} is {one.first.key} in {one.first.shard}")
    if more := len(repeated[MOST_REPEATED:]):
        print(f"          and {more} more{'' if out is None else f', in {out}'}")


def print_statistics(facts: SourceStatistics) -> None:
    """Shapes, and the distributions of lengths, frame rates, captions and scores, as tables as wide as their figures:
    one in a pipe or a narrow terminal is no shorter."""
    print(
        f"{facts['name']}: {facts['usable']} of {facts['indexed']} samples usable "
        f"({facts['videos']} videos, {facts['images']} images), {_lasting(facts['hours'])}, "
        f"{facts['bytes'] / MIB:,.1f} MiB of media in {counted(facts['shards'], part_of(facts['kind']))}"
        f"{_reasons(facts['rejected'])}"
    )
    shapes = [(str(shape["width"]), str(shape["height"]), str(shape["count"])) for shape in facts["shapes"]]
    if facts["other_shapes"]:
        shapes.append(("others", str(facts["other_shapes"]), str(facts["other_samples"])))
    print("\n".join(["", "shapes", *_aligned([("width", "height", "samples"), *shapes])]))
    mixed = facts["videos"] and facts["images"]
    title = "distributions (fps, frames and seconds: of videos alone)" if mixed else "distributions"
    rows = {
        "aspect": facts["aspect"],
        "fps": facts["fps"],
        "frames": facts["frames"],
        "seconds": facts["seconds"],
        "caption_chars": facts["caption_chars"],
    }
    table = [
        (name, *(f"{value:.4g}" for value in values)) for name, values in (rows | facts["scores"]).items() if values
    ]
    print("\n".join(["", title, *_aligned([("", "min", "5 %", "25 %", "median", "75 %", "95 %", "max"), *table])]))
    for name, count in facts["infinite"].items():
        print(f"  {name} of {counted(count, 'sample')} is infinite, and in none of these figures")
    print()


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]


def _lasting(hours: float) -> str:
    """A length of time in the unit that a person would take."""
    if hours >= 1:
        return f"{hours:,.1f} h"
    return f"{60 * hours:.0f} min" if hours >= 1 / 60 else f"{3600 * hours:.0f} s"
