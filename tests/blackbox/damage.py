"""What can happen to files: cut, flipped, zeroed, removed, half written, replaced; disks that are full or closed.

Every function says in a few words what it did. What comes back later is a context or has a way back.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def truncate(path: Path, rng: random.Random) -> str:
    size = path.stat().st_size
    keep = rng.randrange(size)
    os.truncate(path, keep)
    return f"{path.parent.name}/{path.name} cut from {size} to {keep} bytes"


def flip(path: Path, rng: random.Random) -> str:
    """64 bytes somewhere after the header are others; the size is the same."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(min(600, len(data) // 2), max(len(data) - 64, len(data) // 2 + 1))
    for index in range(at, min(at + 64, len(data))):
        data[index] ^= 0x5A
    path.write_bytes(data)
    return f"64 bytes of {path.parent.name}/{path.name} flipped at {at}"


def zero_tail(path: Path, rng: random.Random) -> str:
    """The last part reads as zeros, as after a power cut; the size is the same."""
    size = path.stat().st_size
    at = rng.randrange(size // 2, size)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(size - at))
    return f"{path.parent.name}/{path.name} zeroed from {at} of {size} bytes"


def remove(path: Path, rng: random.Random) -> str:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return f"{path.parent.name}/{path.name} removed"


def tear(path: Path, rng: random.Random) -> str:
    """Half a line at the end, which is what a killed writer leaves."""
    with path.open("ab") as file:
        file.write(b'{"step": 12, "time": 17953'[: rng.randint(1, 26)])
    return f"half a line at the end of {path.name}"


def garble(path: Path, rng: random.Random) -> str:
    size = max(1, path.stat().st_size)
    path.write_bytes(rng.randbytes(size))
    return f"{path.name} is {size} random bytes"


class Swapped:
    """A file with other content, until `back`. Its times are those of the writing, then again the old ones."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path, self._stat = path, path.stat()
        self._aside = path.with_name(f".{path.name}.aside")
        shutil.copy2(path, self._aside)
        path.write_bytes(content)

    def back(self) -> None:
        if self._aside.exists():
            self.path.write_bytes(self._aside.read_bytes())
            os.utime(self.path, ns=(self._stat.st_atime_ns, self._stat.st_mtime_ns))
            self._aside.unlink()


class Away:
    """A file that has another name until `back`."""

    def __init__(self, path: Path) -> None:
        self.path, self._aside = path, path.with_name(f".{path.name}.away")
        path.rename(self._aside)

    def back(self) -> None:
        if self._aside.exists():
            self._aside.rename(self.path)


# Disks --------------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(at: Path, mib: int) -> Iterator[bool]:
    """A file system of `mib` MiB. False where this machine does not let us mount one."""
    at.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(at)], capture_output=True)
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", str(at)], capture_output=True, check=False)


class Full:
    """No byte is free on the file system of `folder` until `back`."""

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / ".ballast"
        with self._ballast.open("wb", buffering=0) as file, suppress(OSError):
            for size in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    def back(self) -> None:
        self._ballast.unlink(missing_ok=True)


class Locked:
    """Nothing below `folder` can be written until `back`: by permission, which root has to take from itself."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._root = folder, os.geteuid() == 0
        if self._root:
            self._change("+i")
        else:
            subprocess.run(["chmod", "-R", "a-w", str(folder)], check=False, capture_output=True)

    @property
    def works(self) -> bool:
        try:
            (self._folder / ".try").touch()
        except OSError:
            return True
        (self._folder / ".try").unlink()
        return False

    def back(self) -> None:
        if self._root:
            self._change("-i")
        else:
            subprocess.run(["chmod", "-R", "u+w", str(self._folder)], check=False, capture_output=True)

    def _change(self, flag: str) -> None:
        with suppress(FileNotFoundError):
            subprocess.run(["chattr", "-R", "-f", flag, str(self._folder)], check=False, capture_output=True)
