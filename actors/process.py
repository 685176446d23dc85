"""Names a process by its pid and the time of its start, since pids are used again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

_START = 19  # of the fields after the name in /proc/PID/stat: ticks since the machine has booted


def birth(pid: int) -> str:
    """When a process of this node began; empty when there is none, or no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[_START]  # the name before it may contain spaces and brackets


def kill(pid: int, born: str) -> bool:
    """SIGKILL the process that was born then. False: it has ended, whoever has its number now."""
    if birth(pid) != born:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
