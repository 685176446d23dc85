"""How much memory this node can still give to a process that holds state. Linux; elsewhere nothing is known."""

from __future__ import annotations

import sys
from pathlib import Path

_RESERVE = 0.05  # of all memory: Ray's memory monitor begins to end processes when less is free
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def node_room(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes that may be taken here before processes are ended for it; at least 0."""
    rooms = [room for room in (_host_room(meminfo), _container_room(cgroup)) if room is not None]
    return max(0, min(rooms, default=sys.maxsize))


def _host_room(meminfo: Path) -> int | None:
    try:
        lines = [line.split() for line in meminfo.read_text().splitlines()]
        kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
        return int((kib["MemAvailable"] - _RESERVE * kib["MemTotal"]) * 1024)
    except (OSError, ValueError, KeyError):
        return None


def _container_room(cgroup: Path) -> int | None:
    """Within a cgroup (v2) that has a limit. Pages of files that are not in use do not count as taken."""
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" without a limit
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        taken = int((cgroup / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
        return int(limit * (1 - _RESERVE) - taken)
    except (OSError, ValueError):
        return None
