"""Folders of media beside captions: `a.mp4` with `a.txt` or `a.json`, as diffusion-pipe and musubi-tuner read them, or
with a file of another suffix that the caption setting names; `a.mp4.txt` where none of these has a text. A picture
beside a video of its name is its thumbnail, unless it has a caption of its own, `a.jpg.txt`.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from contextlib import closing
from functools import cached_property

from data import media, storage
from data.captions import (
    check_any,
    choose,
    decode_text,
    holds_text,
    json_texts,
    named_elsewhere,
    parse_json,
    parse_policy,
    scores_of,
)
from data.config import LimitsConfig, SourceConfig
from data.errors import DataError
from data.ledger import BadSample, Reason
from data.readers.ahead import in_order
from data.readers.catalogue import Catalogue
from data.readers.kinds.manifest import numbered
from data.readers.part import SCHEMA, Caption, IndexedSample, IndexPart, PartWriter
from data.readers.tables import TABLE_SUFFIXES
from data.storage import FileStat, read_range

CAPTION_SUFFIXES = ("txt", "caption")
SUFFIXES = media.MEDIA_SUFFIXES | {*CAPTION_SUFFIXES, "json"}
RESERVED = frozenset(SCHEMA.names)


class PairsReader:
    """Parts are folders."""

    def __init__(self, config: SourceConfig, limits: LimitsConfig) -> None:
        self.config, self.limits = config, limits
        self.policy = parse_policy(config.caption)

    @property
    def _named(self) -> set[str]:
        """Suffixes of captions that the setting names."""
        return {name for offer in self.policy for name in offer if not name.startswith("json:")}

    @cached_property
    def catalogues(self) -> dict[str, Catalogue]:
        folders = self.config.path.split("::")
        absent = [folder for folder in folders if not storage.is_folder(folder)]
        if absent:
            raise DataError(f"folder {absent[0]} does not exist. Check data.sources path {self.config.path}.")
        return {folder: Catalogue(folder, self.limits, frozenset(SUFFIXES | self._named)) for folder in folders}

    @cached_property
    def _tables(self) -> str:
        """Names of tables among the clips, which hold captions by all signs."""
        others = (name for catalogue in self.catalogues.values() for name in catalogue.others)
        found = next((name for name in others if name.endswith(TABLE_SUFFIXES)), None)
        return f"; a table ({found}) is given as the source itself, not by its folder" if found else ""

    def parts(self) -> list[IndexPart]:
        return [
            IndexPart(folder, 0, 0, catalogue.fingerprint + _ambiguous(catalogue, self._named))
            for folder, catalogue in self.catalogues.items()
        ]

    def score_names(self, part: IndexPart) -> list[str] | None:
        return None

    def read(self, part: IndexPart, writer: PartWriter) -> None:
        """Every media file is a sample, but for thumbnails: pictures without a caption of their own, beside a video."""
        catalogue, keys, numbers = self.catalogues[part.uri], set[str](), dict[str, int]()
        beside: dict[str, dict[str, FileStat]] = {}  # captions of a key, by their suffix
        for name, file in catalogue.files().items():
            if media.suffix_of(name) not in media.MEDIA_SUFFIXES:
                beside.setdefault(_stem(name), {})[media.suffix_of(name)] = file
        unread: dict[str, list[str]] = {}
        for stem, _, suffix in (name.rpartition(".") for name in catalogue.others):
            if holds_text(suffix):
                unread.setdefault(stem, []).append(suffix)
        videos, stems = _videos(catalogue), _stems(catalogue)

        def key_of(stem: str) -> str:
            key = numbered(stem, numbers)
            while key != stem and key in stems:  # a file is called so
                key = numbered(stem, numbers)
            return key

        def begin(named: tuple[str, FileStat], pool: Executor) -> Future[IndexedSample] | None:
            name, file = named
            stem, suffix = _stem(name), media.suffix_of(name)
            if suffix not in media.MEDIA_SUFFIXES:
                return None
            keys.update((stem, name))
            if suffix in media.IMAGE_SUFFIXES and stem in videos and name not in beside:
                writer.unread([suffix])
                return None
            sample = IndexedSample(
                key=key_of(stem),
                path=file.uri,
                size=file.size,
                mtime_ns=file.mtime_ns,
                suffix=suffix,
            )
            texts = [beside.get(stem, {}), *([beside[name]] if name in beside else [])]
            others = [*unread.get(stem, []), *unread.get(name, [])]
            return pool.submit(self._filled, catalogue, sample, texts, others)

        with closing(in_order(catalogue.files().items(), begin, part.uri)) as samples:
            for _, sample in samples:
                if sample is not None:
                    writer.add(sample.result())
        for name in catalogue.others:  # a file with a caption was meant to be trained
            stem, _, suffix = name.rpartition(".")
            if stem in beside and stem not in keys:
                keys.add(stem)
                refused = IndexedSample(key=stem, path=storage.join(part.uri, name))
                writer.add(refused.refuse(BadSample(Reason.NOT_MEDIA, f"suffix {suffix!r}")))
        for key, files in beside.items():  # its clip is gone, or a link to one that is
            if key not in keys and not files.keys().isdisjoint(CAPTION_SUFFIXES):
                refused = IndexedSample(key=key, path=next(iter(files.values())).uri)
                writer.add(refused.refuse(BadSample(Reason.NO_MEDIA, f"no clip or picture beside {', '.join(files)}")))

    def _filled(
        self, catalogue: Catalogue, sample: IndexedSample, texts: list[dict[str, FileStat]], unread: list[str]
    ) -> IndexedSample:
        """A sample with its header and captions, or refused. `texts`: files beside the clip by suffix, those of its
        name without its suffix first; `unread`: suffixes of others that the caption setting does not name."""
        try:
            found = catalogue.header(sample.path)
            if isinstance(found, BadSample):
                raise found
            sample.info = found
            about: dict[str, object] = {}
            for beside in texts:
                about = self._take(beside, sample) | about
                if sample.captions:
                    return sample
            hint = named_elsewhere(self.config.caption, unread, about)
            check_any([], self.config, f"no text in {self.config.caption} or caption beside it{self._tables}", hint)
        except BadSample as fault:
            sample.refuse(fault)
        return sample

    def _take(self, beside: dict[str, FileStat], sample: IndexedSample) -> dict[str, object]:
        """Give a sample the captions and scores of these files. Returns the JSON among them."""
        about = self._json(beside["json"]) if "json" in beside else {}
        numbers = {name: value for name, value in scores_of(about).items() if name not in RESERVED}
        sample.scores = numbers | dict(sample.scores)

        def find(name: str) -> list[str]:
            if name.startswith("json:"):
                return json_texts(about, name[5:])
            if name not in beside:
                return []
            return [decode_text(self._content(beside[name], Reason.CAPTION_TOO_LARGE), self.limits)]

        for name, position, text in choose(self.policy, find) or choose((("caption",),), find):
            in_json = name.startswith("json:")
            holder = beside["json" if in_json else name]
            where = f"{name[5:]}#{position}" if in_json else ""
            sample.captions.append(Caption.of(text, 0, holder.size, where, holder.uri))
        return about

    def _json(self, file: FileStat) -> dict[str, object]:
        return parse_json(self._content(file, Reason.BAD_JSON), self.limits)

    def _content(self, file: FileStat, reason: Reason) -> bytes:
        limit = self.limits.max_json_bytes if reason is Reason.BAD_JSON else self.limits.max_caption_bytes
        if file.size > limit:
            raise BadSample(reason, f"{file.size} bytes > {limit}")
        return read_range(file.uri, 0, file.size, self.limits.retries)


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _videos(catalogue: Catalogue) -> set[str]:
    """Names of videos, with their suffix and without: pictures that are called so show one."""
    names = [name for name in catalogue.files() if media.suffix_of(name) in media.VIDEO_SUFFIXES]
    return {*names, *map(_stem, names)}


def _stems(catalogue: Catalogue) -> set[str]:
    return {_stem(name) for name in catalogue.files() if media.suffix_of(name) in media.MEDIA_SUFFIXES}


def _ambiguous(catalogue: Catalogue, named: set[str]) -> str:
    """Not empty for a folder with several media of a name, or with captions that a whole name gives: they were read
    otherwise once, and are read again. `named`: suffixes that the caption setting names."""
    names = {name for name in catalogue.files() if media.suffix_of(name) in media.MEDIA_SUFFIXES}
    texts: dict[str, set[str]] = {}
    for name in catalogue.files().keys() - names:
        texts.setdefault(_stem(name), set()).add(media.suffix_of(name))
    stems, captions = _stems(catalogue), {*CAPTION_SUFFIXES, *named}
    told = texts.keys() & names
    given = any(_stem(name) not in texts or not texts[name].isdisjoint(captions) for name in told)
    return "|by video and whole name" if given or len(stems) < len(names) or stems & names else ""


READER = PairsReader
