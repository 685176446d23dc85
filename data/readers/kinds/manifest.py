"""Tables of other trainers: Open-Sora, DiffSynth, Hugging Face, VideoX-Fun, FastVideo, musubi-tuner, finetrainers, DFM,
Open-Sora-Plan. They differ in the names of two columns, which are known here: no setting is needed for any of them.
Names in other letters, as `Path`, are taken where none is spelled as it is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property

from data import media, storage
from data.captions import USUAL_NAMES, check_any, check_lengths, choose, parse_policy, scores_of
from data.config import LimitsConfig, SourceConfig
from data.errors import DataError
from data.ledger import BadSample, Fault, Reason
from data.media_info import CropBox, MediaInfo
from data.readers.ahead import in_order
from data.readers.catalogue import Catalogue, cut
from data.readers.part import MEDIA_FILE, SCHEMA, IndexedSample, IndexPart, PartWriter
from data.readers.tables import FOLDER_TABLES, PATHS, TABLE_SUFFIXES, UnreadableTable, number_of, read_rows, text_stream
from data.storage import FileStat, ReadFile, expand

LISTS = ("videos.txt", "images.txt")  # of paths, a line each, beside one of these with a caption on each line
PROMPT_FILES = ("prompt.txt", "prompts.txt", "caption.txt", "captions.txt")
RESERVED = frozenset(SCHEMA.names)
ROWS_TO_LEARN_SCORES = 256
BOUNDS = ("start_frame", "end_frame")
EMPTY: tuple[object, ...] = (None, "", [], {})  # what a cell that says nothing holds


@dataclass(frozen=True, slots=True)
class ManifestTable:
    """A manifest and the folder its paths are relative to."""

    uri: str
    root: str


@dataclass(frozen=True, slots=True)
class HeldMedia:
    """Media that lie in a row: their bytes, and what they were called."""

    data: bytes
    path: str


class ManifestReader:
    """Parts are tables."""

    def __init__(self, config: SourceConfig, limits: LimitsConfig) -> None:
        self.config, self.limits = config, limits
        wanted = tuple(tuple(name.removeprefix("json:") for name in offer) for offer in parse_policy(config.caption))
        self.policy = tuple((*offer, *USUAL_NAMES) if i == 0 else offer for i, offer in enumerate(wanted))
        self._catalogues: dict[str, Catalogue] = {}

    @cached_property
    def tables(self) -> dict[str, ManifestTable]:
        found: dict[str, ManifestTable] = {}
        for uri in self._listed():
            for table in self._open_sora_plan(uri) or [ManifestTable(uri, self.config.media or storage.parent(uri))]:
                found[table.uri] = table
        return found

    def parts(self) -> list[IndexPart]:
        parts = []
        for table in self.tables.values():
            info = storage.stat(table.uri, self.limits.retries)
            if info is None:
                raise DataError(f"table {table.uri} does not exist. Check data.sources path {self.config.path}.")
            fingerprint = self._catalogue(table).fingerprint
            if table.uri.endswith(".txt") and (prompts := self._prompts(table.uri)):
                fingerprint += f"|{storage.name_of(prompts.uri)}|{prompts.size}|{prompts.mtime_ns}"
            parts.append(IndexPart(table.uri, info.size, info.mtime_ns, fingerprint))
        return parts

    def score_names(self, part: IndexPart) -> list[str]:
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

    def read(self, part: IndexPart, writer: PartWriter) -> None:
        """Every row becomes a sample, or is counted as missing."""
        catalogue = self._catalogue(self.tables[part.uri])
        seen: dict[str, int] = {}

        def foresee(row: dict[str, object] | BadSample, pool: Executor) -> Future[MediaInfo | BadSample] | None:
            return None if isinstance(row, BadSample) else _foresee(row, catalogue, pool)

        try:
            with closing(in_order(self._rows(part.uri), foresee, part.uri, is_heavy=_holds_media)) as rows:
                for number, (row, _) in enumerate(rows):
                    if isinstance(row, BadSample):
                        writer.add(IndexedSample(key=f"row {number}").refuse(row))
                    else:
                        self._add(row, number, catalogue, seen, writer)
        except UnreadableTable as error:
            writer.fault(Fault(Reason.UNREADABLE_MANIFEST, part.uri, "", None, str(error)))
        writer.outside = catalogue.outside()

    def _add(
        self, row: dict[str, object], number: int, catalogue: Catalogue, seen: dict[str, int], writer: PartWriter
    ) -> None:
        columns = _columns(PATHS, row)
        path = _clip_of(row, columns)
        if path is None:
            writer.add(IndexedSample(key=f"row {number}").refuse(_without_clip(row, writer.part.uri)))
            return
        writer.unread(self._unread(row, columns))
        if isinstance(path, HeldMedia):
            self._add_held(path, row, number, seen, writer)
            return
        key = path.rpartition(".")[0] or path
        try:
            file = catalogue.at(path)
        except BadSample as fault:
            writer.add(IndexedSample(key=key).refuse(fault))
            return
        if file is None:
            writer.missing(storage.join(catalogue.root, path))
            return
        key = numbered(key, seen)  # a file may be listed with several ranges or captions
        sample = IndexedSample(
            key=key,
            path=file.uri,
            size=file.size,
            mtime_ns=file.mtime_ns,
            suffix=media.suffix_of(file.uri),
            scores=_scores(row),
        )
        try:
            if sample.suffix not in media.MEDIA_SUFFIXES:
                raise BadSample(Reason.NOT_MEDIA, f"suffix {sample.suffix!r}")
            frames = _frame_range(row) if sample.suffix in media.VIDEO_SUFFIXES else None
            sample.info = whole = catalogue.probe(file, ranged=frames is not None)
            if frames is not None:
                begin, end = ((frame or 0) / whole.fps for frame in frames)
                sample.info, sample.start_s, sample.end_s = cut(whole, begin, end, self.limits)
                if frames[0] is None and sample.info.num_frames == whole.num_frames:  # named as without a range
                    sample.info, sample.start_s, sample.end_s = whole, 0.0, 0.0
            sample.crop = _crop(row, sample.info)
            sample.captions = [writer.put_caption(text) for text in self._captions(row)]
        except BadSample as fault:
            sample.refuse(fault)
        writer.add(sample)

    def _add_held(
        self, held: HeldMedia, row: dict[str, object], number: int, seen: dict[str, int], writer: PartWriter
    ) -> None:
        """A row of Hugging Face's datasets, which holds its media: {"video": {"bytes": ..., "path": "a.mp4"}}."""
        data, name = held.data, held.path or f"row {number}"
        suffix = media.suffix_of(name)
        sample = IndexedSample(
            key=numbered(name.rpartition(".")[0] or name, seen),
            path=MEDIA_FILE,
            size=len(data),
            mtime_ns=writer.part.mtime_ns,
            scores=_scores(row),
        )
        try:
            sample.suffix = suffix if suffix in media.MEDIA_SUFFIXES else media.suffix_by_content(data[:16])
            if not sample.suffix:
                raise BadSample(Reason.NOT_MEDIA, f"bytes that begin with {data[:12]!r}")
            place, sample.offset = writer.put_media(data)
            with ReadFile(place, self.limits.retries) as file:
                sample.info = media.probe(file, sample.offset, sample.size, sample.suffix, self.limits)
            sample.crop = _crop(row, sample.info)
            sample.captions = [writer.put_caption(text) for text in self._captions(row)]
        except BadSample as fault:
            sample.refuse(fault)
        writer.add(sample)

    def _unread(self, row: dict[str, object], columns: Sequence[str]) -> set[str]:
        """Columns in which a row says something that is neither its clip, its captions and range nor a number.
        `columns`: those that may hold a clip."""
        told = {name for name, value in row.items() if value not in EMPTY and _number(value) is None}
        holder = next((name for name in columns if name in told), "")
        try:
            texts = {name for name, _, _ in self._offered(row)}
        except BadSample:
            texts = set()
        return told - texts - {holder, "key", "cut", "crop"}

    def _offered(self, row: dict[str, object]) -> list[tuple[str, int, str]]:
        def find(name: str) -> list[str]:
            value = row.get(name)
            texts = value if isinstance(value, list) else [value]
            return [text for text in texts if isinstance(text, str)]

        found = choose(self.policy, find)
        if found:
            return found
        return choose(tuple(_columns(offer, row) for offer in self.policy), find)

    def _captions(self, row: dict[str, object]) -> list[str]:
        found = [text for _, _, text in self._offered(row)]
        check_any(found, self.config, f"no text among {', '.join(map(str, row))}"[:160])
        check_lengths(found, self.limits)
        return found

    def _catalogue(self, table: ManifestTable) -> Catalogue:
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
            deeper = [file.uri for file in storage.list_files(self.config.path) if file.uri.endswith(TABLE_SUFFIXES)]
            there = f", but {' and '.join(deeper[:3])}{' and more' if deeper[3:] else ''}" if deeper else ""
            raise DataError(
                f"{self.config.path}: no {', '.join(FOLDER_TABLES[:4])} or other table here{there}. Name the "
                f"table in data.sources path, or use kind: pairs for media beside captions."
            )
        return found

    def _open_sora_plan(self, uri: str) -> list[ManifestTable]:
        """Tables of a text file with lines `root,annotation.json`; empty for any other file."""
        if not uri.endswith(".txt") or storage.name_of(uri) in LISTS:
            return []
        tables = []
        for line in self._lines(uri):
            root, comma, annotation = line.rpartition(",")
            if not comma or not annotation.strip().endswith(TABLE_SUFFIXES):
                raise DataError(
                    f"{uri}: line {line[:80]!r} is not `root,annotation.json`. A list of clips is called "
                    f"{' or '.join(LISTS)} and lies beside {', '.join(PROMPT_FILES)}; clips with a caption in a file "
                    f"each are given by their folder."
                )
            folder = storage.parent(uri)
            told = next((path for path in (root, annotation) if storage.tells_service(path.strip(), folder)), "")
            if told:
                raise DataError(
                    f"{uri}: {told.strip()[:80]!r} says of which service it is asked, as data.sources alone may. "
                    f"Give data.sources path the table, and media the folder of its clips."
                )
            tables.append(ManifestTable(storage.join(folder, annotation.strip()), storage.join(folder, root.strip())))
        return tables

    def _rows(self, uri: str) -> Iterator[dict[str, object] | BadSample]:
        if not uri.endswith(".txt"):
            yield from read_rows(uri, self.limits)
            return
        prompts = self._prompts(uri)
        if prompts is None:
            raise UnreadableTable(f"no {' or '.join(PROMPT_FILES)} beside it")
        videos, texts = self._lines(uri), self._lines(prompts.uri)
        if len(videos) != len(texts):
            raise UnreadableTable(f"{len(videos)} videos but {len(texts)} lines in {storage.name_of(prompts.uri)}")
        for path, text in zip(videos, texts, strict=True):
            yield {"path": path, "caption": text}

    def _prompts(self, uri: str) -> FileStat | None:
        """The captions beside a list of videos."""
        beside = (storage.join(storage.parent(uri), name) for name in PROMPT_FILES)
        return next(filter(None, (storage.stat(name, self.limits.retries) for name in beside)), None)

    def _lines(self, uri: str) -> list[str]:
        with ReadFile(uri, self.limits.retries) as file, text_stream(file) as stream:
            lines = [line.strip() for line in stream]
        while lines and not lines[-1]:
            lines.pop()
        return lines


def _columns(names: tuple[str, ...], row: dict[str, object]) -> tuple[str, ...]:
    """These names, and after them those columns of a row that have one of them in other letters: `Path`."""
    others = {name.lower(): name for name in row if name not in names}
    return (*names, *(others[name.lower()] for name in names if name.lower() in others))


def _without_clip(row: dict[str, object], table: str) -> BadSample:
    """The fault of a row that names no clip, with what to do about the columns of its table."""
    told = {name: value for name, value in row.items() if isinstance(value, str)}
    addresses = [name for name, value in told.items() if value.startswith(("http:", "https:"))]
    paths = [name for name, value in told.items() if media.suffix_of(value) in media.MEDIA_SUFFIXES]
    if table.endswith((".csv", ".tsv")) and any(media.suffix_of(name) in media.MEDIA_SUFFIXES for name in row):
        remedy = "the table has no header, put a line path,caption before its first one"
    elif files := [name for name in paths if name not in addresses]:
        remedy = f"rename {files[0]} to path"
    elif addresses:
        remedy = f"{addresses[0]} has addresses, download the clips and put their files into a column path"
    else:
        remedy = "rename the column of the clips to path"
    columns = ", ".join(map(str, row))
    return BadSample(Reason.BAD_ROW, f"no path, video, file_name or the like among {columns}"[:160] + f"; {remedy}")


def _clip_of(row: dict[str, object], columns: Sequence[str]) -> str | HeldMedia | None:
    """The path that a row names, else the first medium that it holds, as bytes or as Hugging Face's datasets do, with
    the path, which is all where the bytes are left out. `columns`: those that may hold one."""
    cells = [row.get(name) for name in columns]
    path = next((cell for cell in cells if isinstance(cell, str) and cell), None)
    if path is not None:
        return path
    for cell in cells:
        if isinstance(cell, bytes) and cell:
            return HeldMedia(cell, "")
        if isinstance(cell, dict) and {"bytes", "path"} & cell.keys():
            data, path = cell.get("bytes"), cell.get("path")
            name = path if isinstance(path, str) else ""
            return HeldMedia(data, name) if isinstance(data, bytes) and data else name or None
    return None


def _holds_media(row: dict[str, object] | BadSample) -> bool:
    return not isinstance(row, BadSample) and isinstance(_clip_of(row, _columns(PATHS, row)), HeldMedia)


def _foresee(row: dict[str, object], catalogue: Catalogue, pool: Executor) -> Future[MediaInfo | BadSample] | None:
    """Begins to look at the file of a row, as `_add` will."""
    path = _clip_of(row, _columns(PATHS, row))
    if not isinstance(path, str) or media.suffix_of(path) not in media.MEDIA_SUFFIXES:
        return None
    try:
        ranged = media.suffix_of(path) in media.VIDEO_SUFFIXES and _frame_range(row) is not None
    except BadSample:
        return None
    return catalogue.foresee(path, ranged, pool)


def numbered(key: str, seen: dict[str, int]) -> str:
    """A key of its own for each sample of a part that is called so; `seen` counts them."""
    seen[key] = seen.get(key, 0) + 1
    return key if seen[key] == 1 else f"{key}#{seen[key]}"


def _frame_range(row: dict[str, object]) -> tuple[float | None, float] | None:
    """First frame (None: the row names none) and the one after the last; None for the whole video, also of a row with
    the first frame or a negative end alone: it is the same clip as without them, in caches too. Raises BadSample.

    Open-Sora-Plan's `cut` is [first, end]; with `num_frames` its trainer takes that many frames from the first on.
    """
    start, end = (None if _is_nan(row.get(name)) else _number(row.get(name)) for name in BOUNDS)
    is_whole = not start if end is None else start is None and end < 0
    if not is_whole:
        return start, math.inf if end is None else end
    if row.get("cut") in (None, "") or _is_nan(row["cut"]):
        return None
    bounds = _list_of_numbers(row["cut"])
    if len(bounds) != 2:
        raise BadSample(Reason.BAD_TIMESTAMP, f"cut {row['cut']!r} is not a list [first, end]"[:200])
    count = _number(row.get("num_frames"))
    return bounds[0], bounds[1] if count is None else bounds[0] + count


def _crop(row: dict[str, object], info: MediaInfo) -> CropBox | None:
    """Open-Sora-Plan's `crop`, [start_x, end_x, start_y, end_y]; None for whole frames. Raises BadSample."""
    if row.get("crop") in (None, "", []) or _is_nan(row["crop"]):
        return None
    bounds = _list_of_numbers(row["crop"])
    if len(bounds) != 4 or not all(bound.is_integer() for bound in bounds):
        what = f"crop {str(row['crop'])[:100]} is not a list of pixels [start_x, end_x, start_y, end_y]"
        raise BadSample(Reason.BAD_ROW, what)
    width, height = info.shown_size
    box = CropBox(*map(int, bounds))
    if not box.fits(width, height):
        raise BadSample(Reason.RANGE_OUTSIDE_VIDEO, f"{box} is empty or not inside the frame of {width}x{height}"[:200])
    return None if box.size == (width, height) else box


def _is_nan(value: object) -> bool:
    """Whether a cell is empty as pandas and polars write it, also into JSON."""
    number = _number(value)
    return number is not None and math.isnan(number)


def _list_of_numbers(value: object) -> list[float]:
    """Empty when the value is not a list, or one of its entries not a number."""
    numbers = [_number(entry) for entry in value] if isinstance(value, list) else []
    found = [number for number in numbers if number is not None]
    return found if len(found) == len(numbers) else []


def _scores(row: dict[str, object]) -> dict[str, float]:
    numbers = {name: _number(value) for name, value in row.items() if name not in PATHS and name not in USUAL_NAMES}
    return {name: value for name, value in scores_of(numbers).items() if name not in RESERVED}


def _number(value: object) -> float | None:
    return None if isinstance(value, bool) else number_of(value)


READER = ManifestReader
