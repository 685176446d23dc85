"""Names a process by its pid and the time of its start, since pids are used again, and the kernel that they are
under; and what memory this one has."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

_STATE, _START = 0, 19  # of the fields after the name in /proc/PID/stat: a letter, ticks since the machine has booted
_ENDED = "ZX"  # states of a process that has ended: its memory is gone, its parent has not asked for its status yet


def birth(pid: int) -> str:
    """When a process of this node began; empty when there is none, or no /proc."""
    fields = _fields(pid)
    return fields[_START] if fields else ""


def lives(pid: int, born: str) -> bool:
    """Whether the process that was born then has not ended."""
    fields = _fields(pid)
    return bool(fields) and fields[_START] == born and fields[_STATE] not in _ENDED


def kill(pid: int, born: str) -> bool:
    """SIGKILL the process that was born then. False: it has ended, whoever has its number now."""
    if birth(pid) != born:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def this_kernel() -> str:
    """A name of the kernel that runs, since it has begun to: another one of a machine that has started again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def own_bytes() -> int:
    """Memory of this process that no other shares: without mapped files and the object store. 0 where the system does
    not say."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    kib = next((line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")), "0")
    return int(kib) << 10


def _fields(pid: int) -> list[str]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    # The name before it may contain spaces and brackets, and the kernel cuts it at 15 bytes, also within a letter.
    return stat.rpartition(b")")[2].decode("ascii").split()
