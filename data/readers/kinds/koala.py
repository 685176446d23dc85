"""Koala-36M and Panda-70M: CSV metadata over YouTube videos, joined with whatever files exist.

Koala has one row per clip, Panda one row per video with lists. The files are either one per clip (`<videoID>.mp4`,
`<VTSS>_<videoID>.mp4`) or whole videos (`<YouTube id>.mp4`) of which a clip is a time range. Rows without a file are
counted as file_missing. Nothing is evaluated: timestamps are matched, lists parsed as literals.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property

from data import media, storage
from data.captions import check_any, check_lengths
from data.config import LimitsConfig, SourceConfig
from data.errors import DataError
from data.ledger import BadSample, Fault, Reason
from data.media_info import MediaInfo
from data.readers.ahead import in_order
from data.readers.catalogue import Catalogue, cut
from data.readers.part import IndexedSample, IndexPart, PartWriter
from data.readers.tables import UnreadableTable, number_of, read_rows
from data.storage import FileStat, expand

CLOCK = r"'?\"?(?:(\d+):)?(\d{1,2}):(\d{1,2}(?:\.\d+)?)'?\"?"
RANGE = re.compile(rf"\s*[\[(]\s*{CLOCK}\s*,\s*{CLOCK}\s*[\])]\s*")
MAX_LITERAL_CHARS = 1 << 20
SCORES = ("clarity_score", "aesthetic_score", "motion_score", "video_training_suitability_score", "matching_score")
ALIASES = {  # column names seen in mirrors and derived tables
    "videoid": "videoID",
    "video_id": "videoID",
    "vtss": "video_training_suitability_score",
    "video_training_stability_score": "video_training_suitability_score",
    "clarity": "clarity_score",
    "aesthetic": "aesthetic_score",
    "motion": "motion_score",
    "timestamps": "timestamp",
    "video": "video_path",
    "path": "video_path",
}


@dataclass(frozen=True, slots=True)
class KoalaClip:
    """One clip as the table lists it."""

    key: str
    video: str  # name of the whole video
    names: tuple[str, ...]  # names a file of the clip alone may have
    path: str  # stated path, or empty
    timestamp: str
    caption: str
    scores: Mapping[str, float]


def parse_range(text: str) -> tuple[float, float]:
    """Seconds of `['0:00:16.300', '0:01:05']`. Raises BadSample."""
    match = RANGE.fullmatch(text)
    if match is None:
        raise BadSample(Reason.BAD_TIMESTAMP, repr(text[:80]))
    fields = [float(group or 0) for group in match.groups()]
    start, end = (hours * 3600 + minutes * 60 + seconds for hours, minutes, seconds in (fields[:3], fields[3:]))
    return start, end


class KoalaReader:
    """Parts are CSV, TSV or Parquet files."""

    def __init__(self, config: SourceConfig, limits: LimitsConfig) -> None:
        self.config, self.limits = config, limits

    @cached_property
    def catalogue(self) -> Catalogue:
        return Catalogue(self.config.media or storage.parent(self._files[0]), self.limits)

    @cached_property
    def _files(self) -> list[str]:
        return expand(self.config.path, (".csv", ".tsv", ".parquet"))

    def parts(self) -> list[IndexPart]:
        found = []
        for uri in self._files:
            info = storage.stat(uri, self.limits.retries)
            if info is None:
                raise DataError(f"table {uri} does not exist. Check data.sources path {self.config.path}.")
            found.append(IndexPart(uri, info.size, info.mtime_ns, self.catalogue.fingerprint))
        return found

    def score_names(self, part: IndexPart) -> list[str]:
        """Fixed, so that rows are written as they come."""
        return list(SCORES)

    def read(self, part: IndexPart, writer: PartWriter) -> None:
        """Every row of the table becomes a sample, or is counted as missing."""
        seen: set[str] = set()
        rows = enumerate(read_rows(part.uri, self.limits))
        listed = ((number, clip) for number, row in rows for clip in self._listed(row, number))
        try:
            with closing(in_order(listed, self._foresee, part.uri)) as clips:
                for (number, clip), _ in clips:
                    if isinstance(clip, BadSample):
                        writer.add(IndexedSample(key=f"row {number}").refuse(clip))
                    else:
                        self._add(clip, seen, writer)
        except UnreadableTable as error:
            writer.fault(Fault(Reason.UNREADABLE_MANIFEST, part.uri, "", None, str(error)))
        writer.outside = self.catalogue.outside()

    def _foresee(
        self, listed: tuple[int, KoalaClip | BadSample], pool: Executor
    ) -> Future[MediaInfo | BadSample] | None:
        """Begins to look at the file of a clip that `_find` will ask for first."""
        _, clip = listed
        if isinstance(clip, BadSample):
            return None
        if clip.path:
            whole = storage.name_of(clip.path).rpartition(".")[0] == clip.video
            return self.catalogue.foresee(clip.path, whole, pool)
        file, whole = self._find(clip)
        return None if file is None else self.catalogue.foresee(file, whole, pool)

    def _listed(self, row: dict[str, object] | BadSample, number: int) -> Iterator[KoalaClip | BadSample]:
        if isinstance(row, BadSample):
            yield row
            return
        fields = {ALIASES.get(name.lower(), name): value for name, value in row.items()}
        missing = [name for name in ("videoID", "timestamp", "caption") if name not in fields]
        if missing:
            if number == 0:
                raise UnreadableTable(f"no column {', '.join(missing)}; there are {', '.join(row)}")
            yield BadSample(Reason.BAD_ROW, f"no {', '.join(missing)}")
        elif not fields["videoID"] or "/" in str(fields["videoID"]):
            yield BadSample(Reason.BAD_ROW, f"videoID {fields['videoID']!r}")
        elif self.config.kind == "panda":
            yield from _panda_clips(fields)
        else:
            yield _koala_clip(fields)

    def _add(self, listed: KoalaClip, seen: set[str], writer: PartWriter) -> None:
        try:
            file, whole = self._find(listed)
        except BadSample as fault:
            writer.add(IndexedSample(key=listed.key).refuse(fault))
            return
        if file is None:
            writer.missing(listed.key)
            return
        sample = IndexedSample(
            key=listed.key,
            path=file.uri,
            size=file.size,
            mtime_ns=file.mtime_ns,
            suffix=media.suffix_of(file.uri),
            scores=listed.scores,
        )
        try:
            if listed.key in seen:
                raise BadSample(Reason.SPLIT_KEY, "the videoID was listed earlier in this table")
            seen.add(listed.key)
            sample.info = self.catalogue.probe(file, ranged=whole)
            if whole:
                sample.info, sample.start_s, sample.end_s = cut(
                    sample.info, *parse_range(listed.timestamp), self.limits
                )
            texts = [text] if (text := listed.caption.strip()) else []
            check_any(texts, self.config, "empty")
            check_lengths(texts, self.limits)
            sample.captions = [writer.put_caption(text) for text in texts]
        except BadSample as fault:
            sample.refuse(fault)
        writer.add(sample)

    def _find(self, listed: KoalaClip) -> tuple[FileStat | None, bool]:
        """The stated file, else the clip's own, else the whole video; and whether it is the whole video."""
        if listed.path and (file := self.catalogue.at(listed.path)):
            return file, storage.name_of(file.uri).rpartition(".")[0] == listed.video
        for name in listed.names:
            if file := self.catalogue.named(name):
                return file, False
        return self.catalogue.named(listed.video), True


def _koala_clip(fields: dict[str, object]) -> KoalaClip:
    key = str(fields["videoID"])
    return KoalaClip(
        key,
        key.rpartition("_")[0],
        (key,),
        str(fields.get("video_path") or ""),
        str(fields["timestamp"]),
        str(fields["caption"] or ""),
        _scores(fields),
    )


def _panda_clips(fields: dict[str, object]) -> Iterator[KoalaClip | BadSample]:
    """One clip for each entry of the row's lists."""
    video = str(fields["videoID"])
    try:
        lists = [_literal(fields[name]) for name in ("timestamp", "caption")]
        ranks = _literal(fields["matching_score"]) if fields.get("matching_score") else [None] * len(lists[0])
    except BadSample as fault:
        yield fault
        return
    if not len(lists[0]) == len(lists[1]) == len(ranks):
        yield BadSample(
            Reason.BAD_ROW, f"{video}: {len(lists[0])} timestamps, {len(lists[1])} captions, {len(ranks)} scores"
        )
        return
    for i, (timestamp, caption, rank) in enumerate(zip(*lists, ranks, strict=True)):
        yield KoalaClip(
            f"{video}_{i}",
            video,
            (f"{video}_{i}", f"{video}_{i:05d}"),
            "",
            str(list(timestamp) if isinstance(timestamp, (list, tuple)) else timestamp),
            "" if caption is None else str(caption),
            _scores({**fields, "matching_score": rank}),
        )


def _literal(value: object) -> list[object]:
    if isinstance(value, str):
        if len(value) > MAX_LITERAL_CHARS:
            raise BadSample(Reason.BAD_ROW, f"a list of {len(value)} characters")
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError) as error:
            raise BadSample(Reason.BAD_ROW, f"not a list: {error}"[:200]) from error
    if not isinstance(value, (list, tuple)):
        raise BadSample(Reason.BAD_ROW, f"a {type(value).__name__}, not a list")
    return list(value)


def _scores(fields: Mapping[str, object]) -> dict[str, float]:
    numbers = {name: number_of(fields.get(name)) for name in SCORES}
    return {name: number for name, number in numbers.items() if number is not None}


READER = KoalaReader
