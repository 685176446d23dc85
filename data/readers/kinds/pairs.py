"""Folders of media beside captions: `a.mp4` with `a.txt` or `a.json`, as diffusion-pipe and musubi-tuner read them, or
with a file of another suffix that the caption setting names.
"""

from __future__ import annotations

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
from data.readers.catalogue import Catalogue
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

    @cached_property
    def catalogues(self) -> dict[str, Catalogue]:
        folders = self.config.path.split("::")
        absent = [folder for folder in folders if not storage.is_folder(folder)]
        if absent:
            raise DataError(f"folder {absent[0]} does not exist. Check data.sources path {self.config.path}.")
        named = {name for offer in self.policy for name in offer if not name.startswith("json:")}
        return {folder: Catalogue(folder, self.limits, frozenset(SUFFIXES | named)) for folder in folders}

    @cached_property
    def _tables(self) -> str:
        """Names of tables among the clips, which hold captions by all signs."""
        others = (name for catalogue in self.catalogues.values() for name in catalogue.others)
        found = next((name for name in others if name.endswith(TABLE_SUFFIXES)), None)
        return f"; a table ({found}) is given as the source itself, not by its folder" if found else ""

    def parts(self) -> list[IndexPart]:
        return [IndexPart(folder, 0, 0, catalogue.fingerprint) for folder, catalogue in self.catalogues.items()]

    def score_names(self, part: IndexPart) -> list[str] | None:
        return None

    def read(self, part: IndexPart, writer: PartWriter) -> None:
        """Every media file is a sample."""
        catalogue, keys = self.catalogues[part.uri], set[str]()
        beside: dict[str, dict[str, FileStat]] = {}  # captions of a key, by their suffix
        for name, file in catalogue.files().items():
            if media.suffix_of(name) not in media.MEDIA_SUFFIXES:
                beside.setdefault(name.rpartition(".")[0], {})[media.suffix_of(name)] = file
        unread: dict[str, list[str]] = {}
        for stem, _, suffix in (name.rpartition(".") for name in catalogue.others):
            if holds_text(suffix):
                unread.setdefault(stem, []).append(suffix)
        for name, file in catalogue.files().items():
            if media.suffix_of(name) not in media.MEDIA_SUFFIXES:
                continue
            sample = IndexedSample(
                key=name.rpartition(".")[0],
                path=file.uri,
                size=file.size,
                mtime_ns=file.mtime_ns,
                suffix=media.suffix_of(name),
            )
            keys.add(sample.key)
            try:
                sample.info = catalogue.probe(file)
                self._fill(beside.get(sample.key, {}), sample, unread.get(sample.key, []))
            except BadSample as fault:
                sample.refuse(fault)
            writer.add(sample)
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

    def _fill(self, beside: dict[str, FileStat], sample: IndexedSample, unread: list[str]) -> None:
        """`unread`: suffixes of texts beside the clip that the caption setting does not name."""
        about = self._json(beside["json"]) if "json" in beside else {}
        sample.scores = {name: value for name, value in scores_of(about).items() if name not in RESERVED}

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
        if not sample.captions:
            hint = named_elsewhere(self.config.caption, unread, about)
            check_any([], self.config, f"no text in {self.config.caption} or caption beside it{self._tables}", hint)

    def _json(self, file: FileStat) -> dict[str, object]:
        return parse_json(self._content(file, Reason.BAD_JSON), self.limits)

    def _content(self, file: FileStat, reason: Reason) -> bytes:
        limit = self.limits.max_json_bytes if reason is Reason.BAD_JSON else self.limits.max_caption_bytes
        if file.size > limit:
            raise BadSample(reason, f"{file.size} bytes > {limit}")
        return read_range(file.uri, 0, file.size, self.limits.retries)


READER = PairsReader
