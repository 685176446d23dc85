"""A folder that appears when all that is in it is written, also where an empty one is there already: a mount point,
the current folder, a link to another disk."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from actors.process import this_kernel
from ops.typed import ConfigError
from ops.whole_file import write_whole

_HIDDEN = ".heddle-export"  # and who made it
_MOVING = ".moving.json"  # in a hidden folder while its entries are moved up: those so far, and the one under way
_MARKED = re.compile(re.escape(_HIDDEN) + r"-([0-9a-f]{8,})-([A-Za-z0-9-]*)-([0-9a-f]{6})-[0-9a-f]{6}$")
_DEAD_S = 86400.0  # no export takes as long: what another machine has begun so long ago was killed there


@contextmanager
def whole_folder(to: Path, last: str) -> Iterator[Path]:
    """Where to write what shall stand in `to`: an empty folder that is not seen, on the same file system, which no
    other process has. It gets its name when the block ends, and is removed when the block raises. Raises ConfigError
    where another process writes `to`, and where that is not free, before the block or after it.

    An empty folder that is there is not replaced, as a mount point cannot be: the hidden one lies in it, and what it
    has is moved up in the end, the entry `last` after the others; copied where the file system renames no folders, as
    mounts of object storage. Nothing of it stays where that fails; where it was killed, the next call removes it, on
    another machine once it is a day old: whether a process writes there is known on that process's machine alone.
    """
    check_free(to)
    target = Path(os.path.realpath(to))  # of a link the folder itself
    there = target.is_dir()
    begin = target / _HIDDEN if there else target.with_name(f".{target.name}{_HIDDEN}")
    for left in begin.parent.glob(glob.escape(begin.name) + "*"):  # by one that was killed
        if (mark := _Mark.of(left.name)) is not None and mark.may_live_elsewhere():
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(mark.since))
            raise ConfigError(
                f"an export on {mark.host} has been writing {to} since {since}, into {left}. Wait for its end; if it "
                f"was killed, remove that folder; or choose another --to."
            )
        with _alone(left, to):
            _remove(*_moved_from(left), left)
    work = begin.with_name(f"{begin.name}-{_Mark.here()}-{uuid.uuid4().hex[:6]}")
    work.mkdir(parents=True)
    with _alone(work, to):
        try:
            yield work
            check_free(to)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        if there:
            _move_up(work, last)
        else:
            work.rename(target)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Who made a hidden folder, as its name says from the first moment on."""

    host: str
    kernel: str  # a few digits
    since: float  # seconds, by the clock of that host

    @staticmethod
    def here() -> _Mark:
        host = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname().partition(".")[0])[-24:]  # ends are what differs
        return _Mark(host, hashlib.sha256(this_kernel().encode()).hexdigest()[:6], time.time())

    @staticmethod
    def of(name: str) -> _Mark | None:
        """None where a name says nothing."""
        found = _MARKED.search(name)
        return None if found is None else _Mark(found[2], found[3], float(int(found[1], 16)))

    def __str__(self) -> str:
        return f"{int(self.since):08x}-{self.host}-{self.kernel}"

    def may_live_elsewhere(self) -> bool:
        """Whether the process may still run on another machine, whose locks are not seen here. The same kernel is this
        machine or a container on it; the same host name is this machine, also after a restart."""
        here = _Mark.here()
        return self.host != here.host and self.kernel != here.kernel and here.since - self.since < _DEAD_S


def check_free(to: Path) -> None:
    """Raises ConfigError if `to` exists and is not an empty folder. Remains of a `whole_folder` that was killed do not
    count."""
    if to.exists() and (not to.is_dir() or _others_in(to)):
        raise ConfigError(f"{to} exists and is not an empty folder; choose another --to.")


def _others_in(folder: Path) -> set[Path]:
    found = set(folder.iterdir())
    hidden = {path for path in found if path.name.startswith(_HIDDEN)}
    return found - hidden - {path for left in hidden for path in _moved_from(left)}


@contextmanager
def _alone(hidden: Path, to: Path) -> Iterator[None]:
    """No other process of this machine writes in the hidden folder, for as long. Raises ConfigError where one does."""
    another = ConfigError(f"another export writes {to}; wait for its end, or choose another --to.")
    try:
        folder = os.open(hidden, os.O_RDONLY)
    except FileNotFoundError:  # that has begun in the same moment
        raise another from None
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise another from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(folder)


def _move_up(work: Path, last: str) -> None:
    """What the hidden folder has, to the one that it is in."""
    moved: dict[str, list[int] | None] = {}
    try:
        for entry in sorted(work.iterdir(), key=lambda one: (one.name == last, one.name)):
            moved[entry.name] = None
            with suppress(OSError):  # mounts that rename no files: what is left there after a kill stays
                write_whole(work / _MOVING, json.dumps(moved), synced=True)
            place = work.parent / entry.name
            shutil.move(entry, place, copy_function=shutil.copyfile)
            moved[entry.name] = _what(place)
    except BaseException:
        _remove(*(work.parent / name for name in moved), work)
        raise
    (work / _MOVING).unlink(missing_ok=True)
    work.rmdir()


def _moved_from(hidden: Path) -> list[Path]:
    """What a move that was killed has left above its folder: the entry that it was at, and those that it had moved,
    unless somebody has put another one in the place."""
    try:
        moved = json.loads((hidden / _MOVING).read_bytes())
    except (OSError, ValueError):  # it was not killed in its move
        return []
    there = [hidden.parent / name for name in moved if os.path.lexists(hidden.parent / name)]
    return [path for path in there if moved[path.name] in (None, _what(path))]


def _what(path: Path) -> list[int]:
    """Tells an entry from another one of its name: the number of a removed one may be given again, its time is not."""
    found = path.lstat()
    return [found.st_ino, found.st_mtime_ns]


def _remove(*paths: Path) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
