"""The samples that a run never trains, each by its name and with why: what index, filters and buckets leave out.

They may be most of 100 million rows: they are read and written a group of rows at a time and never held together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.dataset.curriculum import SHAPE, Curriculum
from data.dataset.index import Index
from data.ledger import Reason
from data.readers.part import MEDIA_FILE, ROWS_PER_GROUP, opened
from ops.whole_file import whole_file

MOST_OF_A_SOURCE = 100_000  # that a run lists at its start: 20 MB, and some seconds. `heddle data lint` lists all
_COLUMNS = ("key", "path", "width", "height", "num_frames", "fps", "image", "reject", "detail")


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedSample:
    """A sample that is never trained, and why."""

    source: str
    shard: str  # tar, table or folder in which it is listed
    key: str
    path: str = ""  # of its file, where that is not the shard
    width: int = 0  # as displayed; 0: unknown
    height: int = 0
    num_frames: int = 0
    reason: Reason
    detail: str = ""

    @property
    def why(self) -> str:
        """The reason for a person."""
        if self.reason is Reason.FILTERED:
            return f"{self.reason}({self.detail})"
        return f"{self.reason}: {self.detail}" if self.detail else str(self.reason)

    def line(self) -> str:
        """Its line of dropped.jsonl; what is not known is left out."""
        return json.dumps({name: value for name, value in asdict(self).items() if value not in ("", 0)})


def dropped_samples(
    curriculum: Curriculum,
    indexes: Sequence[Index],
    most_of_a_source: int | None = None,
    rows_at_once: int = ROWS_PER_GROUP,
) -> Iterator[DroppedSample]:
    """The samples that `curriculum`, made of `indexes`, never draws, in their order; of each source the first
    `most_of_a_source`. Those whose file is missing come after the rows of their source."""
    for index, code in zip(indexes, curriculum.codes, strict=True):
        yield from islice(chain(_rows(curriculum, index, code, rows_at_once), _missing(index)), most_of_a_source)


def write_dropped(path: Path, samples: Iterable[DroppedSample]) -> int:
    """A line for each; no file where there is none. Returns their number. Raises OSError, and then leaves `path` as it
    was."""
    count = 0
    with whole_file(path) as part, part.open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(f"{sample.line()}\n")
            count += 1
    if not count:
        path.unlink()
    return count


def _rows(curriculum: Curriculum, index: Index, code: np.ndarray, rows_at_once: int) -> Iterator[DroppedSample]:
    """Rows that are indexed and not planned."""
    masks = [(rule, index.filter_mask(rule)) for rule in index.config.filters]
    detail_of = lru_cache(maxsize=1 << 14)(lambda *shape: curriculum.refusal(*shape))
    for part, begin, end in zip(index.parts, index.shard_bounds, index.shard_bounds[1:]):
        dropped = code[begin:end] < 0
        if not dropped.any():
            continue
        with opened(part.file) as file:
            for start, batch in _batches(file, dropped, rows_at_once):
                own = dropped[start : start + batch.num_rows]
                rows = int(begin) + start + np.flatnonzero(own)
                for row, values in zip(rows, batch.filter(pa.array(own)).to_pylist(), strict=True):
                    if values["reject"]:
                        reason, detail = Reason(values["reject"]), values["detail"]
                    elif rule := next((rule for rule, passes in masks if not passes[row]), ""):
                        reason, detail = Reason.FILTERED, rule
                    else:
                        refusal = detail_of(*(values[name] for name in SHAPE))
                        reason, detail = refusal.ledger_reason, refusal.detail
                    yield DroppedSample(
                        source=index.name,
                        shard=part.part.uri,
                        key=values["key"],
                        path="" if values["path"] == MEDIA_FILE else values["path"],
                        width=values["width"],
                        height=values["height"],
                        num_frames=values["num_frames"],
                        reason=reason,
                        detail=detail,
                    )


def _batches(file: pq.ParquetFile, dropped: np.ndarray, rows_at_once: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The first row of each batch, and the batch, of the groups of rows in which one is dropped."""
    first = 0
    for group in range(file.num_row_groups):
        last = first + file.metadata.row_group(group).num_rows
        if dropped[first:last].any():
            start = first
            for batch in file.iter_batches(rows_at_once, row_groups=[group], columns=list(_COLUMNS), use_threads=False):
                yield start, batch
                start += batch.num_rows
        first = last


def _missing(index: Index) -> Iterator[DroppedSample]:
    """Listed samples whose file does not exist: they are no rows."""
    for fault in index.missing_faults():
        yield DroppedSample(
            source=index.name, shard=fault.shard, key=fault.key, reason=fault.reason, detail=fault.detail
        )
