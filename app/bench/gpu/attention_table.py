"""attention.json: the measured seconds of attention backends, as `model.dit.attention` takes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from app.bench.gpu.attention_speed import DTYPE, PACKS, AttentionSpeed, measurements
from app.bench.gpu.lines import ResultLine
from ops.attention.table import AttentionTable, TableRow, kind_of_lengths, mean_length
from ops.typed import as_plain

FILE = "attention.json"


def write_table(lines: Iterable[ResultLine], folder: Path) -> None:
    """The file beside the results, if these say anything of attention."""
    table = table_of(lines)
    if table is not None:
        (folder / FILE).write_text(_text(table), encoding="utf-8")


def table_of(lines: Iterable[ResultLine]) -> AttentionTable | None:
    """What the lines of one device say of self-attention, those of the newest versions; None if nothing."""
    measured = {one.name: one for one in measurements()}
    good = sorted((line for line in lines if line.good and line.name in measured), key=lambda line: line.at)
    good = [line for line in good if line.facts.versions == good[-1].facts.versions]
    rows = tuple(row for line in good for row in _rows(line, measured[line.name]))
    if not rows:
        return None
    facts = good[-1].facts
    dtype = str(DTYPE).removeprefix("torch.")
    return AttentionTable(device=facts.device, dtype=dtype, torch=facts.torch, cuda=facts.cuda, rows=rows)


def _rows(line: ResultLine, measured: AttentionSpeed) -> Iterator[TableRow]:
    if measured.is_cross:
        return
    lengths = PACKS[measured.pack][1 if line.facts.rehearsal else 0]
    for size in sorted({int(name.split()[0][1:]) for name in line.figures}):
        seconds = [_seconds(line.figures.get(f"d{size} {way} ms")) for way in ("forward", "backward")]
        if seconds[0] is not None:
            yield TableRow(
                backend=measured.backend,
                head_dim=size,
                lengths=kind_of_lengths(lengths),
                length=mean_length(lengths),
                forward_s=seconds[0],
                backward_s=seconds[1],
            )


def _seconds(milliseconds: object) -> float | None:
    return 1e-3 * milliseconds if isinstance(milliseconds, float) and milliseconds > 0 else None


def _text(table: AttentionTable) -> str:
    """JSON with a row on each line."""
    plain = as_plain(table)
    rows = ",\n".join(f"    {json.dumps(row)}" for row in plain.pop("rows"))
    return f'{json.dumps(plain)[:-1]}, "rows": [\n{rows}\n]}}\n'
