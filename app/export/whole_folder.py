"""A folder that appears when all that is in it is written, also where an empty one is there already: a mount point,
the current folder, a link to another disk."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ops.typed import ConfigError
from ops.whole_file import write_whole

_HIDDEN = ".heddle-export"  # and a name of its own
_MOVING = ".moving.json"  # in a hidden folder while its entries are moved up: which were, and which one is


@contextmanager
def whole_folder(to: Path, last: str) -> Iterator[Path]:
    """Where to write what shall stand in `to`: an empty folder that is not seen, on the same file system, which no
    other process has. It gets its name when the block ends, and is removed when the block raises. Raises ConfigError
    where another process writes `to`, and where that is not free, before the block or after it.

    An empty folder that is there is not replaced, as a mount point cannot be: the hidden one lies in it, and what it
    has is moved up in the end, the entry `last` after the others; copied where the file system renames no folders, as
    mounts of object storage. Nothing of it stays where that fails; where it was killed, the next call removes it.
    """
    check_free(to)
    target = Path(os.path.realpath(to))  # of a link the folder itself
    there = target.is_dir()
    begin = target / _HIDDEN if there else target.with_name(f".{target.name}{_HIDDEN}")
    for left in begin.parent.glob(glob.escape(begin.name) + "*"):  # by one that was killed
        with _alone(left, to):
            _remove(*_moved_from(left), left)
    work = begin.with_name(f"{begin.name}-{uuid.uuid4().hex[:12]}")
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


def check_free(to: Path) -> None:
    """Raises ConfigError where `to` is there, and is no empty folder; what `whole_folder` has left there when it was
    killed does not count."""
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
