"""Media files of a folder by name, listed once: which of the rows of a table have a file.

Memory grows with the files that exist, not with the table: most of the 36 million rows of Koala-36M have none.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b

from data import media, storage
from data.config import LimitsConfig
from data.ledger import BadSample, Reason
from data.media_info import MediaInfo
from data.storage import FileStat, ReadFile

SCORED = re.compile(r"\d+\.\d+_(.+)")  # <VTSS>_<videoID>; a videoID holds no dot
PROBES_KEPT = 4096  # clips of one source video follow each other in the table


class Catalogue:
    """Files under `root` with a media or caption suffix."""

    def __init__(self, root: str, limits: LimitsConfig, suffixes: frozenset[str] = media.MEDIA_SUFFIXES) -> None:
        self.root, self.limits = root.rstrip("/") or "/", limits
        digest = blake2b(digest_size=16)
        self._by_path: dict[str, FileStat] = {}
        self._by_stem: dict[str, FileStat] = {}
        scored: dict[str, FileStat] = {}
        listed = storage.list_files(root) if storage.is_folder(root) else []
        for file in listed:
            if media.suffix_of(file.uri) not in suffixes:
                continue
            name = file.uri[len(self.root):].lstrip("/")
            digest.update(f"{name}|{file.size}|{file.mtime_ns}\n".encode("utf-8", "backslashreplace"))
            self._by_path[name] = file
            stem = storage.name_of(file.uri).rpartition(".")[0]
            if media.suffix_of(file.uri) in media.MEDIA_SUFFIXES:
                self._by_stem.setdefault(stem, file)
                if match := SCORED.fullmatch(stem):
                    scored.setdefault(match[1], file)
        self._by_stem = scored | self._by_stem  # an exact name goes before one with a score in front
        self.fingerprint = digest.hexdigest()
        self._probes: OrderedDict[str, MediaInfo | BadSample] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_path)

    def files(self) -> dict[str, FileStat]:
        """By path relative to the root, in order."""
        return self._by_path

    def named(self, stem: str) -> FileStat | None:
        """The file `<stem>.<suffix>` or `<score>_<stem>.<suffix>`, in any folder below the root."""
        return self._by_stem.get(stem)

    def at(self, path: str) -> FileStat | None:
        """The file at a path relative to the root, or at an absolute path or URI."""
        if path.startswith("./"):
            path = path[2:]
        return self._by_path.get(path) or storage.stat(storage.join(self.root, path), self.limits.retries)

    def probe(self, file: FileStat) -> MediaInfo:
        """Header of a whole file; the last ones are remembered. Raises BadSample."""
        known = self._probes.get(file.uri)
        if known is None:
            try:
                with ReadFile(file.uri, self.limits.retries) as opened:
                    known = media.probe(opened, 0, opened.size, media.suffix_of(file.uri), self.limits)
            except BadSample as fault:
                known = fault
            self._probes[file.uri] = known
            if len(self._probes) > PROBES_KEPT:
                self._probes.popitem(last=False)
        if isinstance(known, BadSample):
            raise BadSample(known.reason, known.detail)
        return known


def cut(info: MediaInfo, start_s: float, end_s: float) -> tuple[MediaInfo, float, float]:
    """Header of the part [start_s, end_s) of a video, and the range clipped to the video. Raises BadSample."""
    if info.image:
        raise BadSample(Reason.BAD_TIMESTAMP, "a time range in a still image")
    if not 0 <= start_s < end_s:
        raise BadSample(Reason.BAD_TIMESTAMP, f"range {start_s} .. {end_s} s is empty")
    if start_s >= info.duration:
        raise BadSample(Reason.RANGE_OUTSIDE_VIDEO, f"starts at {start_s} s of {info.duration:.3f} s")
    end_s = min(end_s, info.duration)
    first, last = (_first_frame_at(second, info.fps) for second in (start_s, end_s))
    count = min(last, info.num_frames) - first
    if count < 1:
        raise BadSample(Reason.RANGE_OUTSIDE_VIDEO, f"no frame in {start_s} .. {end_s} s")
    return replace(info, num_frames=count, duration=count / info.fps), start_s, end_s


def _first_frame_at(second: float, fps: float) -> int:
    return max(-int(-(second * fps - 1e-6) // 1), 0)  # ceiling
