"""Media files of a folder by name, listed once: which of the rows of a table have a file.

Memory grows with the files that exist, not with the table: most of the 36 million rows of Koala-36M have none.
"""

from __future__ import annotations

import errno
import re
from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b

from data import media, storage
from data.config import LimitsConfig
from data.errors import DataError
from data.ledger import BadSample, Reason
from data.media_info import MediaInfo
from data.storage import FileStat, ReadFile

SCORED = re.compile(r"\d+\.\d+_(.+)")  # <VTSS>_<videoID>; a videoID holds no dot
PROBES_KEPT = 4096  # clips of one source video follow each other in the table
# a video that rows take parts of: 12 h at 60 fps, YouTube's longest; its header costs 120 MiB to read
MAX_SOURCE_FRAMES = 12 * 3600 * 60


class Catalogue:
    """Files under `root` with one of the `suffixes`."""

    def __init__(
        self,
        root: str,
        limits: LimitsConfig,
        suffixes: frozenset[str] = media.MEDIA_SUFFIXES,
        *,
        source_frames: int = MAX_SOURCE_FRAMES,
    ) -> None:
        """A video that rows take parts of may have `source_frames`."""
        self.root, self.limits, self._source_frames = root.rstrip("/") or "/", limits, source_frames
        digest = blake2b(digest_size=16)
        self._by_path: dict[str, FileStat] = {}
        self.others: list[str] = []  # files with another suffix, by path relative to the root
        named: list[tuple[bool, bool, str, FileStat]] = []
        listed = storage.list_files(root) if storage.is_folder(root) else []
        for file in listed:
            if media.suffix_of(file.uri) not in suffixes:
                self.others.append(file.uri[len(self.root) :].lstrip("/"))
                continue
            name = file.uri[len(self.root) :].lstrip("/")
            digest.update(f"{name}|{file.size}|{file.mtime_ns}\n".encode("utf-8", "backslashreplace"))
            self._by_path[name] = file
            stem = storage.name_of(file.uri).rpartition(".")[0]
            if media.suffix_of(file.uri) in media.MEDIA_SUFFIXES:
                image = media.suffix_of(file.uri) in media.IMAGE_SUFFIXES
                named.append((image, False, stem, file))
                if match := SCORED.fullmatch(stem):
                    named.append((image, True, match[1], file))
        self._by_stem: dict[str, FileStat] = {}
        # a video goes before its thumbnail, then an exact name before one with a score in front
        for _, _, stem, file in sorted(named, key=lambda entry: entry[:2]):
            self._by_stem.setdefault(stem, file)
        self.fingerprint = digest.hexdigest()
        self._probes: OrderedDict[tuple[str, bool], MediaInfo | BadSample] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_path)

    def files(self) -> dict[str, FileStat]:
        """The files by path relative to the root, in order."""
        return self._by_path

    def named(self, stem: str) -> FileStat | None:
        """The file `<stem>.<suffix>` or `<score>_<stem>.<suffix>`, in any folder below the root."""
        return self._by_stem.get(stem)

    def at(self, path: str) -> FileStat | None:
        """The file at a path relative to the root, or at an absolute path or URI. Raises BadSample for a text that is
        no path; storage that fails is a DataIOError all the same."""
        if path.startswith("./"):
            path = path[2:]
        try:
            return self._by_path.get(path) or storage.stat(storage.join(self.root, path), self.limits.retries)
        except (DataError, ValueError) as error:  # a scheme that nothing serves; a NUL or a lone surrogate
            raise BadSample(Reason.UNSAFE_NAME, str(error)) from error
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise BadSample(Reason.UNSAFE_NAME, f"a path of {len(path)} characters: {path[:80]!r}") from error

    def probe(self, file: FileStat, ranged: bool = False) -> MediaInfo:
        """Header of a whole file; the last ones are remembered. `ranged`: a row takes a part of it, so max_frames is
        left to `cut`. Raises BadSample."""
        known = self._probes.get((file.uri, ranged))
        if known is None:
            limits = self.limits
            if ranged:
                limits = replace(limits, max_frames=max(limits.max_frames, self._source_frames))
            try:
                with ReadFile(file.uri, limits.retries) as opened:
                    known = media.probe(opened, 0, opened.size, media.suffix_of(file.uri), limits)
            except BadSample as fault:
                known = fault
            except DataError as error:  # a name that is listed and cannot be opened
                known = BadSample(Reason.UNSAFE_NAME, str(error))
            self._probes[file.uri, ranged] = known
            if len(self._probes) > PROBES_KEPT:
                self._probes.popitem(last=False)
        if isinstance(known, BadSample):
            raise BadSample(known.reason, known.detail)
        return known


def cut(info: MediaInfo, start_s: float, end_s: float, limits: LimitsConfig) -> tuple[MediaInfo, float, float]:
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
    if count > limits.max_frames:
        raise BadSample(
            Reason.TOO_MANY_FRAMES, f"{count} frames in {start_s} .. {end_s} s > max_frames {limits.max_frames}"
        )
    return replace(info, num_frames=count, duration=count / info.fps), start_s, end_s


def _first_frame_at(second: float, fps: float) -> int:
    return max(-int(-(second * fps - 1e-6) // 1), 0)  # ceiling
