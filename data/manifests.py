"""Tables of other trainers: Open-Sora, DiffSynth, Hugging Face, VideoX-Fun, FastVideo, musubi-tuner, finetrainers, DFM,
Open-Sora-Plan. They differ in the names of two columns; `data.sources columns` is not needed for any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from data import media, storage
from data.captions import check_lengths, choose, parse_policy, scores_of
from data.catalogue import Catalogue, cut
from data.config import LimitsConfig, SourceConfig
from data.errors import DataError
from data.ledger import BadSample, Fault, Reason
from data.part import SCHEMA, Part, PartWriter, Sample
from data.storage import ReadFile, expand
from data.tables import TABLE_SUFFIXES, UnreadableTable, read_rows, text_stream

PATHS = ("path", "video_path", "image_path", "file_path", "file_name", "video", "image", "file", "filename")
CAPTIONS = ("caption", "text", "cap", "prompt", "captions", "vila_caption", "long_caption", "short_caption",
            "description", "prompts")
FOLDER_TABLES = ("metadata.csv", "metadata.jsonl", "metadata.json", "metadata.parquet", "videos2caption.json",
                 "meta.json", "videos.txt", "data.txt")
PROMPT_FILES = ("prompt.txt", "prompts.txt", "captions.txt")
RESERVED = frozenset(SCHEMA.names)
ROWS_TO_LEARN_SCORES = 256


@dataclass(frozen=True, slots=True)
class Table:
    """A manifest and the folder its paths are relative to."""

    uri: str
    root: str


class ManifestReader:
    """Parts are tables."""

    def __init__(self, config: SourceConfig, limits: LimitsConfig) -> None:
        self.config, self.limits = config, limits
        wanted = tuple(tuple(name.removeprefix("json:") for name in offer) for offer in parse_policy(config.caption))
        self.policy = tuple((*offer, *CAPTIONS) if i == 0 else offer for i, offer in enumerate(wanted))
        self._catalogues: dict[str, Catalogue] = {}

    @cached_property
    def tables(self) -> dict[str, Table]:
        found: dict[str, Table] = {}
        for uri in self._listed():
            for table in self._open_sora_plan(uri) or [Table(uri, self.config.media or storage.parent(uri))]:
                found[table.uri] = table
        return found

    def parts(self) -> list[Part]:
        parts = []
        for table in self.tables.values():
            info = storage.stat(table.uri, self.limits.retries)
            if info is None:
                raise DataError(f"table {table.uri} does not exist. Check data.sources path {self.config.path}.")
            parts.append(Part(table.uri, info.size, info.mtime_ns, self._catalogue(table).fingerprint))
        return parts

    def score_names(self, part: Part) -> list[str]:
        """Numeric columns, from the first rows: the writer must know them before the last."""
        names: set[str] = set()
        try:
            for number, row in enumerate(self._rows(part.uri)):
                if number >= ROWS_TO_LEARN_SCORES:
                    break
                if isinstance(row, dict):
                    names |= _scores(row).keys()
        except UnreadableTable:
            return []
        return sorted(names)

    def read(self, part: Part, writer: PartWriter) -> None:
        """Every row becomes a sample, or is counted as missing."""
        catalogue = self._catalogue(self.tables[part.uri])
        seen: dict[str, int] = {}
        try:
            for number, row in enumerate(self._rows(part.uri)):
                if isinstance(row, BadSample):
                    writer.add(Sample(key=f"row {number}").refuse(row))
                else:
                    self._add(row, number, catalogue, seen, writer)
        except UnreadableTable as error:
            writer.fault(Fault(Reason.UNREADABLE_MANIFEST, part.uri, "", None, str(error)))

    def _add(self, row: dict[str, Any], number: int, catalogue: Catalogue, seen: dict[str, int],
             writer: PartWriter) -> None:
        path = next((row[name] for name in PATHS if isinstance(row.get(name), str) and row[name]), None)
        if path is None:
            columns = ", ".join(map(str, row))
            writer.add(Sample(key=f"row {number}").refuse(BadSample(Reason.BAD_ROW, f"no path among {columns}"[:300])))
            return
        key = path.rpartition(".")[0] or path
        if path.startswith(("pipe:", "http:", "https:")) or "\0" in path:
            writer.add(Sample(key=key).refuse(BadSample(Reason.UNSAFE_NAME, repr(path[:200]))))
            return
        file = catalogue.at(path)
        if file is None:
            writer.missing(path)
            return
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > 1:
            key = f"{key}#{seen[key]}"  # a file may be listed with several ranges or captions
        sample = Sample(key=key, path=file.uri, size=file.size, mtime_ns=file.mtime_ns,
                        suffix=media.suffix_of(file.uri), scores=_scores(row))
        try:
            if sample.suffix not in media.MEDIA_SUFFIXES:
                raise BadSample(Reason.NOT_MEDIA, f"suffix {sample.suffix!r}")
            sample.info = catalogue.probe(file)
            frames = [_number(row.get(name)) for name in ("start_frame", "end_frame")]
            if all(frame is not None for frame in frames) and not sample.info.image:
                begin, end = (float(frame or 0) / sample.info.fps for frame in frames)
                sample.info, sample.start_s, sample.end_s = cut(sample.info, begin, end)
            sample.captions = [writer.put_caption(text) for text in self._captions(row)]
        except BadSample as fault:
            sample.refuse(fault)
        writer.add(sample)

    def _captions(self, row: dict[str, Any]) -> list[str]:
        def find(name: str) -> list[str]:
            value = row.get(name)
            texts = value if isinstance(value, list) else [value]
            return [text for text in texts if isinstance(text, str)]

        found = [text for _, _, text in choose(self.policy, find)]
        if not found:
            raise BadSample(Reason.NO_CAPTION, f"no text among {', '.join(map(str, row))}"[:300])
        if any(0xD800 <= ord(sign) < 0xE000 for text in found for sign in text):
            raise BadSample(Reason.CAPTION_NOT_UTF8, "stray bytes in the caption")
        check_lengths(found, self.limits)
        return found

    def _catalogue(self, table: Table) -> Catalogue:
        if table.root not in self._catalogues:
            self._catalogues[table.root] = Catalogue(table.root, self.limits)
        return self._catalogues[table.root]

    def _listed(self) -> list[str]:
        """Table files; of a folder those with a known name, else all tables directly in it."""
        if not storage.is_folder(self.config.path):
            return expand(self.config.path, TABLE_SUFFIXES)
        files = [file.uri for file in storage.list_files(self.config.path, recursive=False)]
        known = [uri for uri in files if storage.name_of(uri) in FOLDER_TABLES]
        found = known or [uri for uri in files if uri.endswith(TABLE_SUFFIXES)]
        if not found:
            raise DataError(f"{self.config.path}: no {', '.join(FOLDER_TABLES[:4])} or other table here. Name the "
                            f"table in data.sources path, or use kind: pairs for media beside captions.")
        return found

    def _open_sora_plan(self, uri: str) -> list[Table]:
        """Tables of a text file with lines `root,annotation.json`; empty for any other file."""
        if not uri.endswith(".txt") or storage.name_of(uri) == "videos.txt":
            return []
        tables = []
        for line in self._lines(uri):
            root, comma, annotation = line.rpartition(",")
            if not comma or not annotation.strip().endswith(TABLE_SUFFIXES):
                raise DataError(f"{uri}: line {line[:80]!r} is not `root,annotation.json`.")
            folder = storage.parent(uri)
            tables.append(Table(storage.join(folder, annotation.strip()), storage.join(folder, root.strip())))
        return tables

    def _rows(self, uri: str) -> Iterator[dict[str, Any] | BadSample]:
        if not uri.endswith(".txt"):
            yield from read_rows(uri, self.limits)
            return
        folder = storage.parent(uri)
        prompts = next((name for name in PROMPT_FILES if storage.stat(storage.join(folder, name))), None)
        if prompts is None:
            raise UnreadableTable(f"no {' or '.join(PROMPT_FILES)} beside it")
        videos, texts = self._lines(uri), self._lines(storage.join(folder, prompts))
        if len(videos) != len(texts):
            raise UnreadableTable(f"{len(videos)} videos but {len(texts)} lines in {prompts}")
        for path, text in zip(videos, texts, strict=True):
            yield {"path": path, "caption": text}

    def _lines(self, uri: str) -> list[str]:
        with ReadFile(uri, self.limits.retries) as file, text_stream(file) as stream:
            lines = [line.strip() for line in stream]
        while lines and not lines[-1]:
            lines.pop()
        return lines


def _scores(row: dict[str, Any]) -> dict[str, float]:
    numbers = {name: _number(value) for name, value in row.items() if name not in PATHS and name not in CAPTIONS}
    return {name: value for name, value in scores_of(numbers).items() if name not in RESERVED}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None or isinstance(value, (list, dict)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
