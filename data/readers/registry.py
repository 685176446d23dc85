"""Which reader serves which kind of source. A reader names its parts and writes the rows of one part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Protocol

from data import media, storage
from data.config import LimitsConfig, SourceConfig
from data.errors import DataError
from data.readers.part import IndexPart, PartWriter
from data.readers.tables import FOLDER_TABLES, TABLE_SUFFIXES, UnreadableTable, read_rows

SPELLED = "Check the path; a relative one is that of the folder in which heddle was started."
OTHER_FILES = {  # and what to give in their place
    **dict.fromkeys(("toml", "yaml", "yml"), "give the folders and tables that it names, each as a source."),
    **dict.fromkeys(("xlsx", "xls", "ods"), "save it as CSV."),
    **dict.fromkeys(("zip", "7z", "rar"), "unpack it, and give the folder."),
}


class SourceReader(Protocol):
    """What the index needs of a source."""

    def parts(self) -> list[IndexPart]:
        """Shards or manifests, in order. Raises DataError when there are none."""

    def score_names(self, part: IndexPart) -> list[str] | None:
        """Columns of numbers that filters may use; None where they are known only when the part has been read."""

    def read(self, part: IndexPart, writer: PartWriter) -> None:
        """Write every sample of the part exactly once: as a row (usable or rejected) or as missing."""


def reader_of(config: SourceConfig, limits: LimitsConfig) -> SourceReader:
    """The reader of this kind: `READER` of the file in kinds/ that has its name."""
    reader: SourceReader = import_module(f"data.readers.kinds.{config.kind}").READER(config, limits)
    return reader


def with_kind(config: SourceConfig) -> SourceConfig:
    """The source with the kind that its files have, where it is `auto`. Raises DataError where nothing is there."""
    return replace(config, kind=guess_kind(config.path)) if config.kind == "auto" else config


def guess_kind(path: str) -> str:
    """The kind of a source from its files: tars, MosaicML's shards, tables with Koala's or Panda's columns,
    other tables, or media. Raises DataError where there is nothing, or a single clip."""
    path = storage.absolute(path.split("::")[0])
    if path.endswith((".tar", ".tar.gz")):
        return "webdataset"  # also when nothing is there: its reader says so in terms of shards
    if not storage.is_folder(path):
        if media.suffix_of(path) in media.MEDIA_SUFFIXES:
            raise DataError(f"{path} is one clip or picture; give the folder of it and its caption, or a table.")
        first = storage.expand(path, TABLE_SUFFIXES)[0]
        if first.endswith((*TABLE_SUFFIXES, ".txt")):
            return _table_kind(first)
        if storage.stat(first) is None:
            raise DataError(f"{first} does not exist: neither a folder of clips or tars nor a table. {SPELLED}")
        if media.suffix_of(first) in OTHER_FILES:
            raise DataError(f"{first} is no data set that Heddle reads: {OTHER_FILES[media.suffix_of(first)]}")
        return "webdataset"
    names = [storage.name_of(file.uri) for file in storage.list_files(path)]
    if any(name.endswith(".tar") for name in names):
        return "webdataset"
    if "index.json" in names and any(".mds" in name for name in names):
        return "mds"
    if any(name in FOLDER_TABLES for name in names):
        return "manifest"
    tables = [file.uri for file in storage.list_files(path, recursive=False) if file.uri.endswith(TABLE_SUFFIXES)]
    return _table_kind(tables[0]) if tables and not _has_captions(names) else "pairs"


def _has_captions(names: Sequence[str]) -> bool:
    """Whether some of these files are captions of others: of any name, or a JSON with that of a clip or picture,
    with its suffix or without."""
    shown = {name for name in names if media.suffix_of(name) in media.MEDIA_SUFFIXES}
    called = {*shown, *(name.rpartition(".")[0] for name in shown)}
    return any(
        suffix in ("txt", "caption") or (suffix == "json" and name.rpartition(".")[0] in called)
        for name, suffix in ((name, media.suffix_of(name)) for name in names)
    )


def _table_kind(uri: str) -> str:
    if uri.endswith((".csv", ".tsv", ".parquet")):
        try:
            row = next(read_rows(uri, LimitsConfig()), None)
        except UnreadableTable:
            return "manifest"  # its reader says so in terms of tables
        except FileNotFoundError:  # it may be there again by then, and of another kind
            raise DataError(f"table {uri} does not exist. {SPELLED}") from None
        if isinstance(row, dict) and {"videoID", "timestamp"} <= row.keys():
            return "panda" if str(row["timestamp"]).lstrip().startswith("[[") else "koala"
    return "manifest"
