"""How much memory this node can still give to a process that holds state, and how large its GPUs are. Linux; elsewhere
nothing is known. No torch."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import NamedTuple

_RESERVE = 0.05  # of all memory: Ray's memory monitor begins to end processes when less is free
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_SHARED = Path("/dev/shm")
_SECOND = 2 << 24  # in the version of a struct of NVML's second edition, beside its size


class _CgroupFiles(NamedTuple):
    """Names in a version of cgroups."""

    limit: str  # a file
    taken: str  # a file
    idle: str  # in memory.stat: bytes of files' pages that are not in use


_V2 = _CgroupFiles("memory.max", "memory.current", "inactive_file")
_V1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def node_room(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, own: Path = _OWN_GROUPS) -> int:
    """Bytes that may be taken here before processes are ended for it; at least 0. A process is limited by its cgroup
    and all above it: a container sees its own as the root, a job of SLURM or a unit of systemd does not."""
    group, old_group = _own_groups(own)
    rooms = [_host_room(meminfo)]
    rooms += [_container_room(one, _V2) for one in _down_to(cgroup, group)]
    rooms += [_container_room(one, _V1) for one in _down_to(cgroup / "memory", old_group)]
    return max(0, min((room for room in rooms if room is not None), default=sys.maxsize))


def shared_room(directory: Path = _SHARED) -> int | None:
    """Bytes of /dev/shm in all, taken or not; None where there is none. Docker gives 64 MiB unless set otherwise."""
    try:
        stat = os.statvfs(directory)
    except OSError:
        return None
    return stat.f_frsize * stat.f_blocks


class _GpuMemory(ctypes.Structure):
    """nvmlMemory_v2_t, in bytes. What is reserved belongs to the driver, and is in no total that CUDA reports."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def gpu_sizes(library: str = "libnvidia-ml.so.1") -> list[int]:
    """Bytes of each GPU of this node that processes may use, those included that CUDA_VISIBLE_DEVICES hides; none where
    NVML, which the driver brings, does not say."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return []
    count, sizes = ctypes.c_uint(), []
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    for index in range(count.value):
        device, memory = ctypes.c_void_p(), _GpuMemory(version=ctypes.sizeof(_GpuMemory) | _SECOND)
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
            return []
        if nvml.nvmlDeviceGetMemoryInfo_v2(device, ctypes.byref(memory)):
            return []
        sizes.append(memory.total - memory.reserved)
    return sizes


def _host_room(meminfo: Path) -> int | None:
    try:
        lines = [line.split() for line in meminfo.read_text().splitlines()]
        kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
        return int((kib["MemAvailable"] - _RESERVE * kib["MemTotal"]) * 1024)
    except (OSError, ValueError, KeyError):
        return None


def _own_groups(own: Path) -> tuple[str, str]:
    """The cgroup of this process in version 2, and that for memory in version 1; "" where there is none."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]  # number, controllers, path
    except OSError:
        return "", ""
    paths = {name: path for _, controllers, path in lines for name in controllers.split(",")}
    return paths.get("", ""), paths.get("memory", "")


def _down_to(root: Path, group: str) -> list[Path]:
    """The root of cgroups, and those on the way to this one. In a container that shows the host's path there are no
    such folders."""
    names = [name for name in group.split("/") if name]
    return [root.joinpath(*names[:count]) for count in range(len(names) + 1)]


def _container_room(cgroup: Path, names: _CgroupFiles) -> int | None:
    """Within a cgroup that has a limit. Pages of files that are not in use do not count as taken."""
    try:
        limit = int((cgroup / names.limit).read_text())  # no limit: "max" in v2, larger than any memory in v1
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        taken = int((cgroup / names.taken).read_text()) - int(stat.get(names.idle, 0))
        return int(limit * (1 - _RESERVE) - taken)
    except (OSError, ValueError):
        return None
