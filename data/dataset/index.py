"""The index of a source: one row per sample, made from headers once (`data.dataset.index_build`).

Each shard has a Parquet file. Columns are loaded when asked for, rows and captions group by group, so 36 million rows
do not have to fit in memory.
"""

from __future__ import annotations

import difflib
import logging
import operator
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data import storage
from data.captions import read_caption
from data.config import LimitsConfig, SourceConfig
from data.errors import DataError
from data.ledger import Fault, Ledger, Reason
from data.media_info import CropBox
from data.readers.part import (
    CAPTION_FILE,
    CAPTIONS,
    MEDIA,
    MEDIA_FILE,
    MISSING,
    SCORE,
    IndexPart,
    PartMeta,
    StoredCaption,
    StoredRow,
    opened,
)
from data.types import CaptionRef, Clip

log = logging.getLogger(__name__)

ROWS_KEPT = 64 * 4096  # held for row() in row groups; reads of a shuffle window stay within few shards
GROUPS_KEPT = 256  # of them, each with columns of its own, at most
FOOTERS_KEPT = 8  # as many as the shards of a shuffle window unless that is set
RULE = re.compile(r"\s*(.+?)\s*(>=|<=|==|!=|>|<)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*")
COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
ALIASES = {"vtss": "video_training_suitability_score"}
TEXTUAL = frozenset(("key", "path", "suffix", "detail", "captions", "reject", "crop"))


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexRow:
    """One sample of the index. Width and height are as displayed; fps is 0 and num_frames 1 for an image."""

    source: int
    row: int  # ordinal in the source; stable while Index.hash is
    key: str  # unique within its shard
    shard: str  # tar or manifest it was listed in
    path: str  # file that holds the media bytes
    offset: int
    size: int
    file_size: int  # of `path`; 0: it lies in the index's own file
    suffix: str
    image: bool
    width: int
    height: int
    fps: float
    num_frames: int
    duration: float
    rotation: int  # degrees clockwise to turn a decoded frame
    num_keyframes: int
    start_s: float  # the sample is [start_s, end_s) of a longer video; end_s 0: to its end
    end_s: float
    crop: CropBox | None  # the part of each frame that is used; width and height are its
    captions: tuple[CaptionRef, ...]  # texts, or where to read them
    caption_chars: int  # of the first, as it is trained
    scores: dict[str, float]
    reject: Reason | None
    detail: str
    content: str  # identity of the media bytes and of the part of them that is used, for caches

    def clip(self, start_frame: int = 0, caption_pick: float = 0.0, caption_drop: bool = False) -> Clip:
        """The row as decode work, with what chance decided of a draw."""
        return Clip(
            source=self.source,
            key=self.key,
            media=self.path,
            offset=self.offset,
            size=self.size,
            file_size=self.file_size,
            suffix=self.suffix,
            image=self.image,
            frames=self.num_frames,
            fps=self.fps,
            start_frame=start_frame,
            start_s=self.start_s,
            end_s=self.end_s,
            rotation=self.rotation,
            crop=self.crop,
            captions=self.captions,
            caption_pick=caption_pick,
            caption_drop=caption_drop,
            shard=self.shard,
        )


@dataclass(frozen=True, slots=True)
class IndexedPart:
    """A part with the Parquet file made from it."""

    part: IndexPart
    file: Path
    meta: PartMeta


class Index:
    """Rows of one source, in the order of its shards."""

    rows_kept, groups_kept = ROWS_KEPT, GROUPS_KEPT

    def __init__(self, config: SourceConfig, limits: LimitsConfig, ordinal: int, parts: list[IndexedPart]) -> None:
        self.config, self.limits, self.ordinal, self.parts = config, limits, ordinal, parts
        self.name = config.name or storage.name_of(config.path) or config.path
        self.shard_bounds = np.concatenate([[0], np.cumsum([part.meta["rows"] for part in parts])]).astype(np.int64)
        self.missing = sum(part.meta["missing"] for part in parts)
        self.rejects: Counter[Reason] = Counter()
        for part in parts:
            self.rejects.update({Reason(name): count for name, count in part.meta["rejects"].items()})
        digests = "".join(part.meta["digest"] for part in parts)
        self.hash = blake2b(digests.encode(), digest_size=8).hexdigest()
        default, prefix = config.default_caption, config.caption_prefix
        self._default = () if default is None else (CaptionRef(text=default.strip(), prefix=prefix),)
        self._columns: dict[str, np.ndarray] = {}
        self._groups: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        self._footers: OrderedDict[int, pq.FileMetaData] = OrderedDict()
        self._group_bounds: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return int(self.shard_bounds[-1])

    @property
    def num_shards(self) -> int:
        return len(self.parts)

    @property
    def num_ok(self) -> int:
        return len(self) - sum(self.rejects.values())

    @property
    def coverage(self) -> float:
        """Share of listed samples whose media exists."""
        absent = self.missing + self.rejects[Reason.NO_MEDIA] + self.rejects[Reason.FILE_MISSING]
        return 1 - absent / max(len(self) + self.missing, 1)

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the score columns that any shard has."""
        names = {
            name.removeprefix(SCORE) for part in self.parts for name in _names_in(part.file) if name.startswith(SCORE)
        }
        return tuple(sorted(names))

    @property
    def unread(self) -> tuple[str, ...]:
        """Columns of its tables, or members beside its clips, that no sample needs."""
        return tuple(sorted({name for part in self.parts for name in part.meta.get("unread", ())}))

    def columns(self, *names: str) -> dict[str, np.ndarray]:
        """The named columns as arrays of len(self). `ok` is true for rows without a reject reason; scores that a
        sample lacks are NaN. Raises DataError for a name that no shard has."""
        wanted = [name for name in names if name not in self._columns]
        if wanted:
            self._columns |= self._load(wanted)
        return {name: self._columns[name] for name in names}

    def filter_mask(self, rule: str) -> np.ndarray:
        """Rows that satisfy a rule such as `aesthetic_score >= 4.5`. A sample without the score does not."""
        column, compare, bound = _parsed(rule)
        values = self.columns(column)[column]
        with np.errstate(invalid="ignore"):
            return compare(values, bound) & ~np.isnan(values.astype(np.float64))

    @property
    def filtered(self) -> tuple[str, ...]:
        """Columns that the source's filters compare."""
        return tuple(_parsed(rule)[0] for rule in self.config.filters)

    def row(self, row: int) -> IndexRow:
        """Everything about one row."""
        shard, group, inside = self._place(row)
        return self._row(row, shard, self._group(shard, group).slice(inside, 1).to_pylist()[0])

    def rows(self, numbers: np.ndarray) -> Iterator[IndexRow]:
        """These rows, whose numbers rise. Those of a group are decoded together: each takes 30 us, alone 400."""
        at = 0
        while at < len(numbers):
            first = int(numbers[at])
            shard, group, inside = self._place(first)
            table, begin = self._group(shard, group), first - inside
            some = numbers[at : at + int(np.searchsorted(numbers[at:], begin + table.num_rows))]
            for number, values in zip(some.tolist(), table.take(some - begin).to_pylist(), strict=True):
                yield self._row(number, shard, values)
            at += len(some)

    def _row(self, row: int, shard: int, values: StoredRow) -> IndexRow:
        part = self.parts[shard]
        path = _media_path(part, values)
        captions = tuple(self._caption_ref(part, caption) for caption in values["captions"]) or self._default
        scores = {
            name.removeprefix(SCORE): value
            for name, value in values.items()
            if name.startswith(SCORE) and isinstance(value, float)
        }
        return IndexRow(
            source=self.ordinal,
            row=int(row),
            key=values["key"],
            shard=part.part.uri,
            path=path,
            offset=values["offset"],
            size=values["size"],
            file_size=_file_size(part, values),
            suffix=values["suffix"],
            image=values["image"],
            width=values["width"],
            height=values["height"],
            fps=values["fps"],
            num_frames=values["num_frames"],
            duration=values["duration"],
            rotation=values["rotation"],
            num_keyframes=values["num_keyframes"],
            start_s=values["start_s"],
            end_s=values["end_s"],
            crop=CropBox(*values["crop"]) if values["crop"] else None,
            captions=captions,
            caption_chars=int(self.trained_chars(np.asarray(values["caption_chars"]))),
            scores=scores,
            reject=Reason(values["reject"]) if values["reject"] else None,
            detail=values["detail"],
            content=_content(part, path, values),
        )

    def caption(self, row: int, choice: int = 0) -> str:
        """Caption `choice` of a row as it is trained, read now. Empty if the row has none."""
        captions = self.row(row).captions
        return read_caption(captions[choice], self.limits) if captions else ""

    @property
    def num_by_default(self) -> int:
        """Usable samples without a text, which have the source's `default_caption`."""
        columns = self.columns("ok", "caption_chars")
        return int((columns["ok"].astype(bool) & (columns["caption_chars"] == 0)).sum())

    def trained_chars(self, caption_chars: np.ndarray) -> np.ndarray:
        """Lengths of captions as they are trained, with the source's prefix and for samples without a text its default,
        from the column `caption_chars`, which has those of the texts themselves."""
        default = len(self.config.default_caption or "")
        return np.where(caption_chars > 0, caption_chars, default) + len(self.config.caption_prefix)

    def verify(self) -> None:
        """Raises DataError if a shard changed since it was indexed."""
        for indexed in self.parts:
            then = indexed.part
            if then.fingerprint:
                continue  # manifests and folders are compared by what they list when the index is opened
            now = storage.stat(then.uri, self.limits.retries)
            if now is None or (now.size, now.mtime_ns) != (then.size, then.mtime_ns):
                was = "is gone" if now is None else f"changed ({then.size} -> {now.size} bytes, or its time)"
                raise DataError(
                    f"shard {then.uri} {was} since it was indexed. Run `heddle data index` again; "
                    f"a run that resumes needs the shard as it was."
                )

    def faults(self) -> Iterable[Fault]:
        """Every fault of the index: shards and members first, then rejected rows."""
        for indexed in self.parts:
            for fault in indexed.meta["faults"]:
                yield Fault(
                    Reason(fault["reason"]),
                    fault["shard"],
                    fault["key"],
                    fault["offset"],
                    fault["detail"],
                    self.ordinal,
                )
            if indexed.meta["rejects"]:
                with opened(indexed.file) as file:
                    table = file.read(columns=["key", "reject", "detail", "reject_at"], use_threads=False)
                for values in table.filter(table.column("reject").is_valid()).to_pylist():
                    yield Fault(
                        Reason(values["reject"]),
                        indexed.part.uri,
                        values["key"],
                        values["reject_at"],
                        values["detail"],
                        self.ordinal,
                    )

    def missing_faults(self) -> Iterable[Fault]:
        """Listed samples whose file does not exist, one by one. There may be millions of them."""
        for indexed in self.parts:
            if indexed.meta["missing"]:
                with indexed.file.with_suffix(MISSING).open(encoding="utf-8") as lines:
                    for line in lines:
                        yield Fault(
                            Reason.FILE_MISSING, indexed.part.uri, line.rstrip("\n"), None, "no such file", self.ordinal
                        )

    def file_into(self, ledger: Ledger) -> None:
        """Count every row, and every fault under its reason."""
        ledger.name_source(self.ordinal, self.name)
        ledger.add_indexed(len(self) + self.missing, self.ordinal)
        if self.missing:
            ledger.reject_many(Reason.FILE_MISSING, self.missing, self.name, self.ordinal)
        for fault in self.faults():
            ledger.record(fault)

    def _load(self, names: list[str]) -> dict[str, np.ndarray]:
        pieces: dict[str, list[np.ndarray]] = {name: [] for name in names}
        found: set[str] = set()
        for part in self.parts:
            with opened(part.file) as file:
                known = set(file.schema_arrow.names)
                stored = {name: _stored(name, known) for name in names}
                table = file.read(columns=sorted({column for column in stored.values() if column}), use_threads=False)
            for name, column in stored.items():
                if column:
                    found.add(name)
                    pieces[name].append(_array(name, table.column(column)))
                else:
                    pieces[name].append(np.full(part.meta["rows"], np.nan))
        for name in names:
            if name not in found and len(self):
                raise self._no_column(name)
        return {name: np.concatenate(arrays) if arrays else np.zeros(0) for name, arrays in pieces.items()}

    def _no_column(self, name: str) -> DataError:
        known = ["width", "height", "fps", "num_frames", "duration", "caption_chars", "num_keyframes", *self.scores]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(known)}."
        return DataError(f"source {self.name} has no column {name!r}. {hint}")

    def _place(self, row: int) -> tuple[int, int, int]:
        """(shard, row group of its part, row in that)"""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of source {self.name}, which has {len(self)} rows")
        shard = int(np.searchsorted(self.shard_bounds, row, side="right")) - 1
        inside = int(row - self.shard_bounds[shard])
        bounds = self._group_bounds.get(shard)
        if bounds is None:
            footer = self._footer(shard)
            counts = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
            bounds = self._group_bounds[shard] = np.concatenate([[0], np.cumsum(counts)])
        group = int(np.searchsorted(bounds, inside, side="right")) - 1
        return shard, group, inside - int(bounds[group])

    def _group(self, shard: int, group: int) -> pa.Table:
        if (shard, group) in self._groups:
            self._groups.move_to_end((shard, group))
            return self._groups[shard, group]
        with opened(self.parts[shard].file, self._footer(shard)) as file:
            table = self._groups[shard, group] = file.read_row_group(group)
        held = sum(each.num_rows for each in self._groups.values())
        while len(self._groups) > self.groups_kept or (held > self.rows_kept and len(self._groups) > 1):
            held -= self._groups.popitem(last=False)[1].num_rows
        return table

    def _footer(self, shard: int) -> pq.FileMetaData:
        """The footer of a part, kept for the next row: one of 3.6 million rows takes 90 ms, a group of rows 1.5 ms."""
        if shard not in self._footers:
            with opened(self.parts[shard].file) as file:
                self._footers[shard] = file.metadata
            if len(self._footers) > FOOTERS_KEPT:
                self._footers.popitem(last=False)
        self._footers.move_to_end(shard)
        return self._footers[shard]

    def _caption_ref(self, part: IndexedPart, caption: StoredCaption) -> CaptionRef:
        """Captions kept in the index are passed on as text, since a decoder may run on a node without the index."""
        if caption["path"] == CAPTION_FILE:
            text = _own_caption(part.file.with_suffix(CAPTIONS), caption, self.limits.retries)
            return CaptionRef(text=text, prefix=self.config.caption_prefix)
        return CaptionRef(
            path=caption["path"] or part.part.uri,
            offset=caption["offset"],
            size=caption["size"],
            field=caption["field"],
            prefix=self.config.caption_prefix,
        )


def _parsed(rule: str) -> tuple[str, Callable[[np.ndarray, float], np.ndarray], float]:
    """Column, comparison and number of a filter. Raises DataError."""
    match = RULE.fullmatch(rule)
    if match is None:
        raise DataError(f"filter {rule!r} is not COLUMN OPERATOR NUMBER, for example aesthetic_score >= 4.5.")
    name = match[1].replace(" ", "_")
    return ALIASES.get(name, name), COMPARE[match[2]], float(match[3])


def _own_caption(file: Path, caption: StoredCaption, retries: int) -> str:
    """A text that lies beside its part. Raises DataError if the file has become shorter: another text, or none, would
    be trained."""
    data = storage.read_range(str(file), caption["offset"], caption["size"], retries)
    if len(data) < caption["size"]:
        raise DataError(
            f"{file} has {len(data)} of the {caption['size']} bytes of the caption at {caption['offset']}: it has "
            f"become shorter since it was written. Delete {file.with_suffix('.parquet')} and run `heddle data index`."
        )
    return data.decode()


def _names_in(file: Path) -> list[str]:
    """Columns of a part."""
    with opened(file) as part:
        names: list[str] = part.schema_arrow.names
        return names


def _stored(name: str, known: set[str]) -> str:
    """Parquet column that a name stands for; empty if this part has none."""
    name = "reject" if name == "ok" else name
    return name if name in known else SCORE + name if SCORE + name in known else ""


def _array(name: str, values: pa.ChunkedArray) -> np.ndarray:
    if name == "ok":
        return values.is_null().to_numpy()
    if name in TEXTUAL:
        return np.array(values.to_pylist(), dtype=object)
    return values.to_numpy(zero_copy_only=False)


def _media_path(part: IndexedPart, values: StoredRow) -> str:
    if values["path"] == MEDIA_FILE:
        return str(part.file.with_suffix(MEDIA).absolute())
    return values["path"] or part.part.uri


def _file_size(part: IndexedPart, values: StoredRow) -> int:
    if values["path"] == MEDIA_FILE:
        return 0
    return max(values["size"], 0) if values["path"] else part.part.size


def _content(part: IndexedPart, path: str, values: StoredRow) -> str:
    own = not values["path"]
    identity = (
        path,
        part.part.size if own else values["size"],
        part.part.mtime_ns if own else values["mtime_ns"],
        values["offset"],
        values["size"],
        values["start_s"],
        values["end_s"],
        *(values["crop"] or ()),
    )
    return blake2b(repr(identity).encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()
