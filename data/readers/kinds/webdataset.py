"""WebDataset shards: tar members with one key are a sample. Reads headers and captions, never the pixels.

The key is the path up to the first dot of its last part, the rest is the extension, as in the webdataset library.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain

from data import media
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
from data.ledger import BadSample, Fault, Reason
from data.readers.part import SCHEMA, Caption, IndexedSample, IndexPart, PartWriter
from data.readers.tar import MemberKind, TarMember, read_members
from data.storage import ASKED_AT_ONCE, ReadFile, located, name_of, stat

KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
META = re.compile(r"__[^/]*__($|/)")
RESERVED = frozenset(SCHEMA.names)  # JSON fields that would repeat what the header says


@dataclass(slots=True)
class SampleGroup:
    """Adjacent members with one key."""

    key: str
    header: int
    parts: dict[str, TarMember] = field(default_factory=dict)
    again: bool = False  # the key was finished before

    def part(self, name: str) -> TarMember | None:
        """The member with extension `name`, or the only one whose last suffix it is (`clip.v2.txt`)."""
        if name in self.parts:
            return self.parts[name]
        found = [member for extension, member in self.parts.items() if extension.endswith("." + name)]
        return found[0] if len(found) == 1 else None


class WebDatasetReader:
    """Parts are shards."""

    def __init__(self, config: SourceConfig, limits: LimitsConfig) -> None:
        self.config, self.limits = config, limits
        self.policy = parse_policy(config.caption)
        self._texts = {"json", *chain.from_iterable(self.policy)}

    def parts(self) -> list[IndexPart]:
        found, listed = [], located(self.config.path, (".tar",))
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            infos = pool.map(lambda uri: listed[uri] or stat(uri, self.limits.retries), listed)
        for uri, info in zip(listed, infos, strict=True):
            if info is None:
                range_of = "" if uri == self.config.path else f" Check the range in {self.config.path}."
                raise DataError(f"{uri} does not exist: neither a shard nor a folder of them.{range_of}")
            found.append(IndexPart(uri, info.size, info.mtime_ns))
        return found

    def score_names(self, part: IndexPart) -> list[str] | None:
        return None

    def read(self, part: IndexPart, writer: PartWriter) -> None:
        """Every member ends in a sample or a note, whatever the bytes are."""
        with ReadFile(part.uri, self.limits.retries) as file:
            seen: set[str] = set()
            group: SampleGroup | None = None
            for item in read_members(file):
                if isinstance(item, Fault):
                    writer.fault(item)
                    continue
                match = self._sample_member(item, part, writer)
                if match is None:
                    continue
                key, extension = match
                if group is None or group.key != key:
                    if group is not None:
                        writer.add(self._sample(file, group, writer))
                    group = SampleGroup(key, item.header, again=key in seen)
                    seen.add(key)
                if extension in group.parts:
                    writer.fault(Fault(Reason.DUPLICATE_PART, part.uri, key, item.header, f"a second {extension}"))
                    continue
                group.parts[extension] = item
            if group is not None:
                writer.add(self._sample(file, group, writer))

    def _sample_member(self, member: TarMember, part: IndexPart, writer: PartWriter) -> tuple[str, str] | None:
        """(key, extension) of a member that belongs to a sample; others are noted."""
        if member.kind is MemberKind.FOLDER or META.match(member.name):
            return None
        if member.kind is not MemberKind.FILE:
            reason = Reason.LINK_MEMBER if member.kind is MemberKind.LINK else Reason.SPECIAL_MEMBER
            writer.fault(Fault(reason, part.uri, member.name, member.header, "not a file; ignored"))
            return None
        match = KEY.fullmatch(member.name)
        if match is None or name_of(member.name).startswith("."):  # as clips/._00000.mp4, which macOS adds
            writer.fault(Fault(Reason.NO_SUFFIX, part.uri, member.name, member.header, "a name without extension"))
            return None
        key, extension = match[1], match[2].lower()
        if extension.rpartition(".")[2] in media.PICKLE_SUFFIXES:
            writer.fault(Fault(Reason.PICKLE_MEMBER, part.uri, member.name, member.header, "never opened"))
        return key, extension

    def _sample(self, file: ReadFile, group: SampleGroup, writer: PartWriter) -> IndexedSample:
        sample = IndexedSample(key=group.key)
        try:
            self._fill(file, group, sample, writer)
        except BadSample as fault:
            sample.refuse(fault, group.header)
        return sample

    def _fill(self, file: ReadFile, group: SampleGroup, sample: IndexedSample, writer: PartWriter) -> None:
        unsafe = next((member for member in group.parts.values() if member.unsafe), None)
        if unsafe is not None:
            raise BadSample(Reason.UNSAFE_NAME, repr(unsafe.name), unsafe.header)
        if group.again:
            raise BadSample(Reason.SPLIT_KEY, "the key was used earlier in this shard", group.header)
        cut = next((extension for extension, member in group.parts.items() if member.truncated), None)
        if cut is not None:
            raise BadSample(Reason.TRUNCATED_MEMBER, f"{cut} runs past the end of the shard", group.parts[cut].header)
        member, sample.suffix = self._media(group)
        if member is not None:
            sample.offset, sample.size = member.offset, member.size
        about = self._json(file, group)
        if member is None:
            raise BadSample(Reason.NO_MEDIA, _status(about, group))
        sample.scores = {name: value for name, value in scores_of(about).items() if name not in RESERVED}
        sample.info = media.probe(file, member.offset, member.size, sample.suffix, self.limits)
        sample.captions = self._captions(file, group, about)
        if not sample.captions:
            texts = [name for name, part in group.parts.items() if part.size and holds_text(name)]
            hint = named_elsewhere(self.config.caption, texts, about)
            check_any(sample.captions, self.config, f"no text in {self.config.caption}", hint)
        others = (name for name, part in group.parts.items() if part is not member)
        writer.unread(name for name in others if name.rpartition(".")[2] not in self._texts)

    def _media(self, group: SampleGroup) -> tuple[TarMember | None, str]:
        """The one clip, else the one image of a sample. A video with a thumbnail is a video."""
        for suffixes in (media.VIDEO_SUFFIXES, media.IMAGE_SUFFIXES):
            exact = [extension for extension in group.parts if extension in suffixes]
            found = exact or [extension for extension in group.parts if extension.rpartition(".")[2] in suffixes]
            if len(found) > 1:
                raise BadSample(Reason.AMBIGUOUS_MEDIA, f"{', '.join(found)}: which one?")
            if found:
                return group.parts[found[0]], found[0].rpartition(".")[2]
        return None, ""

    def _json(self, file: ReadFile, group: SampleGroup) -> dict[str, object]:
        member = group.part("json")
        if member is None:
            return {}
        return parse_json(self._content(file, member, self.limits.max_json_bytes, Reason.BAD_JSON), self.limits)

    def _captions(self, file: ReadFile, group: SampleGroup, about: dict[str, object]) -> list[Caption]:
        def find(name: str) -> list[str]:
            if name.startswith("json:"):
                return json_texts(about, name[5:])
            member = group.part(name)
            if member is None:
                return []
            limit = self.limits.max_caption_bytes
            return [decode_text(self._content(file, member, limit, Reason.CAPTION_TOO_LARGE), self.limits)]

        captions = []
        for name, position, text in choose(self.policy, find):
            member = group.part("json" if name.startswith("json:") else name)
            assert member is not None
            if len(text) > self.limits.max_caption_bytes:
                raise BadSample(Reason.CAPTION_TOO_LARGE, f"{name}: {len(text)} characters")
            where = f"{name[5:]}#{position}" if name.startswith("json:") else ""
            captions.append(Caption.of(text, member.offset, member.size, where))
        return captions

    def _content(self, file: ReadFile, member: TarMember, limit: int, reason: Reason) -> bytes:
        if member.size > limit:
            raise BadSample(reason, f"{member.size} bytes > {limit}", member.header)
        return file.pread(member.offset, member.size)


def _status(about: dict[str, object], group: SampleGroup) -> str:
    """Why a sample has no media: what the downloader wrote, or the members it has."""
    if "status" in about:
        return f"{about['status']}: {about.get('error_message')}"[:200]
    return f"members {', '.join(sorted(group.parts)) or 'none'}"


READER = WebDatasetReader
