"""Rows of CSV, TSV, JSON, JSONL and Parquet tables as dicts, in constant memory (a JSON list excepted).

A row that cannot be read is a BadSample in the stream, so that it is counted; the rows after it still come.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import SupportsFloat

import pyarrow as pa
import pyarrow.parquet as pq

from data.captions import USUAL_NAMES
from data.config import LimitsConfig
from data.ledger import BadSample, Reason
from data.media import suffix_of
from data.readers.part import PartMeta
from data.storage import ByteRange, ReadFile

# what datasets call the column of a clip
PATHS = ("path", "video_path", "image_path", "file_path", "file_name", "video", "image", "file", "filename")
TABLE_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}  # semicolons: spreadsheets of many countries
READ_BYTES = 1 << 20
ROWS_PER_BATCH = 512
ROWS_WITH_MEDIA = 8  # of a table that holds clips itself, megabytes each


class UnreadableTable(Exception):
    """The table as a whole cannot be read."""


def read_rows(uri: str, limits: LimitsConfig) -> Iterator[dict[str, object] | BadSample]:
    """Rows with stripped column names. Raises UnreadableTable when the file is not what its suffix says."""
    suffix = suffix_of(uri)
    with ReadFile(uri, limits.retries) as file:
        if file.size == 0:
            raise UnreadableTable("0 bytes")
        if suffix != "parquet" and file.pread(0, 2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise UnreadableTable("UTF-16; save it as UTF-8")
        if suffix in ("csv", "tsv"):
            yield from _csv_rows(file, "\t" if suffix == "tsv" else ",", limits)
        elif suffix == "parquet":
            yield from _parquet_rows(file)
        elif suffix == "jsonl":
            yield from _jsonl_rows(file, limits)
        else:
            yield from _json_rows(file)


def text_stream(file: ReadFile) -> io.TextIOWrapper:
    """UTF-8 with or without byte order mark; bytes that are not UTF-8 stay as surrogates for the row's own check."""
    return io.TextIOWrapper(
        io.BufferedReader(ByteRange(file), READ_BYTES), encoding="utf-8-sig", errors="surrogateescape", newline=""
    )


def _csv_rows(file: ReadFile, delimiter: str, limits: LimitsConfig) -> Iterator[dict[str, object] | BadSample]:
    csv.field_size_limit(max(limits.max_json_bytes, csv.field_size_limit()))
    with closing(text_stream(file)) as stream:
        lines: list[str] = []  # of the row that is read
        reader = csv.reader(_noted(stream, lines), delimiter=delimiter)
        try:
            header = [name.strip() for name in next(reader)]
        except (csv.Error, StopIteration) as error:
            raise UnreadableTable(f"no header: {error}") from error
        others = [sign for sign in DELIMITERS if sign != delimiter and len(header) == 1 and sign in header[0]]
        if others:
            why = f"its columns are separated by {DELIMITERS[others[0]]}; save it with {DELIMITERS[delimiter]}"
            raise UnreadableTable(why)
        while True:
            lines.clear()
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield BadSample(Reason.BAD_ROW, f"line {reader.line_num}: {error}")
                continue
            if not values:
                continue  # an empty line
            if len(lines) > 1 and _is_unclosed(lines, delimiter):
                first = reader.line_num - len(lines) + 1
                why = f"line {first}: a quote that is not closed takes the lines to {reader.line_num} into its field"
                yield BadSample(Reason.BAD_ROW, why)
                continue
            if len(values) != len(header):
                yield BadSample(
                    Reason.BAD_ROW, f"line {reader.line_num}: {len(values)} fields, the header has {len(header)}"
                )
                continue
            yield dict(zip(header, values, strict=True))


def _is_unclosed(lines: Sequence[str], delimiter: str) -> bool:
    """Whether a quote begins a field of this row and does not end it; in the middle of a field it is a letter, as in
    5"."""
    if sum(line.count('"') for line in lines) % 2 == 0:
        return False
    try:
        next(csv.reader(lines, delimiter=delimiter, strict=True))
    except csv.Error:
        return True
    return False


def _noted(stream: io.TextIOWrapper, lines: list[str]) -> Iterator[str]:
    """The lines of a stream, each of which `lines` then holds, too."""
    for line in stream:
        lines.append(line)
        yield line


def _jsonl_rows(file: ReadFile, limits: LimitsConfig) -> Iterator[dict[str, object] | BadSample]:
    stream, line_number = io.BufferedReader(ByteRange(file), READ_BYTES), 0
    while line := stream.readline(limits.max_json_bytes):
        line_number += 1
        if len(line) == limits.max_json_bytes and not line.endswith(b"\n"):
            while (rest := stream.readline(limits.max_json_bytes)) and not rest.endswith(b"\n"):
                pass
            yield BadSample(Reason.BAD_ROW, f"line {line_number}: more than max_json_bytes {limits.max_json_bytes}")
            continue
        if not line.strip():
            continue
        try:
            value: object = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            yield BadSample(Reason.BAD_ROW, f"line {line_number}: {error}")
            continue
        yield _object(value, f"line {line_number}")


def _json_rows(file: ReadFile) -> Iterator[dict[str, object] | BadSample]:
    """A list of objects, an object of named objects (the name becomes `key`), or one of captions by file name."""
    try:
        value: object = json.loads(file.pread(0, file.size).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UnreadableTable(f"not JSON: {error}") from error
    if isinstance(value, dict):
        value = [_named(name, entry) for name, entry in value.items()]
    if not isinstance(value, list):
        raise UnreadableTable(f"a JSON {type(value).__name__}, not a list of rows")
    for i, entry in enumerate(value):
        yield _object(entry, f"entry {i}")


def _named(name: str, entry: object) -> object:
    if isinstance(entry, dict):
        return {"key": name, **entry}
    texts = entry if isinstance(entry, list) else [entry]
    return {"file_name": name, "caption": entry} if all(isinstance(text, str) for text in texts) else entry


def _object(value: object, where: str) -> dict[str, object] | BadSample:
    if not isinstance(value, dict):
        return BadSample(Reason.BAD_ROW, f"{where}: a {type(value).__name__}, not an object")
    return {str(name).strip(): field for name, field in value.items()}


def _parquet_rows(file: ReadFile) -> Iterator[dict[str, object] | BadSample]:
    try:
        table = pq.ParquetFile(pa.PythonFile(ByteRange(file), mode="r"))
        holds_media = any(map(_may_be_media, table.schema_arrow.types))
        for batch in table.iter_batches(batch_size=ROWS_WITH_MEDIA if holds_media else ROWS_PER_BATCH):
            yield from _batch_rows(batch)
    except FileNotFoundError:  # it went while it was read, which says nothing of what it was
        raise
    except (pa.ArrowException, OSError) as error:  # corrupt pages are an OSError; storage that fails is a DataIOError
        raise UnreadableTable(f"not Parquet: {error}") from error


def _may_be_media(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_struct, pa.types.is_binary, pa.types.is_large_binary))


def _batch_rows(batch: pa.RecordBatch) -> Iterator[dict[str, object] | BadSample]:
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for i in range(batch.num_rows):  # one row has text that is not UTF-8: find it
        try:
            row = batch.slice(i, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield BadSample(Reason.BAD_ROW, f"text that is not UTF-8: {error.reason}")
        else:
            yield row


def was_misread(meta: PartMeta) -> bool:
    """Whether all rows of a part before REVISION 2 lack something that one of its columns has: one with a known name in
    other letters, which was not read then."""
    for reason, names in ((Reason.BAD_ROW, PATHS), (Reason.NO_CAPTION, USUAL_NAMES)):
        if meta["rows"] and meta["rejects"].get(reason) == meta["rows"]:
            return any(name not in names and name.lower() in names for name in meta.get("unread", ()))
    return False


def number_of(value: object) -> float | None:
    """The number that a field holds or spells; None where it does neither."""
    if not isinstance(value, str | bytes | SupportsFloat):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


FOLDER_TABLES = (
    "metadata.csv",
    "metadata.jsonl",
    "metadata.json",
    "metadata.parquet",
    "videos2caption.json",
    "meta.json",
    "videos.txt",
    "images.txt",
    "data.txt",
)
