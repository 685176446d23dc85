"""Part (m) of `heddle bench runtime`: is memory flat? Short steps of the tiny model on two workers, snapshots on.

Private memory of the workers and of the controller's process, the shared memory that they have mapped (pages of the
object store, which count as resident once touched), and the bytes in the object stores of all nodes are read after a
tenth of the steps, when caches and pools have filled, in the middle, and at the end.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.bench.lab import Lab, LabRun


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """MiB after a number of steps."""

    step: int
    workers: tuple[float, ...]  # private
    controller: float  # private
    mapped: tuple[float, ...]  # shared pages of the workers, then of the controller
    object_store: float
    open_files: tuple[int, ...]  # of the workers


def measure(lab: Lab, steps: int) -> list[MemoryUse]:
    """Run `steps` steps and read the memory three times."""
    lab.add_node(workers=2)
    planner = {"strategy": "cascade", "budget_s": 0.01}
    run = lab.start(lab.config("memory", train={"steps": steps}, workers={"min": 2, "max": 2}, planner=planner))
    found = [_look(run, step) for step in (max(1, steps // 10), steps // 2, steps - 2)]
    outcome = run.join(600)
    if outcome.code:
        raise RuntimeError(f"the run ended early: {outcome.reason}")
    return found


def table(found: Sequence[MemoryUse]) -> str:
    lines = [
        "| MiB after step | workers | controller | of the object store mapped by them | object stores | open files |",
        "|---|---|---|---|---|---|",
    ]
    for use in found:
        workers = ", ".join(f"{w:.0f}" for w in use.workers)
        mapped = ", ".join(f"{m:.0f}" for m in use.mapped)
        files = ", ".join(str(n) for n in use.open_files)
        lines.append(f"| {use.step} | {workers} | {use.controller:.0f} | {mapped} | {use.object_store:.1f} | {files} |")
    return "\n".join(lines)


def _look(run: LabRun, step: int) -> MemoryUse:
    """Wait for the step, then read."""
    run.wait_for_step(step, math.inf)  # of thousands of steps it takes hours, and a run that has ended is noticed
    pids = [pid for _, pid in run.active()]
    return MemoryUse(
        step=run.metrics[-1].step,
        workers=tuple(_resident_mib(pid, "RssAnon") for pid in pids),
        controller=_resident_mib(os.getpid(), "RssAnon"),
        mapped=tuple(_resident_mib(pid, "RssShmem") for pid in (*pids, os.getpid())),
        object_store=object_store_mib(),
        open_files=tuple(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
    )


def _resident_mib(pid: int, kind: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 2**10


def object_store_mib() -> float:
    """MiB in the object stores of all nodes, from the raylets themselves; a node that has just died has none."""
    import grpc
    from ray._private.internal_api import node_stats

    from actors.ray_calls import nodes

    used = 0
    for node in nodes():
        if node["Alive"]:
            address = node["NodeManagerAddress"], node["NodeManagerPort"]
            try:
                stats = node_stats(*address, include_memory_info=False)
            except grpc.RpcError:
                continue
            used += stats.store_stats.object_store_bytes_used
    return used / 2**20
