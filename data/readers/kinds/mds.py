"""MosaicML StreamingDataset: a folder with `index.json`, which lists shards of samples with named, typed columns.

A shard, all numbers little-endian uint32: count of samples n, n + 1 offsets from its start, its columns as JSON, then
the samples. A sample: the sizes of its columns of variable size, then the values of all columns in order. (Format 2,
streaming/base/format/mds in github.com/mosaicml/streaming.) Media of a plain shard are read where they lie; those of a
compressed one are kept beside the index, since one clip alone cannot be read from it. Pickled columns are never opened.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import pyarrow as pa

from data import media, storage
from data.captions import (
    USUAL_NAMES,
    check_any,
    check_lengths,
    choose,
    decode_text,
    json_texts,
    parse_json,
    parse_policy,
    scores_of,
)
from data.config import LimitsConfig, SourceConfig
from data.errors import DataError
from data.ledger import BadSample, Fault, Reason
from data.readers.part import MEDIA_FILE, SCHEMA, Caption, IndexedSample, IndexPart, PartWriter
from data.readers.tables import PATHS
from data.storage import ReadFile

CODECS = {"zstd": "zstd", "gz": "gzip", "bz2": "bz2", "br": "brotli"}  # MosaicML's names -> Arrow's
MEDIA_ENCODINGS = ("bytes", "jpeg", "png")
MEDIA_COLUMNS = (*PATHS, "media", "clip", "bytes", "data")
NUMBERS = {"int": "<i8", "uint8": "<u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8", "int8": "<i1"} | {
    "int16": "<i2", "int32": "<i4", "int64": "<i8", "float16": "<f2", "float32": "<f4", "float64": "<f8"
}  # fmt: skip
RESERVED = frozenset(SCHEMA.names)


@dataclass(frozen=True, slots=True)
class MdsShard:
    """A shard as `index.json` lists it: the file to read, and how it is compressed (empty: not)."""

    uri: str
    codec: str
    plain_bytes: int


@dataclass(frozen=True, slots=True)
class MdsColumn:
    """A column of a shard. `size` is None where every value has its own."""

    name: str
    encoding: str
    size: int | None


@dataclass(frozen=True, slots=True)
class MdsValue:
    """Where the value of a column lies in its shard."""

    encoding: str
    offset: int
    size: int


class UnreadableShard(Exception):
    """The shard as a whole cannot be read."""


class ShardBytes:
    """The bytes of a shard as they are when not compressed."""

    def __init__(self, file: ReadFile, shard: MdsShard) -> None:
        """Reads a compressed shard whole, at most the bytes that its list promises. Raises UnreadableShard."""
        self._file = file
        self._data = self._decompressed(file, shard) if shard.codec else None
        self.size = file.size if self._data is None else len(self._data)

    def read(self, offset: int, size: int) -> bytes:
        """Fewer only at the end."""
        return self._file.pread(offset, size) if self._data is None else self._data[offset : offset + size]

    @staticmethod
    def _decompressed(file: ReadFile, shard: MdsShard) -> bytes:
        packed = file.pread(0, file.size)
        try:
            stream = pa.CompressedInputStream(pa.BufferReader(packed), shard.codec)
            data: bytes = stream.read(shard.plain_bytes + 1)
        except (pa.ArrowException, OSError) as error:
            raise UnreadableShard(f"not {shard.codec}: {error}") from error
        if len(data) != shard.plain_bytes:
            raise UnreadableShard(f"{len(data)} bytes or more where index.json says {shard.plain_bytes}")
        return data


class MdsReader:
    """Parts are shards."""

    def __init__(self, config: SourceConfig, limits: LimitsConfig) -> None:
        self.config, self.limits = config, limits
        wanted = parse_policy(config.caption)
        self.policy = tuple((*offer, *USUAL_NAMES) if i == 0 else offer for i, offer in enumerate(wanted))

    @cached_property
    def shards(self) -> dict[str, MdsShard]:
        found: dict[str, MdsShard] = {}
        for path in self.config.path.split("::"):
            uri = path if path.endswith(".json") else storage.join(path, "index.json")
            try:
                data = storage.read_range(uri, 0, -1, self.limits.retries)
                listed = [_shard(entry, storage.parent(uri), self.limits) for entry in json.loads(data)["shards"]]
            except FileNotFoundError as error:
                raise DataError(f"{uri} does not exist. Name the folder (of one split) that holds it.") from error
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise DataError(f"{uri} is no list of MDS shards of format 2 ({error}).") from error
            found |= {shard.uri: shard for shard in listed}
        return found

    def parts(self) -> list[IndexPart]:
        parts = []
        for uri in self.shards:
            info = storage.stat(uri, self.limits.retries)
            if info is None:
                raise DataError(f"shard {uri} does not exist, but index.json lists it. Fetch the whole data set.")
            parts.append(IndexPart(uri, info.size, info.mtime_ns))
        return parts

    def score_names(self, part: IndexPart) -> list[str] | None:
        return None

    def read(self, part: IndexPart, writer: PartWriter) -> None:
        """Every sample of the shard becomes a row."""
        shard = self.shards[part.uri]
        with ReadFile(part.uri, self.limits.retries) as file:
            try:
                held = ShardBytes(file, shard)
                columns, offsets = _header(held)
                named = _media_column(columns)
            except UnreadableShard as error:
                writer.fault(Fault(Reason.GARBAGE_HEADER, part.uri, "", None, str(error)[:400]))
                return
            for number, (begin, end) in enumerate(pairwise(offsets)):
                sample = IndexedSample(key=f"{number:06d}", offset=begin)
                try:
                    values = dict(_values(held, columns, begin, end))
                    self._fill(sample, values, named, held, file if not shard.codec else None, writer)
                except BadSample as fault:
                    sample.refuse(fault, begin)
                writer.add(sample)

    def _fill(
        self,
        sample: IndexedSample,
        values: Mapping[str, MdsValue],
        named: str,
        held: ShardBytes,
        file: ReadFile | None,
        writer: PartWriter,
    ) -> None:
        """`file`: the shard, where its media can be read as they lie."""
        clip = values[named]
        sample.offset, sample.size = clip.offset, clip.size
        sample.suffix = media.suffix_by_content(held.read(clip.offset, min(clip.size, 16)))
        if not clip.size:
            raise BadSample(Reason.NO_MEDIA, f"column {named} is empty", clip.offset)
        if not sample.suffix:
            head = held.read(clip.offset, min(clip.size, 12))
            raise BadSample(Reason.NOT_MEDIA, f"column {named} begins with {head!r}", clip.offset)
        if file is not None:
            sample.info = media.probe(file, clip.offset, clip.size, sample.suffix, self.limits)
        else:
            sample.path, sample.mtime_ns = MEDIA_FILE, writer.part.mtime_ns
            place, sample.offset = writer.put_media(held.read(clip.offset, clip.size))
            with ReadFile(place, self.limits.retries) as kept:
                sample.info = media.probe(kept, sample.offset, sample.size, sample.suffix, self.limits)
        sample.scores = {name: value for name, value in self._scores(values, held).items() if name not in RESERVED}
        sample.captions = self._captions(values, held, writer, in_place=file is not None)

    def _captions(
        self, values: Mapping[str, MdsValue], held: ShardBytes, writer: PartWriter, in_place: bool
    ) -> list[Caption]:
        def holder(name: str) -> MdsValue | None:
            """The column of a text; of `json:FIELD` the first JSON column that has the field."""
            if not name.startswith("json:"):
                return values[name] if name in values and values[name].encoding == "str" else None
            objects = (value for value in values.values() if value.encoding == "json")
            return next((value for value in objects if json_texts(self._json(value, held), name[5:])), None)

        def find(name: str) -> list[str]:
            value = holder(name)
            if value is None:
                return []
            if name.startswith("json:"):
                return json_texts(self._json(value, held), name[5:])
            if value.size > self.limits.max_caption_bytes:
                raise BadSample(Reason.CAPTION_TOO_LARGE, f"{name}: {value.size} bytes", value.offset)
            return [decode_text(held.read(value.offset, value.size), self.limits)]

        captions, texts = [], []
        for name, position, text in choose(self.policy, find):
            value, field = holder(name), f"{name[5:]}#{position}" if name.startswith("json:") else ""
            assert value is not None
            texts.append(text)
            captions.append(Caption.of(text, value.offset, value.size, field) if in_place else writer.put_caption(text))
        check_lengths(texts, self.limits)
        check_any(captions, self.config, f"no text among {', '.join(values)}"[:160])
        return captions

    def _scores(self, values: Mapping[str, MdsValue], held: ShardBytes) -> dict[str, float]:
        numbers: dict[str, object] = {}
        for name, value in values.items():
            form = NUMBERS.get(value.encoding)
            if form is not None and value.size == np.dtype(form).itemsize:
                numbers[name] = np.frombuffer(held.read(value.offset, value.size), form)[0].item()
            elif value.encoding == "json":
                numbers |= self._json(value, held)
        return scores_of(numbers)

    def _json(self, value: MdsValue, held: ShardBytes) -> dict[str, object]:
        if value.size > self.limits.max_json_bytes:
            raise BadSample(Reason.BAD_JSON, f"{value.size} bytes > {self.limits.max_json_bytes}", value.offset)
        return dict(parse_json(held.read(value.offset, value.size), self.limits))


def _shard(entry: dict[str, object], folder: str, limits: LimitsConfig) -> MdsShard:
    """The plain file where it is there, else the compressed one. Raises KeyError, TypeError or ValueError."""
    if entry["format"] != "mds" or entry["version"] != 2:
        raise ValueError(f"a shard of format {entry['format']} {entry['version']}")
    name, plain_bytes = _file(entry["raw_data"])
    uri = storage.join(folder, name)
    if not entry.get("compression") or storage.stat(uri, limits.retries) is not None:
        return MdsShard(uri, "", plain_bytes)
    codec = str(entry["compression"]).partition(":")[0]
    if codec not in CODECS:
        raise ValueError(f"{name} is compressed with {codec}; {', '.join(CODECS)} and plain shards can be read")
    return MdsShard(storage.join(folder, _file(entry["zip_data"])[0]), CODECS[codec], plain_bytes)


def _file(entry: object) -> tuple[str, int]:
    """(name, bytes) of a file that `index.json` describes."""
    if not isinstance(entry, dict):
        raise TypeError(f"{entry!r} where a file is described"[:200])
    name = str(entry["basename"])
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"{name!r} is not the name of a file beside it")
    return name, int(entry["bytes"])


def _header(held: ShardBytes) -> tuple[list[MdsColumn], list[int]]:
    """Columns, and where each sample begins and the last one ends. Raises UnreadableShard."""
    try:
        (count,) = struct.unpack("<I", held.read(0, 4))
        if 4 * (count + 2) > held.size:
            raise UnreadableShard(f"{count} samples in {held.size} bytes")
        offsets = np.frombuffer(held.read(4, 4 * (count + 1)), "<u4").astype(np.int64)
        begin = 4 * (count + 2)
        if offsets[0] < begin or (np.diff(offsets) < 0).any():
            raise UnreadableShard("offsets that do not rise")
        config = json.loads(held.read(begin, int(offsets[0]) - begin))
        described = zip(config["column_names"], config["column_encodings"], config["column_sizes"], strict=True)
        columns = [MdsColumn(str(name), str(kind), size and int(size)) for name, kind, size in described]
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnreadableShard(f"no MDS header: {error}") from error
    return columns, offsets.tolist()


def _media_column(columns: list[MdsColumn]) -> str:
    """The column with the clips: the only one that can hold them, else the first with a usual name."""
    found = [column.name for column in columns if column.encoding.partition(":")[0] in MEDIA_ENCODINGS]
    usual = [name for name in (*MEDIA_COLUMNS, *sorted(media.MEDIA_SUFFIXES)) if name in found]
    if len(found) == 1 or usual:
        return found[0] if len(found) == 1 else usual[0]
    listed = ", ".join(f"{column.name} ({column.encoding})" for column in columns)
    raise UnreadableShard(f"which column of {listed} holds the clips? Encode it as bytes and call it video.")


def _values(held: ShardBytes, columns: list[MdsColumn], begin: int, end: int) -> Iterator[tuple[str, MdsValue]]:
    """Where each column of a sample lies. Raises BadSample when they do not fill it exactly, or run past the shard."""
    variable = sum(not column.size for column in columns)
    at, found = begin + 4 * variable, []
    sizes = iter(np.frombuffer(held.read(begin, 4 * variable), "<u4").tolist() if at <= end <= held.size else ())
    try:
        for column in columns:
            size = column.size or next(sizes)
            found.append((column.name, MdsValue(column.encoding, at, size)))
            at += size
    except StopIteration:
        at = -1
    if at != end:
        raise BadSample(Reason.TRUNCATED_MEMBER, f"the sample ends at {end} of a shard of {held.size} bytes", begin)
    yield from found


READER = MdsReader
