"""Reading by offset from local paths and any PyArrow file system URI, with retries on fresh handles.

An error of the storage is never mistaken for bad data: it is retried, then raised as DataIOError. Only a file that
does not exist raises FileNotFoundError at once, and one that may not be read DataIOError.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import io
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TypeVar

import pyarrow as pa
import pyarrow.fs as pafs
from braceexpand import braceexpand

from data.errors import DataError, DataIOError, DataUnreachable
from ops.listing import is_nothing
from ops.passing import UNREACHABLE

log = logging.getLogger(__name__)

T = TypeVar("T")
BLOCK_BYTES = 256 << 10  # remote reads are rounded to blocks of this size: one request serves several headers
LONGEST_BLOCK = 8 << 20  # where a file is read on: a table of 5 GB takes 600 requests instead of 19,000
ASKED_AT_ONCE = 16  # requests about files
PIPES = ("pipe:", "|")  # shell commands in place of paths, as the webdataset library runs them
GLOB = r"[*?[]"
ABSOLUTE_IN_BRACES = re.compile("[{,][/~]")
OPTIONS = re.compile(r"\?[a-z_]+=[^?&]*(&[a-z_]+=[^?&]*)*$")  # of a PyArrow URI: ?endpoint_override=localhost:9000
AZURE_HOSTS = (".blob.core.windows.net", ".dfs.core.windows.net")
# What errors of S3 (400: a token that has expired), Google and Hugging Face say where credentials are the cause
REFUSED = (
    *("ACCESS_DENIED", "HTTP status 400", "HTTP status 401", "HTTP status 403"),
    *("PERMISSION_DENIED", "UNAUTHENTICATED", "OAuth2 access token"),
    *("401 Unauthorized", "403 Forbidden", "gated repo"),
)
GOOGLE_RETRY_S = 10  # Google's client asks again for 15 minutes by itself, without a word
RETRY_S = 0.05  # before the second attempt; doubled before each further one, up to the longest
# Services that are busy or start again are back after seconds, and so are file servers (`ops.passing`).
REMOTE_RETRY_S, LONGEST_RETRY_S = 1.0, 10.0
# file systems of this process and the path of their root, by scheme and bucket
_file_systems: dict[tuple[str, str], tuple[pafs.FileSystem, str]] = {}


class _CutShort(OSError):
    """A file has become shorter, which does not pass."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """A file as it is now. A changed size or modification time means changed content."""

    uri: str
    size: int
    mtime_ns: int


def is_local(uri: str) -> bool:
    return "://" not in uri or uri.startswith("file://")


def local_path(uri: str) -> str:
    return uri[len("file://") :] if uri.startswith("file://") else os.path.expanduser(uri)


def absolute(paths: str) -> str:
    """The same with the local paths of `a::b` made absolute: files are named alike wherever a command is started.

    PyArrow's options of a URI (`s3://bucket/a.tar?endpoint_override=HOST`) go before its bucket, as
    `s3://endpoint_override=HOST@bucket/a.tar`: files below it have them too, and its `?` is no glob.
    """

    def located(part: str) -> str:
        if not is_local(part) and not _is_of_python(part) and (found := OPTIONS.search(part)):
            scheme, _, rest = part.removesuffix(found[0]).partition("://")
            return f"{scheme}://{found[0][1:].replace('/', '%2F')}@{rest}"
        kept = not part or not is_local(part) or part.lstrip().startswith(PIPES) or ABSOLUTE_IN_BRACES.search(part)
        return part if kept else os.path.abspath(local_path(part))

    return "::".join(map(located, paths.split("::")))


def resolve(uri: str) -> tuple[pafs.FileSystem, str]:
    """File system and path of a remote URI. Raises DataError when no PyArrow file system serves it, OSError when one
    cannot be reached: PyArrow asks in which region a bucket is.

    What follows the bucket is a name as a listing gives it, also with spaces, `%`, `#` or `?`, without escapes. Options
    of PyArrow stand before the bucket (`absolute`).

    URIs of one bucket share a file system until storage fails. PyArrow makes another one at each call, with connections
    and credentials of its own: 24 clips and their captions cost 57 connections and 57 fetches of a role's credentials.
    """
    scheme, _, path = uri.partition("://")
    bucket, _, name = path.partition("/")
    try:
        if _is_of_python(uri):
            return pafs.FileSystem.from_uri(uri)
        known = _file_systems.get((scheme, bucket))
        if known is None:
            known = _file_systems[scheme, bucket] = pafs.FileSystem.from_uri(_root_of(scheme, bucket))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"{uri}: no PyArrow file system serves {scheme}:// ({error}). Use a local path, s3://, gs://, "
            f"hdfs://, hf:// or, by fsspec, fsspec+{scheme}://."
        ) from error
    system, root = known
    return system, f"{root.rstrip('/')}/{name}".rstrip("/")


def _is_of_python(uri: str) -> bool:
    """Whether PyArrow takes the URI to a file system of fsspec, as it is."""
    return uri.startswith(("hf://", "fsspec+"))


def _root_of(scheme: str, bucket: str) -> str:
    """URI of a bucket as PyArrow reads it: options, which `absolute` puts before the bucket, come last again."""
    options, _, plainly = bucket.partition("@") if "=" in bucket.partition("@")[0] else ("", "", bucket)
    if scheme in ("gs", "gcs") and "retry_limit_seconds" not in options:
        options += f"{'&' if options else ''}retry_limit_seconds={GOOGLE_RETRY_S}"
    return f"{scheme}://{plainly}/{'?' if options else ''}{options}"


def tells_service(uri: str, root: str) -> bool:
    """Whether a URI in a file of the data says by which service it is asked for, other than that of `root`: PyArrow
    would send the credentials of this process to any host. Only a person may say it, by the source's path or media.

    Options stand before a bucket (`absolute`) or in its query; abfs:// takes any host, fsspec+ any address, also in a
    chain after `::`.
    """
    if is_local(uri):
        return False
    scheme, _, place = uri.partition("://")
    scheme, bucket = scheme.lower(), place.partition("/")[0]
    of_python = scheme == "hf" or "fsspec+" in scheme
    if of_python and "::" in place:
        return True
    above, _, below = root.partition("://")
    if (above.lower(), below.partition("/")[0]) == (scheme, bucket):
        return False
    account, _, host = bucket.rpartition("@")
    if "fsspec+" in scheme or "=" in account or set("?#%") & set(bucket) or "endpoint_override=" in place:
        return True
    return scheme in ("abfs", "abfss") and set(".:") & set(host) != set() and not host.endswith(AZURE_HOSTS)


def retried(what: str, action: Callable[[], T], retries: int = 4, *, retry_s: float | None = None) -> T:
    """`action()` again after an OSError, up to `retries` times; then DataUnreachable where the storage may answer
    later, else DataIOError. `retry_s` pass before the second attempt, twice as many seconds before each further one, 10
    at most. None: a second where a file server does not answer, else fractions of one, as always where credentials were
    refused. Raises DataError for a name that cannot be opened, and an OSError that says so of itself at once."""
    for attempt in range(retries + 1):
        try:
            return action()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
            raise
        except pa.ArrowInvalid as error:  # such as a key with an empty part, a//b.mp4
            raise DataError(f"{what}: {error}. PyArrow opens no file of this name; rename it.") from error
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise
            _file_systems.clear()  # the next attempt has connections of its own, and credentials as they are by then
            why = str(error).partition(" error_info=")[0]  # what Google's client adds says all of it again
            refused = any(sign in why for sign in REFUSED)
            # errors of PyArrow's services have no number
            passes = not refused and not isinstance(error, _CutShort) and error.errno in (None, *UNREACHABLE)
            if attempt == retries:
                raise (DataUnreachable if passes else DataIOError)(
                    f"{what}: {why} ({retries + 1} attempts). "
                    + (
                        "Credentials of this process are missing, expired or not enough; renew them, then resume."
                        if refused
                        else "The storage failed, not the data; a run that ends by it can be resumed later."
                    )
                ) from error
            log.warning("%s: %s; attempt %d of %d", what, why, attempt + 1, retries + 1)
            first_s = retry_s if retry_s is not None else REMOTE_RETRY_S if error.errno in UNREACHABLE else RETRY_S
            time.sleep(min((RETRY_S if refused else first_s) * 2**attempt, LONGEST_RETRY_S))
    raise AssertionError("unreachable")


@contextlib.contextmanager
def _as_os_errors(uri: str) -> Iterator[None]:
    """Errors that file systems of Python have of their own, as the HTTP client of `hf://` has, as OSErrors."""
    try:
        yield
    except (OSError, pa.ArrowException, DataError):
        raise
    except Exception as error:
        if not _is_of_python(uri):
            raise
        raise OSError(f"{type(error).__name__}: {error}") from error


def _open_remote(uri: str) -> pa.NativeFile:
    """The file of a URI, of which no more is fetched than is asked for: fsspec reads 5 MiB ahead unless it is
    asked not to, three times a whole shard for the headers in it."""
    filesystem, path = resolve(uri)
    handler = getattr(filesystem, "handler", None)
    if isinstance(handler, pafs.FSSpecHandler):
        return pa.PythonFile(handler.fs.open(path, "rb", cache_type="none"), mode="r")
    return filesystem.open_input_file(path)


class _Kept(threading.local):
    """Remote files that a thread keeps open."""

    def __init__(self) -> None:
        self.wanted, self.files = False, dict[str, pa.NativeFile]()


_kept = _Kept()


@contextlib.contextmanager
def kept_open() -> Iterator[None]:
    """Within it, this thread asks once for each remote file that it opens: clips and captions of a shard cost a request
    each, not two."""
    _kept.wanted = True
    try:
        yield
    finally:
        _kept.wanted = False
        for file in _kept.files.values():
            file.close()
        _kept.files.clear()


@contextlib.contextmanager
def _told_of(uri: str) -> Iterator[None]:
    """Raises DataIOError for a file that this process may not read, and FileNotFoundError with its URI for one that is
    gone: PyArrow's has no URI, and where a folder has become a file, opening gives NotADirectoryError."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), uri) from error
    except PermissionError as error:
        who, remedy = "with the credentials of this process", "Renew them"
        if is_local(uri):
            who, remedy = f"by user {os.geteuid()}", "Give this user the right to read it"
        raise DataIOError(f"{uri} may not be read {who} ({error.strerror or error}). {remedy}, then resume.") from error


class ReadFile:
    """One file opened for reads at offsets. Remote reads go through one cached block. `retries` and `retry_s` are those
    of `retried`; None: as is right for where the file is."""

    def __init__(self, uri: str, retries: int = 4, *, retry_s: float | None = None) -> None:
        self.uri, self.retries = uri, retries
        self._retry_s = retry_s if retry_s is not None or is_local(uri) else REMOTE_RETRY_S
        self.bytes_read = 0
        self._fd = -1
        self._remote: pa.NativeFile | None = None
        self._block, self._block_start, self._block_bytes = b"", 0, BLOCK_BYTES
        with _told_of(uri):
            self.size = retried(f"open {uri}", self._open, retries, retry_s=self._retry_s)

    def pread(self, offset: int, count: int, *, alone: bool = False) -> bytes:
        """The bytes [offset, offset + count), fewer only at the end of the file. `alone`: no read near them follows, so
        that nothing around them is fetched."""
        count = min(count, self.size - offset)
        if count <= 0:
            return b""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # the slow way reads again, with a fresh handle if need be
                data = _pread(self._fd, count, offset)
                if len(data) == count:
                    self.bytes_read += count
                    return data
        return self._pread_slowly(offset, count, alone)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._remote is not None:
            if self._remote is not _kept.files.get(self.uri):
                self._remote.close()
            self._remote = None

    def __enter__(self) -> ReadFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        if is_local(self.uri):
            self._fd = os.open(local_path(self.uri), os.O_RDONLY | os.O_CLOEXEC)
            return os.fstat(self._fd).st_size
        self._remote = _kept.files.get(self.uri)
        if self._remote is None:
            with _as_os_errors(self.uri):
                self._remote = _open_remote(self.uri)
            if _kept.wanted:
                _kept.files[self.uri] = self._remote
        return self._remote.size()

    def _pread_slowly(self, offset: int, count: int, alone: bool) -> bytes:
        start = offset - self._block_start
        if start >= 0 and start + count <= len(self._block):
            return self._block[start : start + count]
        reads_on = bool(self._block) and 0 <= start <= len(self._block)
        self._block_bytes = min(2 * self._block_bytes, LONGEST_BLOCK) if reads_on else BLOCK_BYTES
        block = 0 if alone else self._block_bytes

        def read() -> bytes:
            try:
                return self._read_block(offset, count, block)
            except OSError:
                _kept.files.pop(self.uri, None)
                self.close()  # the next attempt must not inherit a half advanced handle
                raise

        with _told_of(self.uri):
            return retried(f"read {self.uri} at {offset}", read, self.retries, retry_s=self._retry_s)

    def _read_block(self, offset: int, count: int, block: int) -> bytes:
        if self._fd < 0 and self._remote is None:
            self._open()
        wanted = count
        if self._remote is not None:
            wanted = min(max(count, block), self.size - offset)
            with _as_os_errors(self.uri):
                data = self._remote.read_at(wanted, offset)
        else:
            data = _pread(self._fd, count, offset)
        if len(data) < count:
            raise _CutShort(f"got {len(data)} of {count} bytes; the file had {self.size} bytes when it was opened")
        self.bytes_read += len(data)
        if self._remote is not None and count < block:
            self._block, self._block_start = data, offset
        return data[:count]


def _pread(fd: int, count: int, offset: int) -> bytes:
    """The bytes [offset, offset + count), fewer only at the end of the file. One call gives 2 GiB at most."""
    pieces, got = [], 0
    while got < count and (piece := os.pread(fd, count - got, offset + got)):
        pieces.append(piece)
        got += len(piece)
    return b"".join(pieces)


class ByteRange(io.RawIOBase):
    """Bytes [offset, offset + size) of a ReadFile as a seekable stream, for PyAV, Pillow and the csv module."""

    def __init__(self, file: ReadFile, offset: int = 0, size: int = -1) -> None:
        self._file, self._offset = file, offset
        self._size = file.size - offset if size < 0 else size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._position, 0)
        data = self._file.pread(self._offset + self._position, left if size is None or size < 0 else min(size, left))
        self._position += len(data)
        return data


def read_range(uri: str, offset: int, size: int, retries: int = 4) -> bytes:
    """Bytes [offset, offset + size) of a file; size -1 means to its end."""
    with ReadFile(uri, retries) as file:
        return file.pread(offset, file.size - offset if size < 0 else size, alone=True)


def stat(uri: str, retries: int = 4) -> FileStat | None:
    """The file's size and time, or None if there is no such file."""
    if is_local(uri):
        info = retried(f"stat {uri}", lambda: _if_there(lambda: os.stat(local_path(uri))), retries)
        return None if info is None or S_ISDIR(info.st_mode) else FileStat(uri, info.st_size, info.st_mtime_ns)
    return _stat_of(uri, _about(uri, retries))


def is_folder(uri: str) -> bool:
    if is_local(uri):
        return os.path.isdir(local_path(uri))
    return _about(uri).type == pafs.FileType.Directory


def list_files(uri: str, recursive: bool = True) -> list[FileStat]:
    """Files of a folder by name; hidden files and folders are left out."""
    if is_local(uri):
        return sorted(_list_local(uri, recursive), key=lambda file: file.uri)
    return [file for file in _list_remote(uri, recursive) if not _is_hidden(_below(uri, file))]


def expand(path: str, suffixes: tuple[str, ...]) -> list[str]:
    """URIs meant by `a::b`, braces, globs and folders (their files with `suffixes`), in order, each once.

    `pipe:` is refused: it runs a shell command. Raises DataError when nothing is there.
    """
    return list(located(path, suffixes))


def located(path: str, suffixes: tuple[str, ...]) -> dict[str, FileStat | None]:
    """The URIs of `expand`, with what is known of the files without another question: a listing of remote storage says
    it. None: nothing is, or there is no such file."""
    patterns = [piece for part in path.split("::") for piece in braceexpand(part)]
    for pattern in patterns:
        if pattern.lstrip().startswith(PIPES):
            raise DataError(f"{pattern!r}: pipe: runs a shell command and is refused. Give paths or file system URIs.")
    names = [pattern for pattern in patterns if not is_local(pattern) and not _is_glob(pattern)]
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:  # a hundred thousand names of a range are asked for, 40 ms each
        told = dict(zip(names, pool.map(_about, names), strict=True))
    found: dict[str, FileStat | None] = {}
    for pattern in patterns:
        matches = _matches(pattern, suffixes, told.get(pattern))
        if not matches:
            raise DataError(f"{pattern}: no files with {', '.join(suffixes)} here. Check data.sources path.")
        found |= matches
    return found


def _matches(pattern: str, suffixes: tuple[str, ...], about: pafs.FileInfo | None) -> dict[str, FileStat | None]:
    """`about`: what remote storage says of a pattern without signs."""
    if _is_glob(pattern):
        return {uri: _told(file) for uri, file in _glob(pattern).items()}
    if is_folder(pattern) if about is None else about.type == pafs.FileType.Directory:
        return {file.uri: _told(file) for file in list_files(pattern) if file.uri.lower().endswith(suffixes)}
    return {pattern: None if about is None else _stat_of(pattern, about)}


def _told(listed: FileStat | None) -> FileStat | None:
    """What `stat` says of a file, by its listing; None where that lacks its size, as a web server's does, or time."""
    if listed is None or listed.size is None or not listed.mtime_ns:
        return None
    if listed.uri.startswith("s3://"):  # MinIO and Ceph list milliseconds; the header that `stat` reads has none
        return replace(listed, mtime_ns=listed.mtime_ns // 10**9 * 10**9)
    return listed


def check_there(path: str) -> None:
    """Raises DataError for a local path, of those that `expand` reads in this one, where nothing is. Nothing is listed,
    and no remote storage asked."""
    for pattern in (piece for part in path.split("::") for piece in braceexpand(part)):
        if not is_local(pattern):
            continue
        path = local_path(pattern)
        first = first_sign(path)
        place = path if first is None else parent(path[:first])
        if not os.path.exists(place):
            raise DataError(f"{pattern}: there is no {place} on this machine. Check the source's path.")


def join(folder: str, name: str) -> str:
    """`name` inside `folder`, unless it is a path of its own."""
    if "://" in name or name.startswith("/") or not folder:
        return name
    return f"{folder.rstrip('/')}/{name}"


def parent(uri: str) -> str:
    """Folder of a file."""
    head, slash, _ = uri.rpartition("/")
    return head if slash and head else ("/" if slash else ".")


def name_of(uri: str) -> str:
    return uri.rstrip("/").rpartition("/")[2]


def _list_local(uri: str, recursive: bool) -> list[FileStat]:
    return retried(f"list {uri}", lambda: list(_files_of(local_path(uri), recursive)))


def _if_there(ask: Callable[[], os.stat_result]) -> os.stat_result | None:
    """What `stat` says; None where nothing is. Raises any other OSError, as `Path.is_file` does before Python 3.14."""
    try:
        return ask()
    except OSError as error:
        if is_nothing(error):
            return None
        raise


def _files_of(folder: str, recursive: bool, above: tuple[str, ...] = ()) -> Iterator[FileStat]:
    above = (*above, os.path.realpath(folder))  # linked folders are followed, but not in a circle
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or (entry.is_symlink() and _if_there(entry.stat) is None):
                continue
            if entry.is_dir():
                if recursive and not (entry.is_symlink() and os.path.realpath(entry.path) in above):
                    yield from _files_of(entry.path, recursive, above)
            elif entry.is_file():
                info = entry.stat()
                yield FileStat(entry.path, info.st_size, info.st_mtime_ns)


def _about(uri: str, retries: int = 4) -> pafs.FileInfo:
    """What PyArrow knows of a remote URI, also of one where nothing is."""

    def ask() -> pafs.FileInfo:
        with _as_os_errors(uri):
            filesystem, path = resolve(uri)
            return filesystem.get_file_info(path)

    return retried(f"stat {uri}", ask, retries, retry_s=REMOTE_RETRY_S)


def _stat_of(uri: str, about: pafs.FileInfo) -> FileStat | None:
    return FileStat(uri, about.size, about.mtime_ns or 0) if about.type == pafs.FileType.File else None


def _list_remote(uri: str, recursive: bool) -> list[FileStat]:
    """By name, hidden ones as well."""

    def ask() -> tuple[str, list[pafs.FileInfo]]:
        with _as_os_errors(uri):
            filesystem, path = resolve(uri)
            base = path.rstrip("/")
            return base, filesystem.get_file_info(pafs.FileSelector(base, recursive=recursive))

    base, infos = retried(f"list {uri}", ask, retry_s=REMOTE_RETRY_S)
    found = []
    for info in infos:
        inside = info.path.strip("/").removeprefix(base.strip("/")).lstrip("/")  # fsspec adds a leading slash
        if info.type == pafs.FileType.File:
            found.append(FileStat(f"{uri.rstrip('/')}/{inside}", info.size, info.mtime_ns or 0))
    return sorted(found, key=lambda file: file.uri)


def _below(uri: str, file: FileStat) -> list[str]:
    """Names of the folders between `uri` and the file, and its own."""
    return file.uri[len(uri.rstrip("/")) + 1 :].split("/")


def _glob(pattern: str) -> dict[str, FileStat | None]:
    """Files that a pattern means, by name, the same ones by a path and by a URI: `*` stays within a folder's name, `**`
    stands for any number of folders. Below the part without signs a hidden file or folder is meant only where the
    pattern itself has a "." there."""
    path = local_path(pattern) if is_local(pattern) else pattern
    first = first_sign(path)
    assert first is not None, f"{pattern} is no glob"
    fixed, names = parent(path[:first]), path[path.rfind("/", 0, first) + 1 :].split("/")
    names = [name if name == "**" else re.sub(r"\*{2,}", "*", name) for name in names]
    names += ["*"] * (names[-1] == "**")
    if is_local(pattern):
        folder = Path(fixed)
        names = [name for name in names if name not in ("", ".")]  # which a Path drops
        found = retried(f"list {pattern}", lambda: list(_files_like(folder, names)))
        return dict.fromkeys(sorted(str(file) for file in found if _fits(file.relative_to(folder).parts, names)))
    files = _list_remote(fixed, recursive=len(names) > 1)
    return {file.uri: file for file in files if _fits(_below(fixed, file), names)}


def first_sign(path: str, signs: str = GLOB) -> int | None:
    """Where a URI, or a path as `local_path` has it, begins to stand for other names; None: it is one itself.

    What is there as it is written has no signs, as the folder of `pairs [v2]/*.tar`, nor has the query of an address of
    fsspec, which is of its name: https://host/a.tar?download=true. `signs`: a regular expression.
    """
    name = OPTIONS.sub("", path) if _is_of_python(path) else path
    for sign in re.finditer(signs, name):
        upto = name[: sign.start()] + name[sign.start() :].partition("/")[0]
        if not (is_local(path) and os.path.exists(upto)):
            return sign.start()
    return None


def _files_like(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """As `Path.glob`, which would give a part of them where storage does not list one of the folders: the others would
    be a data set of their own. Folders that may not be read are passed over, as it does, and so are hidden ones that no
    name means, without a question: the snapshots of a file server may not answer."""
    if not names:
        try:
            info = _if_there(folder.stat)
        except PermissionError:  # below a folder that may not be entered
            return
        if info is not None and S_ISREG(info.st_mode):
            yield folder
        return
    name, rest = names[0], names[1:]
    if not any(sign in name for sign in "*?["):
        yield from _files_like(folder / name, rest)
        return
    if name == "**":
        yield from _files_like(folder, rest)
    try:
        with os.scandir(folder) as entries:
            listed = list(entries)
    except OSError as error:
        if is_nothing(error) or isinstance(error, PermissionError):
            return
        raise
    for entry in listed:
        if _is_hidden([entry.name]) and not _is_hidden([name]):
            continue
        if name == "**":
            if entry.is_dir(follow_symlinks=False):
                yield from _files_like(folder / entry.name, names)
        elif rest and entry.is_file(follow_symlinks=False):
            continue
        elif fnmatch.fnmatchcase(entry.name, name):
            yield from _files_like(folder / entry.name, rest)


def _is_glob(pattern: str) -> bool:
    return first_sign(local_path(pattern) if is_local(pattern) else pattern) is not None


def _is_hidden(names: Sequence[str]) -> bool:
    return any(name.startswith(".") for name in names)


def _fits(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether the names of a path are those of a pattern, in which no sign stands for the "." of a hidden one."""
    if not patterns or not names:
        return not patterns and not names
    if patterns[0] == "**" and _fits(names, patterns[1:]):
        return True
    if _is_hidden(names[:1]) and not _is_hidden(patterns[:1]):
        return False
    rest = patterns if patterns[0] == "**" else patterns[1:]
    return fnmatch.fnmatchcase(names[0], patterns[0]) and _fits(names[1:], rest)
