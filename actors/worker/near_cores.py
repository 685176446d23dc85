"""A GPU's worker runs on the cores of the memory node at which its GPU sits.

So host memory that it is the first to write (pinned copies, optimizer state, a node's gradient) lies there, too, and
does not cross the link between sockets on its way to the GPU. `numactl --cpunodebind` in a launch script does the same
for processes that each have one GPU from their start; a Ray actor learns which GPU it has when it runs.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from actors.worker.pci import SYS

log = logging.getLogger(__name__)

_OWN_THREADS = Path("/proc/self/task")


def stay_near(numa: int | None, root: Path = SYS) -> frozenset[int]:
    """Bind all threads of this process, and those that they will start, to the cores of the memory node `numa` that it
    may use. Returns these cores. Changes nothing and returns none if the node is unknown, if all cores are of it, or if
    a container leaves the process less than half of its share of them."""
    if numa is None or not hasattr(os, "sched_setaffinity"):
        return frozenset()
    allowed, nodes = frozenset(os.sched_getaffinity(0)), _cores_by_node(root)
    near = nodes.get(numa, frozenset()) & allowed
    if near == allowed or 2 * len(near) * len(nodes) < len(allowed):
        return frozenset()
    try:
        for thread in _OWN_THREADS.iterdir():
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread.name), near)
    except OSError as error:
        log.warning("memory node %d: its cores cannot be chosen (%s)", numa, error)
        return frozenset()
    log.info("runs on the %d cores of memory node %d", len(near), numa)
    return near


def _cores_by_node(root: Path) -> dict[int, frozenset[int]]:
    """The cores of every memory node that has some, from sysfs."""
    found = {}
    for folder in (root / "devices" / "system" / "node").glob("node[0-9]*"):
        try:
            cores = _cores_of((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return found


def _cores_of(listed: str) -> frozenset[int]:
    """The numbers of a list of ranges, such as `0-27,56-83`."""
    ranges = [part.partition("-") for part in listed.strip().split(",") if part]
    return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))
