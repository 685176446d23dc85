"""One indexed shard or manifest as a Parquet file: the rows, and as metadata what it was made from and its faults.

Up to three files lie beside it. `.captions`: texts of manifests, UTF-8 without separators, addressed by offset.
`.media`: clips and pictures that a table or compressed shard holds itself, where one alone cannot be read. `.missing`:
keys of rows whose file does not exist. Of 36 million rows usually few have a file, so the others are not kept as rows.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NotRequired, TypedDict
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data.ledger import BadSample, Fault, FaultRecord, Reason
from data.media_info import CropBox, MediaInfo

VERSION = 5
# Grows when some parts, not all, would be read otherwise now: `_is_outdated` knows which of those without a revision,
# `was_misread` in tables.py which of revision 1.
REVISION = 2
_DRAWN = 12  # digits of a scratch file's name
_KILLED_S = 86400.0  # since anything was written into one
# A table of millions of rows is drawn from at random: each draw decodes a group for one row. 4,096 rows took 3.5 ms,
# 1,024 take 1.5; 512 take 1.2 and make the footer, 3 MB of a million rows, twice as large.
ROWS_PER_GROUP = 1024
CAPTION_FILE = "@"  # path of a caption that lies in the part's own `.captions`
MEDIA_FILE = "@"  # path of a sample that lies in the part's own `.media`
MOST_UNREAD = 64  # names that are noted; members of a tar may have one each
CAPTIONS, MISSING, MEDIA = ".captions", ".missing", ".media"  # suffixes of the files that lie beside a part
SCORE = "score:"  # prefix of score columns
CAPTION = pa.struct(
    [("path", pa.string()), ("offset", pa.int64()), ("size", pa.int64()), ("field", pa.string()), ("chars", pa.int32())]
)
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("path", pa.string()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("mtime_ns", pa.int64()),
        ("suffix", pa.string()),
        ("image", pa.bool_()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("fps", pa.float64()),
        ("num_frames", pa.int32()),
        ("duration", pa.float64()),
        ("rotation", pa.int16()),
        ("num_keyframes", pa.int32()),
        ("start_s", pa.float64()),
        ("end_s", pa.float64()),
        ("crop", pa.list_(pa.int32())),
        ("caption_chars", pa.int32()),
        ("num_captions", pa.int16()),
        ("captions", pa.list_(CAPTION)),
        ("reject", pa.string()),
        ("detail", pa.string()),
        ("reject_at", pa.int64()),
    ]
)


class StoredCaption(TypedDict):
    """A caption as CAPTION says."""

    path: str
    offset: int
    size: int
    field: str
    chars: int


class StoredRow(TypedDict):
    """A row as SCHEMA says. It also has one column per score, a float or None."""

    key: str
    path: str
    offset: int
    size: int
    mtime_ns: int
    suffix: str
    image: bool
    width: int
    height: int
    fps: float
    num_frames: int
    duration: float
    rotation: int
    num_keyframes: int
    start_s: float
    end_s: float
    crop: list[int] | None
    caption_chars: int
    num_captions: int
    captions: list[StoredCaption]
    reject: str | None
    detail: str
    reject_at: int | None


class PartMeta(TypedDict):
    """Metadata of a finished part."""

    version: int
    uri: str
    size: int
    mtime_ns: int
    fingerprint: str
    digest: str
    rows: int
    missing: int
    rejects: dict[str, int]
    faults: list[FaultRecord]
    unread: NotRequired[list[str]]  # columns or members that no sample of it needs; indexes of before have none
    beside: NotRequired[dict[str, int]]  # bytes of each file beside it, by suffix; indexes of before have none
    revision: NotRequired[int]  # REVISION; none: the part may be another one if it is read now
    outside: NotRequired[dict[str, str]]  # digest of each folder outside of the source in which files of it are


ALWAYS = PartMeta.__annotations__.keys() - {"unread", "beside", "revision", "outside"}  # what every index has
_UNTURNED = frozenset(("mkv", "webm"))  # may say how they are turned, which indexes did not have
UNKNOWN = MediaInfo(width=0, height=0, fps=0.0, num_frames=0, duration=0.0, num_keyframes=0)


@dataclass(frozen=True, slots=True)
class IndexPart:
    """A shard or manifest that is indexed as one. `fingerprint` changes when what it lists changes."""

    uri: str
    size: int
    mtime_ns: int
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Caption:
    """Where a caption lies: bytes of `path` (empty: of the part's own file), `field` of them if JSON.

    `crc` of its text makes an edited caption another index; it is not stored.
    """

    offset: int
    size: int
    chars: int
    crc: int
    field: str = ""
    path: str = ""

    @classmethod
    def of(cls, text: str, offset: int, size: int, field: str = "", path: str = "") -> Caption:
        text = text.strip()
        return cls(offset, size, len(text), crc32(text.encode("utf-8", "backslashreplace")), field, path)


@dataclass(slots=True)
class IndexedSample:
    """One row in the making. `path` is empty for members of the part's own file."""

    key: str
    path: str = ""
    offset: int = 0
    size: int = 0
    mtime_ns: int = 0
    suffix: str = ""
    info: MediaInfo | None = None  # of whole frames, also with a crop
    start_s: float = 0.0
    end_s: float = 0.0
    crop: CropBox | None = None
    captions: list[Caption] = field(default_factory=list)
    scores: Mapping[str, float] = field(default_factory=dict)
    reject: Reason | None = None
    detail: str = ""
    reject_at: int | None = None

    def refuse(self, fault: BadSample, base: int = 0) -> IndexedSample:
        """Mark as rejected; the first reason stays."""
        if self.reject is None:
            self.reject, self.detail = fault.reason, fault.detail[:400]
            self.reject_at = base if fault.offset is None else fault.offset
        return self


class PartWriter:
    """Writes rows in constant memory; what is read back exists only after `close`."""

    def __init__(self, path: Path, part: IndexPart, score_names: list[str] | None = None) -> None:
        """With `score_names` rows are written group by group; without, they wait until all names are known."""
        self.path, self.part = path, part
        self._scores = score_names
        self._rows: list[IndexedSample] = []
        self._writer: pq.ParquetWriter | None = None
        self._written: pa.OSFile | None = None  # by it
        self._digest = blake2b(digest_size=16)
        self._faults: list[Fault] = []
        self._rejects: Counter[str] = Counter()
        self._num_rows = self._num_missing = 0
        self._beside: dict[str, BinaryIO] = {}  # by suffix
        self._scratch_stem = f".{path.stem}.{uuid.uuid4().hex[:_DRAWN]}"  # hosts that share the folder have equal pids
        self._unread: set[str] = set()
        self.outside: dict[str, str] = {}  # as PartMeta has it

    def add(self, sample: IndexedSample) -> None:
        if sample.path != _text(sample.path):
            sample.reject = None  # the file cannot be opened again, which counts before any other fault
            sample.refuse(BadSample(Reason.UNSAFE_NAME, "a file name that is not UTF-8"))
            sample.path, sample.suffix, sample.captions = _text(sample.path), "", []
        self._rows.append(sample)
        self._num_rows += 1
        if sample.reject is not None:
            self._rejects[str(sample.reject)] += 1
        info = sample.info or UNKNOWN
        self._digest.update(
            repr(
                (
                    *([] if sample.crop is None else [sample.crop]),
                    sample.key,
                    sample.path.rpartition("/")[2],
                    sample.offset,
                    sample.size,
                    info.width,
                    info.height,
                    info.num_frames,
                    info.fps,
                    info.rotation,
                    info.header_crc,
                    sample.start_s,
                    sample.end_s,
                    sample.reject,
                    [(caption.size, caption.crc, caption.field) for caption in sample.captions],
                    sorted(sample.scores.items()),
                )
            ).encode("utf-8", "backslashreplace")
        )
        if self._scores is not None and len(self._rows) >= ROWS_PER_GROUP:
            self._flush()

    def fault(self, fault: Fault) -> None:
        """A fault of the whole part, or a note on a member that is no sample."""
        self._faults.append(fault)

    def unread(self, names: Iterable[str]) -> None:
        """Columns of a row, or members beside a clip, that say something and are not used."""
        if len(self._unread) < MOST_UNREAD:
            self._unread.update(names)

    def missing(self, key: str) -> None:
        """A listed sample whose file does not exist."""
        self._open(MISSING).write(key.encode("utf-8", "backslashreplace") + b"\n")
        self._num_missing += 1

    def put_caption(self, text: str) -> Caption:
        """Keep a text that cannot be addressed in its own file."""
        file, data = self._open(CAPTIONS), text.strip().encode("utf-8")
        offset = file.tell()
        file.write(data)
        return Caption.of(text, offset, len(data), path=CAPTION_FILE)

    def put_media(self, data: bytes) -> tuple[str, int]:
        """Keep media that a table holds itself. Where it can be read now: file and offset; a sample names it by
        MEDIA_FILE and this offset."""
        file = self._open(MEDIA)
        offset = file.tell()
        file.write(data)
        file.flush()
        return str(self._scratch(MEDIA).absolute()), offset

    def close(self) -> None:
        """Finish the part; the Parquet file appears last, all of it on disk, so a torn index is never read."""
        self._flush()
        meta: PartMeta = {
            "version": VERSION,
            "uri": self.part.uri,
            "size": self.part.size,
            "mtime_ns": self.part.mtime_ns,
            "fingerprint": self.part.fingerprint,
            "digest": self._digest.hexdigest(),
            "rows": self._num_rows,
            "missing": self._num_missing,
            "rejects": dict(self._rejects),
            "faults": [fault.to_json() for fault in self._faults],
            "unread": sorted(map(_text, self._unread)),
            "beside": {suffix: file.tell() for suffix, file in self._beside.items()},
            "revision": REVISION,
            "outside": self.outside,
        }
        assert self._writer is not None and self._written is not None
        self._writer.add_key_value_metadata({"heddle": json.dumps(meta)})
        self._writer.close()
        for file in (self._written, *self._beside.values()):
            file.close()
        for suffix in (*self._beside, ".parquet"):
            with self._scratch(suffix).open("rb") as written:
                os.fsync(written.fileno())
            os.replace(self._scratch(suffix), self.path.with_suffix(suffix))

    def abandon(self) -> None:
        """Remove all files after an error."""
        for file in (self._writer, self._written, *self._beside.values()):
            if file is not None:
                with suppress(OSError):  # the disk may be why, and what is left of its buffer does not fit either
                    file.close()
        for suffix in (*self._beside, ".parquet"):
            self._scratch(suffix).unlink(missing_ok=True)

    def _open(self, suffix: str) -> BinaryIO:
        """The file of this suffix beside the part, made by the first call."""
        if suffix not in self._beside:
            self._beside[suffix] = self._scratch(suffix).open("wb")
        return self._beside[suffix]

    def _scratch(self, suffix: str) -> Path:
        """Where a file of the part is until it is whole."""
        return self.path.with_name(self._scratch_stem + suffix)

    def _flush(self) -> None:
        if self._scores is None:
            self._scores = sorted({name for row in self._rows for name in row.scores})
        schema = SCHEMA
        for name in self._scores:
            schema = schema.append(pa.field(SCORE + name, pa.float64()))
        if self._writer is None:
            self._written = pa.OSFile(os.fsencode(self._scratch(".parquet")), "wb")
            self._writer = pq.ParquetWriter(self._written, schema, compression="zstd")
        for start in range(0, len(self._rows), ROWS_PER_GROUP):
            self._writer.write_table(_table(self._rows[start : start + ROWS_PER_GROUP], self._scores, schema))
        self._rows = []


def _table(rows: list[IndexedSample], scores: list[str], schema: pa.Schema) -> pa.Table:
    infos = [row.info or UNKNOWN for row in rows]
    sizes = [row.crop.size if row.crop else info.shown_size for row, info in zip(rows, infos)]
    columns: dict[str, Sequence[object]] = {
        "key": [_text(row.key) for row in rows],
        "path": [row.path for row in rows],
        "offset": [row.offset for row in rows],
        "size": [row.size for row in rows],
        "mtime_ns": [row.mtime_ns for row in rows],
        "suffix": [row.suffix for row in rows],
        "image": [info.image for info in infos],
        "width": [size[0] for size in sizes],
        "height": [size[1] for size in sizes],
        "fps": [info.fps for info in infos],
        "num_frames": [info.num_frames for info in infos],
        "duration": [info.duration for info in infos],
        "rotation": [info.rotation for info in infos],
        "num_keyframes": [info.num_keyframes for info in infos],
        "start_s": [row.start_s for row in rows],
        "end_s": [row.end_s for row in rows],
        "crop": [row.crop and list(astuple(row.crop)) for row in rows],
        "caption_chars": [row.captions[0].chars if row.captions else 0 for row in rows],
        "num_captions": [len(row.captions) for row in rows],
        "captions": [
            [
                {"path": c.path, "offset": c.offset, "size": c.size, "field": c.field, "chars": c.chars}
                for c in row.captions
            ]
            for row in rows
        ],
        "reject": [None if row.reject is None else str(row.reject) for row in rows],
        "detail": [_text(row.detail) for row in rows],
        "reject_at": [row.reject_at for row in rows],
    }
    for name in scores:
        columns[SCORE + name] = [row.scores.get(name) for row in rows]
    return pa.table(columns, schema=schema)


def _text(text: str) -> str:
    """Text that UTF-8 can hold; stray bytes of a name stay visible as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@contextmanager
def opened(path: Path, footer: pq.FileMetaData | None = None) -> Iterator[pq.ParquetFile]:
    """The Parquet file of a part. Given a path PyArrow would refuse a folder whose name is not UTF-8."""
    with pa.OSFile(os.fsencode(path)) as file:
        yield pq.ParquetFile(file, metadata=footer)


def read_meta(path: Path) -> PartMeta | None:
    """Metadata of a finished part, or None if it is absent, torn or of another version. A file beside it that is gone
    or of another size makes it torn."""
    try:
        with opened(path) as file:
            footer = file.metadata
        meta: PartMeta = json.loads((footer.metadata or {}).get(b"heddle", b"{}"))
    except (FileNotFoundError, pa.ArrowException, ValueError):
        return None
    except OSError as error:
        if error.errno is not None:
            raise
        return None  # PyArrow's own, of a footer that is none
    if not isinstance(meta, dict) or meta.get("version") != VERSION or not meta.keys() >= ALWAYS:
        return None
    if "revision" not in meta and not _is_outdated(path, footer, meta):
        meta["revision"] = 1
    beside = meta.get("beside", {})
    return meta if all(_size_of(path.with_suffix(suffix)) == size for suffix, size in beside.items()) else None


def clear_up(folder: Path) -> None:
    """Remove what writers of parts in this folder have left that were killed: those that live write all the time, but
    not into each file. A list of a few missing clips lies in a buffer for days."""
    scratch = [folder.glob(f".*.{'[0-9a-f]' * _DRAWN}{suffix}") for suffix in (".parquet", CAPTIONS, MEDIA, MISSING)]
    writers: dict[str, list[Path]] = {}
    for file in chain.from_iterable(scratch):
        writers.setdefault(file.stem, []).append(file)
    for files in writers.values():
        with suppress(OSError):  # another process removes them too, and what stays does no harm
            if time.time() - max(file.stat().st_mtime for file in files) > _KILLED_S:
                for left in files:
                    left.unlink()


def _is_outdated(path: Path, footer: pq.FileMetaData, meta: PartMeta) -> bool:
    """Whether a part without a revision may have other rows if it is read now."""
    return (
        not _UNTURNED.isdisjoint(_suffixes(path, footer))
        or (Reason.SPLIT_KEY in meta["rejects"] and pc.any(pc.ends_with(_column(path, "key"), "/")).as_py())
        or (Reason.TRUNCATED_VIDEO in meta["rejects"] and "no moov box" in _texts(path, "detail"))
        or {Reason.SPECIAL_MEMBER, Reason.GARBAGE_HEADER} <= {fault["reason"] for fault in meta["faults"]}
        or any(f"{SCORE}{bound}_frame" in footer.schema.names for bound in ("start", "end"))
        or meta["rejects"].get(Reason.BAD_TIMESTAMP) == meta["rows"]
    )


def _suffixes(path: Path, footer: pq.FileMetaData) -> set[str]:
    """Suffixes of the media of a part."""
    column = SCHEMA.get_field_index("suffix")
    told = [footer.row_group(group).column(column).statistics for group in range(footer.num_row_groups)]
    if all(bounds and bounds.min == bounds.max for bounds in told):  # as of most shards: no rows have to be read
        return {bounds.min for bounds in told}
    return _texts(path, "suffix")


def _texts(path: Path, column: str) -> set[str]:
    return set(_column(path, column).unique().to_pylist())


def _column(path: Path, name: str) -> pa.ChunkedArray:
    with opened(path) as file:
        return file.read(columns=[name]).column(name)


def _size_of(path: Path) -> int:
    """Bytes of a file; -1 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
