"""Media files of a folder by name, listed once: which of the rows of a table have a file.

Memory grows with the files that exist, not with the table: most of the 36 million rows of Koala-36M have none.
"""

from __future__ import annotations

import errno
import logging
import re
import unicodedata
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from hashlib import blake2b
from typing import TypeVar

from data import media, storage
from data.config import LimitsConfig
from data.errors import DataError, DataIOError, DataUnreachable
from data.ledger import BadSample, Reason
from data.media_info import MediaInfo
from data.storage import FileStat, ReadFile

log = logging.getLogger(__name__)

Key = TypeVar("Key")
Found = TypeVar("Found")

SCORED = re.compile(r"\d+\.\d+_(.+)")  # <VTSS>_<videoID>; a videoID holds no dot
PROBES_KEPT = 4096  # clips of one source video follow each other in the table
# a video that rows take parts of: 12 h at 60 fps, YouTube's longest; its header costs 120 MiB to read
MAX_SOURCE_FRAMES = 12 * 3600 * 60
MOST_OUTSIDE = 1024  # folders beside a table's own that are listed at each start
ADDRESSES = ("pipe:", "http:", "https:")  # a command, and what is not fetched, in place of a path
FEW_OF, FEW_FILES = 100, 10_000  # a table names few files of a folder that has more than 10,000 and 100 for each
OUTSIDE_UNSEEN = (
    "files in %s are named by path: whether they change is not seen. "
    "Give the folder above them in data.sources media, or delete the index when they have."
)
OUTSIDE_REFUSED = (
    "files in %s, which storage refuses to list, are named by path: whether they change is not seen. "
    "Let this machine list it, or delete the index when they have."
)


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
        self._path_in_parts, self._stem_in_parts = _in_parts(self._by_path), _in_parts(self._by_stem)
        # parts that were indexed before names in parts were matched have no mark, and are read again
        self.fingerprint = digest.hexdigest() + ("|in parts" if self.in_parts else "")
        # number of media in folders outside of the root, and their digest; None where storage refuses to list them
        self._outside: dict[str, tuple[int, str] | None] = {}
        self._named: Counter[str] = Counter()  # how many files of such a folder were asked for
        self._stats: OrderedDict[str, Future[FileStat | None]] = OrderedDict()  # of files that no listing has
        self._probes: OrderedDict[tuple[str, bool], Future[MediaInfo | BadSample]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_path)

    @property
    def in_parts(self) -> bool:
        """Whether a file has a name that is not composed."""
        return bool(self._path_in_parts)

    def files(self) -> dict[str, FileStat]:
        """The files by path relative to the root, in order."""
        return self._by_path

    def named(self, stem: str) -> FileStat | None:
        """The file `<stem>.<suffix>` or `<score>_<stem>.<suffix>`, in any folder below the root."""
        return _look_up(stem, self._by_stem, self._stem_in_parts)

    def _listed(self, path: str) -> FileStat | None:
        if path.isascii():
            return self._by_path.get(path)
        return _look_up(path.removeprefix(f"{self.root}/"), self._by_path, self._path_in_parts)

    def foresee(self, file: FileStat | str, ranged: bool, pool: Executor) -> Future[MediaInfo | BadSample] | None:
        """Begins to look at what a row will ask `at` for (a path) and `probe`, which then wait for that. None: it is
        known, or `at` refuses the path."""
        if isinstance(file, str) and not _may_name(file, self.root):
            return None
        found = self._listed(_relative(file)) if isinstance(file, str) else file
        try:
            uri = storage.join(self.root, _relative(file)) if isinstance(file, str) else file.uri
            if found is None and uri not in self._stats:
                if _is_outside(uri, self.root):
                    self._list_outside(uri)
                _keep(self._stats, uri, pool.submit(storage.stat, uri, self.limits.retries))
        except (DataError, ValueError):
            return None
        uri = uri if found is None else found.uri
        if (uri, ranged) in self._probes:
            return None
        stat = self._stats.get(uri) if found is None else None
        return _keep(self._probes, (uri, ranged), pool.submit(self._header_if_there, uri, ranged, stat))

    def _header_if_there(self, uri: str, ranged: bool, stat: Future[FileStat | None] | None) -> MediaInfo | BadSample:
        """The header, once `stat` says that there is a file: many rows of a table have none. Its pool has begun `stat`
        before."""
        if stat is not None and stat.result() is None:
            return BadSample(Reason.NO_MEDIA, "no such file")
        return self.header(uri, ranged)

    def at(self, path: str) -> FileStat | None:
        """The file at a path relative to the root, or at an absolute path or URI. Raises BadSample for a text that is
        no path, or one that may not be asked for; storage that fails is a DataIOError all the same."""
        if not _may_name(path, self.root):
            raise BadSample(Reason.UNSAFE_NAME, repr(path[:200]))
        path = _relative(path)
        try:
            if (found := self._listed(path)) is not None:
                return found
            uri = storage.join(self.root, path)
            if _is_outside(uri, self.root):
                self._note_outside(uri)
            ahead = self._stats.get(uri)
            return storage.stat(uri, self.limits.retries) if ahead is None else ahead.result()
        except (DataError, ValueError) as error:  # a scheme that nothing serves; a NUL or a lone surrogate
            raise BadSample(Reason.UNSAFE_NAME, str(error)) from error
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise BadSample(Reason.UNSAFE_NAME, f"a path of {len(path)} characters: {path[:80]!r}") from error

    def _note_outside(self, uri: str) -> None:
        folder = storage.parent(uri)
        if folder in self._named or len(self._named) <= MOST_OUTSIDE:  # one more says that they are too many
            self._named[folder] += 1
        self._list_outside(uri)

    def _list_outside(self, uri: str) -> None:
        """Lists the folder of a file before any of it is read: what changes meanwhile is seen at the next start."""
        folder = storage.parent(uri)
        if folder not in self._outside and len(self._outside) < MOST_OUTSIDE:
            files = _list(folder)
            self._outside[folder] = None if files is None else (len(files), _digest(files))

    def outside(self) -> dict[str, str]:
        """What was in the folders outside of the root that `at` was asked about since the last call, as `listing` says.
        Folders of which few files are asked for, or that are too many, are left out: each start lists them again. So
        are those that storage refuses to list: the rows themselves may be read all the same."""
        listed, named, self._outside, self._named = self._outside, self._named, {}, Counter()
        if len(named) > MOST_OUTSIDE:
            log.warning(OUTSIDE_UNSEEN, f"more than {MOST_OUTSIDE} folders, such as {next(iter(named))},")
            return {}
        refused = [folder for folder, found in listed.items() if found is None]
        if refused:
            log.warning(OUTSIDE_REFUSED, refused[0])
        told = {}
        for folder, found in listed.items():
            if found is None:
                continue
            number, digest = found
            if number > FEW_OF * named[folder] + FEW_FILES:
                log.warning(OUTSIDE_UNSEEN, f"{folder}, which has {number} of them,")
            else:
                told[folder] = digest
        return told

    def probe(self, file: FileStat, ranged: bool = False) -> MediaInfo:
        """Header of a whole file; the last ones are remembered. `ranged`: a row takes a part of it, so max_frames is
        left to `cut`. Raises BadSample."""
        ahead = self._probes.get((file.uri, ranged))
        if ahead is None:
            ahead = _keep(self._probes, (file.uri, ranged), Future())
            ahead.set_result(self.header(file.uri, ranged))
        known = ahead.result()
        if isinstance(known, BadSample):
            raise BadSample(known.reason, known.detail)
        return known

    def header(self, uri: str, ranged: bool = False) -> MediaInfo | BadSample:
        """As `probe`, of any file; nothing is remembered. Several threads may call it."""
        limits = self.limits
        if ranged:
            limits = replace(limits, max_frames=max(limits.max_frames, self._source_frames))
        try:
            with ReadFile(uri, limits.retries) as opened:
                return media.probe(opened, 0, opened.size, media.suffix_of(uri), limits)
        except BadSample as fault:
            return fault
        except DataError as error:  # a name that is listed and cannot be opened
            return BadSample(Reason.UNSAFE_NAME, str(error))


def _may_name(path: str, root: str) -> bool:
    """Whether the text of a row is a path that may be looked at, on this machine or in storage."""
    return not path.startswith(ADDRESSES) and not storage.tells_service(_relative(path), root)


def composed(name: str) -> str:
    """A name with each letter as one sign. File systems of a Mac have an accented one in two, as no other system writes
    it: names that look alike are no longer equal once such files are copied."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def _in_parts(files: Mapping[str, FileStat]) -> dict[str, FileStat]:
    """The files whose names are not composed, by what these are then: the first of each."""
    found: dict[str, FileStat] = {}
    for name, file in files.items():
        if (whole := composed(name)) != name:
            found.setdefault(whole, file)
    return found


def _look_up(name: str, files: Mapping[str, FileStat], in_parts: Mapping[str, FileStat]) -> FileStat | None:
    """The file of exactly this name, else of one that is the same when composed."""
    found = files.get(name)
    if found is not None or name.isascii():
        return found
    whole = composed(name)
    return files.get(whole, in_parts.get(whole))


def _relative(path: str) -> str:
    return path[2:] if path.startswith("./") else path


def _keep(kept: OrderedDict[Key, Future[Found]], key: Key, future: Future[Found]) -> Future[Found]:
    kept[key] = future
    if len(kept) > PROBES_KEPT:
        kept.popitem(last=False)
    return future


def listing(folder: str) -> str:
    """A digest of the media files directly in a folder, of their sizes and times; empty where none are seen: this
    machine may lack the mount or the rights that they need."""
    files = _list(folder)
    return _digest(files) if files else ""


def _list(folder: str) -> list[FileStat] | None:
    """None: storage refuses, as S3 does where objects may be read and the bucket not be listed."""
    try:
        files = storage.list_files(folder, recursive=False) if storage.is_folder(folder) else []
    except (PermissionError, FileNotFoundError, NotADirectoryError):  # its files may be readable all the same
        return []
    except DataUnreachable:
        raise
    except DataIOError:
        return None
    return [file for file in files if media.suffix_of(file.uri) in media.MEDIA_SUFFIXES]


def _digest(files: list[FileStat]) -> str:
    digest = blake2b(digest_size=8)
    for file in files:
        digest.update(f"{file.uri}|{file.size}|{file.mtime_ns}\n".encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def _is_outside(uri: str, root: str) -> bool:
    below = uri.removeprefix(f"{root.rstrip('/')}/")
    return below == uri or ".." in below.split("/")


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
