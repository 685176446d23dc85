"""Encodes of later steps go into the idle gaps of a timed schedule, without moving anything in it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from actors.plan.schedule.listing import Lister

EPS = 1e-9


def fill(lister: Lister, optional: Sequence[int], end_s: float, deadline: float) -> None:
    """Place jobs of `optional` that have none yet wherever enough workers of a node are idle for long enough.

    They must start before `end_s`, the end of the step, and end by it. The cheapest degree that finds a gap is taken,
    in the earliest gap. The lister's order is by start time afterwards.
    """
    busy = _busy(lister)
    for index in optional:
        if index in lister.where or time.perf_counter() > deadline:
            continue
        modes = sorted((k * s, k, s) for k, s in lister.jobs[index].modes)
        for _, degree, seconds in modes:
            found = _gap(lister, busy, degree, seconds, end_s)
            if found is not None:
                start, workers = found
                end = start + seconds * lister.topology.factor(workers)
                for worker in workers:
                    busy[worker].append((start, end))
                lister.insert(index, workers, start, end)
                break
    lister.placed.sort(key=lambda placed: lister.begin[placed.job])


def _busy(lister: Lister) -> list[list[tuple[float, float]]]:
    """Intervals in which each worker cannot take a new job."""
    busy: list[list[tuple[float, float]]] = [[(-EPS, time_s)] if time_s > 0 else [] for time_s in lister.initial]
    for index, workers in lister.where.items():
        for worker in workers:
            busy[worker].append((lister.begin[index], lister.end[index]))
    return busy


def _gap(
    lister: Lister, busy: list[list[tuple[float, float]]], degree: int, seconds: float, end_s: float
) -> tuple[float, tuple[int, ...]] | None:
    """Earliest (start, workers) of one node, of workers with little idle time to lose."""
    best: tuple[float, tuple[int, ...]] | None = None
    for workers in lister.topology.workers:
        if len(workers) < degree:
            continue
        starts = sorted({end for w in workers for _, end in busy[w]} | {min(lister.initial[w] for w in workers)})
        for start in starts:
            if start + seconds > end_s + EPS or (best is not None and start >= best[0]):
                break
            idle = [
                w
                for w in workers
                if all(end <= start + EPS or begin >= start + seconds - EPS for begin, end in busy[w])
            ]
            idle = [w for w in idle if lister.topology.speed[w] == 1.0] if not lister.topology.uniform else idle
            if len(idle) >= degree:
                best = (start, tuple(idle[:degree]))
                break
    return best
