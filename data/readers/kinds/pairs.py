"""Folders of media beside captions: `a.mp4` with `a.txt` or `a.json`, as diffusion-pipe and musubi-tuner read them, or
with a file of another suffix that the caption setting names; `a.mp4.txt` where none of these has a text, and first
where several media are called `a`. A picture beside a video of its name is its thumbnail, unless it has a caption of
its own, `a.jpg.txt`, which is then its only one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import dataclass
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
from data.readers.catalogue import Catalogue, composed
from data.readers.kinds.manifest import numbered
from data.readers.part import SCHEMA, Caption, IndexedSample, IndexPart, PartWriter
from data.readers.tables import TABLE_SUFFIXES
from data.storage import FileStat, read_range

CAPTION_SUFFIXES = ("txt", "caption")
SUFFIXES = media.MEDIA_SUFFIXES | {*CAPTION_SUFFIXES, "json"}
RESERVED = frozenset(SCHEMA.names)
OWN_FIRST = "|by video, own captions first"  # of the fingerprint of a folder

Beside = Mapping[str, Mapping[str, FileStat]]  # captions by the name before their last suffix, then by that


@dataclass(frozen=True, kw_only=True, slots=True)
class _Medium:
    """A clip or picture of a folder."""

    name: str
    file: FileStat
    key: str | None  # None: a thumbnail, which is no sample
    texts: tuple[str, ...]  # what its captions are called before their suffix, those that count first in front


class PairsReader:
    """Parts are folders."""

    def __init__(self, config: SourceConfig, limits: LimitsConfig) -> None:
        self.config, self.limits = config, limits
        self.policy = parse_policy(config.caption)

    @cached_property
    def _captions(self) -> frozenset[str]:
        """Suffixes of files that are captions by their name alone."""
        named = (name for offer in self.policy for name in offer if not name.startswith("json:"))
        return frozenset((*CAPTION_SUFFIXES, *named))

    @cached_property
    def catalogues(self) -> dict[str, Catalogue]:
        folders = self.config.path.split("::")
        absent = [folder for folder in folders if not storage.is_folder(folder)]
        if absent:
            raise DataError(f"folder {absent[0]} does not exist. Check data.sources path {self.config.path}.")
        return {folder: Catalogue(folder, self.limits, SUFFIXES | self._captions) for folder in folders}

    @cached_property
    def _tables(self) -> str:
        """A hint at a table among the clips, which holds captions by all signs; "" without one."""
        others = (name for catalogue in self.catalogues.values() for name in catalogue.others)
        found = next((name for name in others if name.endswith(TABLE_SUFFIXES)), None)
        return f"; a table ({found}) is given as the source itself, not by its folder" if found else ""

    def parts(self) -> list[IndexPart]:
        return [
            IndexPart(folder, 0, 0, catalogue.fingerprint + _ambiguous(catalogue, self._captions))
            for folder, catalogue in self.catalogues.items()
        ]

    def score_names(self, part: IndexPart) -> list[str] | None:
        return None

    def read(self, part: IndexPart, writer: PartWriter) -> None:
        """Every media file is a sample, but for thumbnails: pictures without a caption of their own, beside a video."""
        catalogue = self.catalogues[part.uri]
        beside, unread = _beside(catalogue), _unread(catalogue)
        found = _media(catalogue, self._with_own(catalogue, beside, part.uri))

        def begin(one: _Medium, pool: Executor) -> Future[IndexedSample] | None:
            return None if one.key is None else pool.submit(self._filled, catalogue, one, beside, unread)

        with closing(in_order(found, begin, part.uri)) as samples:
            for one, sample in samples:
                if sample is None:
                    writer.unread([media.suffix_of(one.name)])
                else:
                    writer.add(sample.result())
        called = {name for one in found for name in (_stem(one.name), one.name)}
        for name in catalogue.others:  # a file with a caption was meant to be trained
            stem, _, suffix = name.rpartition(".")
            own = not self._captions.isdisjoint(beside.get(name, ()))  # a JSON is written beside every file by some
            meant = [key for key, has in ((stem, stem in beside), (name, own)) if has and key not in called]
            if meant:
                called.update(meant)
                refused = IndexedSample(key=stem, path=storage.join(part.uri, name))
                writer.add(refused.refuse(BadSample(Reason.NOT_MEDIA, f"suffix {suffix!r}")))
        for key, files in beside.items():  # its clip is gone, or a link to one that is
            if key not in called and not files.keys().isdisjoint(CAPTION_SUFFIXES):
                refused = IndexedSample(key=key, path=next(iter(files.values())).uri)
                writer.add(refused.refuse(BadSample(Reason.NO_MEDIA, f"no clip or picture beside {', '.join(files)}")))

    def _with_own(self, catalogue: Catalogue, beside: Beside, uri: str) -> set[str]:
        """Names of media with a caption that is called by their whole name: a file, or in a JSON, which is read where
        it decides, of a picture beside a video."""
        own = {name for name in catalogue.files() if not self._captions.isdisjoint(beside.get(name, ()))}
        shown = _videos(catalogue)
        told = ((name, files["json"]) for name, files in beside.items() if "json" in files and name not in own)
        asked = ((name, file) for name, file in told if name in catalogue.files() and _shows_video(name, shown))

        def begin(one: tuple[str, FileStat], pool: Executor) -> Future[bool]:
            return pool.submit(self._has_caption, one[1])

        with closing(in_order(asked, begin, uri)) as answers:
            return own | {name for (name, _), answer in answers if answer is not None and answer.result()}

    def _has_caption(self, file: FileStat) -> bool:
        """Whether a JSON has a caption. One that cannot be read says it has, so that its sample is refused by name."""
        sample = IndexedSample(key="")
        try:
            self._take({"json": file}, sample)
        except BadSample:
            return True
        return bool(sample.captions)

    def _filled(
        self, catalogue: Catalogue, one: _Medium, beside: Beside, unread: Mapping[str, list[str]]
    ) -> IndexedSample:
        """A sample with its header and captions, or refused. `unread`: suffixes of texts that the caption setting does
        not name, as `beside`."""
        assert one.key is not None, f"{one.name} is a thumbnail"
        sample = IndexedSample(
            key=one.key,
            path=one.file.uri,
            size=one.file.size,
            mtime_ns=one.file.mtime_ns,
            suffix=media.suffix_of(one.name),
        )
        try:
            found = catalogue.header(sample.path)
            if isinstance(found, BadSample):
                raise found
            sample.info = found
            about: dict[str, object] = {}
            for name in one.texts:
                about = self._take(beside.get(name, {}), sample) | about
                if sample.captions:
                    return sample
            others = [suffix for name in one.texts for suffix in unread.get(name, ())]
            hint = named_elsewhere(self.config.caption, others, about)
            check_any([], self.config, f"no text in {self.config.caption} or caption beside it{self._tables}", hint)
        except BadSample as fault:
            sample.refuse(fault)
        return sample

    def _take(self, beside: Mapping[str, FileStat], sample: IndexedSample) -> dict[str, object]:
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


def _beside(catalogue: Catalogue) -> Beside:
    """The captions of a folder. Those that no clip has exactly the name of are beside the clip that is called so when
    composed, if that has none of its own."""
    beside: dict[str, dict[str, FileStat]] = {}
    for name, file in catalogue.files().items():
        if media.suffix_of(name) not in media.MEDIA_SUFFIXES:
            beside.setdefault(_stem(name), {})[media.suffix_of(name)] = file
    if not catalogue.in_parts or all(map(str.isascii, beside)):
        return beside
    clips = [name for name in catalogue.files() if media.suffix_of(name) in media.MEDIA_SUFFIXES]
    called = dict.fromkeys((*map(_stem, clips), *clips))
    clip_of = {composed(name): name for name in reversed(called)}
    for name in [name for name in beside if name not in called]:
        clip = clip_of.get(composed(name))
        if clip is not None and clip not in beside:
            beside[clip] = beside.pop(name)
    return beside


def _unread(catalogue: Catalogue) -> Mapping[str, list[str]]:
    unread: dict[str, list[str]] = {}
    for stem, _, suffix in (name.rpartition(".") for name in catalogue.others):
        if holds_text(suffix):
            unread.setdefault(stem, []).append(suffix)
    return unread


def _videos(catalogue: Catalogue) -> set[str]:
    """Names of videos, with their suffix and without: pictures that are called so show one."""
    names = [name for name in catalogue.files() if media.suffix_of(name) in media.VIDEO_SUFFIXES]
    return {*names, *map(_stem, names)}


def _shows_video(name: str, videos: Collection[str]) -> bool:
    return media.suffix_of(name) in media.IMAGE_SUFFIXES and _stem(name) in videos


def _media(catalogue: Catalogue, own: Collection[str]) -> list[_Medium]:
    """The clips and pictures of a folder in order: which are samples, by which keys, with whose captions. `own`: names
    of those with a caption that is called by their whole name."""
    files = {name: file for name, file in catalogue.files().items() if media.suffix_of(name) in media.MEDIA_SUFFIXES}
    videos, stems = _videos(catalogue), {*map(_stem, files)}
    pictures = {name for name in files if _shows_video(name, videos)}
    thumbnails = {name for name in pictures if name not in own}
    shared = Counter(_stem(name) for name in files if name not in thumbnails)
    numbers: dict[str, int] = {}

    def key_of(stem: str) -> str:
        key = numbered(stem, numbers)
        while key != stem and key in stems:  # a file is called so
            key = numbered(stem, numbers)
        return key

    def texts_of(name: str) -> tuple[str, ...]:
        stem = _stem(name)
        if name in pictures:
            return (name,)  # the others are of the video
        return (name, stem) if shared[stem] > 1 or stem in files else (stem, name)

    return [
        _Medium(name=name, file=file, key=None if name in thumbnails else key_of(_stem(name)), texts=texts_of(name))
        for name, file in files.items()
    ]


def _ambiguous(catalogue: Catalogue, captions: frozenset[str]) -> str:
    """Not empty for a folder with several media of a name, or with captions that a whole name may give: they were read
    otherwise once, and are read again. `captions`: suffixes of files that are captions. Reads none of them: those who
    open an index do not wait for that."""
    clips, texts = list[str](), set[str]()
    for name in catalogue.files():
        if media.suffix_of(name) in media.MEDIA_SUFFIXES:
            clips.append(name)
        else:
            texts.add(_stem(name))
    stems = {*map(_stem, clips)}
    if len(stems) < len(clips) or not stems.isdisjoint(clips):
        return OWN_FIRST
    if texts.isdisjoint(clips) and not catalogue.in_parts:
        return ""  # as nearly all are, in half the time
    beside = _beside(catalogue)

    def is_decided(name: str) -> bool:
        of_stem, of_name = beside.get(_stem(name), {}).keys(), beside.get(name, {}).keys()
        return not of_name or (captions.isdisjoint(of_name) and not captions.isdisjoint(of_stem))

    return "" if all(map(is_decided, clips)) else OWN_FIRST


READER = PairsReader
