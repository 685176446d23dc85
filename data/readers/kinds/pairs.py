"""Folders of media beside captions: `a.mp4` with `a.txt` or `a.json`, as diffusion-pipe and musubi-tuner read them."""

from __future__ import annotations

from functools import cached_property

from data import media, storage
from data.captions import choose, decode_text, json_texts, parse_json, parse_policy, scores_of
from data.config import LimitsConfig, SourceConfig
from data.errors import DataError
from data.ledger import BadSample, Reason
from data.readers.catalogue import Catalogue
from data.readers.part import SCHEMA, Caption, IndexedSample, IndexPart, PartWriter
from data.storage import FileStat, read_range

SUFFIXES = media.MEDIA_SUFFIXES | {"txt", "json", "caption"}
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
        return {folder: Catalogue(folder, self.limits, frozenset(SUFFIXES)) for folder in folders}

    def parts(self) -> list[IndexPart]:
        return [IndexPart(folder, 0, 0, catalogue.fingerprint) for folder, catalogue in self.catalogues.items()]

    def score_names(self, part: IndexPart) -> list[str] | None:
        return None

    def read(self, part: IndexPart, writer: PartWriter) -> None:
        """Every media file is a sample."""
        catalogue, keys = self.catalogues[part.uri], set[str]()
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
                self._fill(catalogue, file, sample)
            except BadSample as fault:
                sample.refuse(fault)
            writer.add(sample)
        captioned = {name.rpartition(".")[0] for name in catalogue.files()}
        for name in catalogue.others:  # a file with a caption was meant to be trained
            stem, _, suffix = name.rpartition(".")
            if stem in captioned and stem not in keys:
                refused = IndexedSample(key=stem, path=storage.join(part.uri, name))
                writer.add(refused.refuse(BadSample(Reason.NOT_MEDIA, f"suffix {suffix!r}")))

    def _fill(self, catalogue: Catalogue, file: FileStat, sample: IndexedSample) -> None:
        sample.info = catalogue.probe(file)
        beside = catalogue.files().get(f"{sample.key}.json")
        about = self._json(beside) if beside else {}
        sample.scores = {name: value for name, value in scores_of(about).items() if name not in RESERVED}

        def find(name: str) -> list[str]:
            if name.startswith("json:"):
                return json_texts(about, name[5:])
            text = catalogue.files().get(f"{sample.key}.{name}")
            return [] if text is None else [decode_text(self._content(text, Reason.CAPTION_TOO_LARGE), self.limits)]

        for name, position, text in choose(self.policy, find):
            in_json = name.startswith("json:")
            holder = beside if in_json else catalogue.files()[f"{sample.key}.{name}"]
            assert holder is not None
            where = f"{name[5:]}#{position}" if in_json else ""
            sample.captions.append(Caption.of(text, 0, holder.size, where, holder.uri))
        if not sample.captions:
            raise BadSample(Reason.NO_CAPTION, f"no {sample.key}.txt with text")

    def _json(self, file: FileStat) -> dict[str, object]:
        return parse_json(self._content(file, Reason.BAD_JSON), self.limits)

    def _content(self, file: FileStat, reason: Reason) -> bytes:
        limit = self.limits.max_json_bytes if reason is Reason.BAD_JSON else self.limits.max_caption_bytes
        if file.size > limit:
            raise BadSample(reason, f"{file.size} bytes > {limit}")
        return read_range(file.uri, 0, file.size, self.limits.retries)


READER = PairsReader
