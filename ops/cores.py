"""How many of this node's cores a worker computes with in host memory, beside its GPU.

A GPU's worker has one thread for all else. But state in host memory is updated there: for Wan2.1-14B on 8 GPUs 1.8 G
weights of each, some 80 bytes of traffic for a weight, of which one core moves 10 to 20 GB a second and a node 400.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MOST = 16  # more threads of a worker wait for memory


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may use at the same time: by its affinity, and by the quota of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (_quota(cgroup / "cpu.max"), _old_quota(cgroup / "cpu"))
    return max(1, int(min((allowed, *(quota for quota in quotas if quota is not None)))))


def host_threads(workers_here: int, cores: int | None = None) -> int:
    """Threads of each of `workers_here` GPU workers of a node, which share `cores` (None: half of those that this
    process may use; decoding and Ray need some, too)."""
    return max(1, min(_MOST, (usable_cores() // 2 if cores is None else cores) // workers_here))


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """A block in which this thread has PyTorch compute on the CPU with `threads` of them at least."""
    import torch  # here: processes that decode ask for cores, and need no torch

    before = torch.get_num_threads()
    if threads <= before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _quota(file: Path) -> float | None:
    """The limit of a cgroup (v2), in cores: `200000 100000` are two of them, `max 100000` is none."""
    try:
        most, period = file.read_text().split()
        return int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _old_quota(folder: Path) -> float | None:
    """The limit of a cgroup of version 1, in cores; -1 is none."""
    try:
        most, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return most / period if most > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
