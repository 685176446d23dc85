"""One writer per run folder: a lock file beside it, held through the kernel (flock), whose content keeps changing.

    with FolderLock(lock_path(folder, "driver")) as lock:
        lock.take(wait_s=3.0, tell=print)          # raises FolderHeld when somebody else is alive
        ...

The kernel frees a dead holder's lock at once, so on one machine nothing ever waits for one. File systems that are
shared between machines may not pass such locks on, or hold that of a dead machine until it is back (NFS before version
4). There a holder counts as alive while its stamp in the file keeps changing. Whoever asks watches the file, so that
clocks of two machines are never compared.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from actors.process import this_kernel
from ops.typed import ConfigError
from ops.whole_file import write_whole

log = logging.getLogger(__name__)

BEAT_S = 2.0
STALE_S = 15.0
_LOOK_S = 0.2
_SETTLE_S = 1.0  # where flock does not work and two processes take a lock at once, the later stamp counts
_BYTES = 512  # size of every stamp, so that the next one fits on a full disk
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class FolderHeld(ConfigError):
    """Another process is alive and writes in this folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """What a holder writes into its lock file, with another `beat` every few seconds."""

    token: str  # of one start of a run
    host: str
    kernel: str  # processes under one kernel see each other's flock
    pid: int
    beat: int
    since: str  # for people


def lock_path(folder: Path, role: str) -> Path:
    """The lock's path beside the folder, so that the lock also covers creating and emptying the folder."""
    return beside(folder, f"{role}.lock")


def beside(folder: Path, what: str) -> Path:
    """A file of a run beside its folder, the same by whatever links the folder is reached; beside the link itself where
    no file can be made beside its target."""
    target = Path(os.path.realpath(folder))
    place = target if os.access(target.parent, os.W_OK | os.X_OK) else folder
    return place.parent / f".{place.name}.{what}"


def holder(path: Path) -> Stamp | None:
    """The stamp in a lock file, whether its writer is alive or not."""
    try:
        return _parsed(path.read_bytes())
    except OSError:
        return None


class FolderLock:
    """Held from `take` to `release` (or the end of the `with`, or of the process)."""

    def __init__(self, path: Path, token: str = "", *, beat_s: float = BEAT_S, stale_s: float = STALE_S) -> None:
        """The stamp changes every `beat_s`; one of another machine that has not for `stale_s` is of a dead process."""
        self.path, self.token = path, token or uuid.uuid4().hex
        self._beat_s, self._stale_s = beat_s, stale_s
        self.lost = False  # another process has taken it, believing this one dead
        self._file: int | None = None
        self._stamp: Stamp | None = None
        self._wrong = ""  # with the last beat
        self._end = threading.Event()
        self._using = threading.Lock()  # the file, between the beats and `release`
        self._beats: threading.Thread | None = None

    def take(self, wait_s: float, tell: Callable[[str], None]) -> None:
        """Returns when the lock is ours. Raises FolderHeld when its holder is alive for longer than `wait_s`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + wait_s
        while not self._try(tell):
            if time.monotonic() >= deadline:
                raise FolderHeld(_held(self.path))
            time.sleep(_LOOK_S)
        self._beats = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._beats.start()

    def release(self) -> None:
        if self._file is None:
            return
        self._end.set()
        if self._beats is not None:
            self._beats.join(timeout=self._beat_s)
        with self._using:
            if not self.lost and _is_at(self._file, self.path):
                with suppress(OSError):  # a folder that has become read-only keeps the file; the kernel frees the lock
                    self.path.unlink()
            _close(self._file)
            self._file = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _try(self, tell: Callable[[str], None]) -> bool:
        try:
            file = _opened(self.path)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ConfigError(f"{self.path}, the lock of a run, is a link; remove it.") from None
        by_kernel = _flock(file)
        if by_kernel is not False and self._may_have(file, by_kernel, tell):
            self._file = file
            return True
        _close(file)
        return by_kernel is False and self._outlives(tell) and self._try(tell)

    def _may_have(self, file: int, by_kernel: bool | None, tell: Callable[[str], None]) -> bool:
        if not _is_at(file, self.path):  # its last holder has just removed it
            return False
        before = _parsed(os.pread(file, _BYTES, 0))
        trusted = by_kernel is True and (before is None or before.kernel == this_kernel())
        if not trusted and before is not None and self._is_alive(before, tell):
            return False
        self._stamp = self._first_stamp()
        self._tell_of(_write(file, self._stamp))
        if not trusted:
            time.sleep(_SETTLE_S)
            after = holder(self.path)
            return after is None or after.token == self.token
        return True

    def _outlives(self, tell: Callable[[str], None]) -> bool:
        """Whether the file system holds the lock for a machine that is gone, and a file of ours is in the place of that
        one now; should its holder live, it finds our stamp there. Not on a full disk, where a live holder could not
        change its stamp either."""
        before = holder(self.path)
        if before is None or before.kernel == this_kernel() or self._is_alive(before, tell):
            return False
        try:
            write_whole(self.path, _as_bytes(self._first_stamp()), synced=True)
        except OSError as error:
            log.warning("%s cannot be written anew: %s", self.path, error)
            return False
        return True

    def _is_alive(self, before: Stamp, tell: Callable[[str], None]) -> bool:
        """Whether the process of this stamp is, which our kernel does not know."""
        who = f"process {before.pid} on {before.host}"
        tell(f"{self.path.name} names {who}; looking for {self._stale_s:.0f} s whether it is alive")
        if _changes(self.path, self._stale_s):
            return True
        tell(f"{who} is not alive; going on without it")
        return False

    def _first_stamp(self) -> Stamp:
        return Stamp(
            token=self.token,
            host=socket.gethostname(),
            kernel=this_kernel(),
            pid=os.getpid(),
            beat=0,
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    def _beat(self) -> None:
        while not self._end.wait(self._beat_s) and not self.lost:
            found = holder(self.path)
            if self._end.is_set():  # while the file system did not answer
                return
            if found is not None and found.token != self.token:
                self.lost = True
                log.error("%s was taken by process %d on %s", self.path, found.pid, found.host)
                return
            with self._using:
                if self._end.is_set():
                    return
                assert self._file is not None and self._stamp is not None
                self._stamp = replace(self._stamp, beat=self._stamp.beat + 1)
                wrong = "" if _is_at(self._file, self.path) else self._put_back()
                self._tell_of(_write(self._file, self._stamp) or wrong)

    def _tell_of(self, wrong: str) -> None:
        """Once when beats begin to fail, and once when they work again: a file server may be away for a night."""
        if wrong and not self._wrong:
            log.warning("the lock of a run: %s; trying again every %g s", wrong, self._beat_s)
        elif self._wrong and not wrong and not self.lost:
            log.warning("the lock of a run: %s is written again", self.path)
        self._wrong = wrong

    def _put_back(self) -> str:
        """Write the file again after somebody has removed it: the next process that starts must find it. Where the file
        system did not answer when it was looked for, it is still ours. What is wrong; "": nothing. The next beat tries
        again, as this process would count as dead without any."""
        try:
            file = _opened(self.path)
        except OSError as error:
            return f"{self.path} cannot be made again: {error}"
        assert self._file is not None
        unused, wrong = file, ""
        try:
            if _is_same(file, self._file):
                pass  # the kernel would refuse us the lock, as that is held already
            elif _flock(file) is not False:
                unused, self._file = self._file, file
            else:
                self.lost = not self._wrote(file)
        except OSError as error:
            wrong = f"{self.path} cannot be locked again: {error}"
        _close(unused)
        return wrong

    def _wrote(self, file: int) -> bool:
        stamp = _parsed(os.pread(file, _BYTES, 0))
        return stamp is not None and stamp.token == self.token


def _opened(path: Path) -> int:
    """The lock file, made where there is none. Where others may write in its folder they could link it to any file,
    which the stamp would then be written over: a link is an OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def _close(file: int) -> None:
    """Close a file of which no more is wanted: file systems report what became of an earlier stamp only now."""
    with suppress(OSError):
        os.close(file)


def _flock(file: int) -> bool | None:
    """Whether the kernel gives us the lock; None where the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False


def _is_same(file: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.fstat(other))
    except OSError:  # one that its server has forgotten
        return False


def _changes(path: Path, seconds: float) -> bool:
    """Whether the stamp changes while we watch. The file is opened each time, so that NFS asks its server."""
    first, deadline = holder(path), time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        if (now := holder(path)) != first and now is not None:
            return True
    return False


def _write(file: int, stamp: Stamp) -> str:
    """What went wrong, if anything: on a full disk flock still holds the lock."""
    try:
        os.pwrite(file, _as_bytes(stamp), 0)
    except OSError as error:
        return f"its stamp was not written: {error}"
    return ""


def _as_bytes(stamp: Stamp) -> bytes:
    return json.dumps(asdict(stamp)).encode().ljust(_BYTES - 1)[: _BYTES - 1] + b"\n"


def _parsed(data: bytes) -> Stamp | None:
    try:
        return Stamp(**json.loads(data[:_BYTES]))
    except (ValueError, TypeError):
        return None  # new, or torn


def _held(path: Path) -> str:
    stamp = holder(path)
    folder = path.parent / path.name[1:].rsplit(".", 2)[0]
    who = f"process {stamp.pid} on {stamp.host}, since {stamp.since}" if stamp is not None else "another process"
    return f"run {folder} is alive ({who}); end it with `heddle workers stop {folder}` or its Ctrl-C first."
