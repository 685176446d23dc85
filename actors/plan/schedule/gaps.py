"""Encodes of later steps go into the idle gaps of a timed schedule, without moving anything in it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from actors.plan.schedule.listing import ListSchedule

EPS = 1e-9


def fill(schedule: ListSchedule, optional: Sequence[int], end_s: float, deadline: float) -> None:
    """Place jobs of `optional` that have none yet wherever enough workers of a node are idle for long enough.

    They must start before `end_s`, the end of the step, and end by it. The cheapest degree that finds a gap is taken,
    in the earliest gap. The schedule's order is by start time afterwards.
    """
    busy = _busy(schedule)
    for index in optional:
        if index in schedule.where or time.perf_counter() > deadline:
            continue
        modes = sorted((k * s, k, s) for k, s in schedule.jobs[index].modes)
        for _, degree, seconds in modes:
            found = _gap(schedule, busy, degree, seconds, end_s)
            if found is not None:
                start, workers = found
                end = start + seconds * schedule.topology.factor(workers)
                for worker in workers:
                    busy[worker].append((start, end))
                schedule.insert(index, workers, start, end)
                break
    schedule.placed.sort(key=lambda placed: schedule.begin[placed.job])


def _busy(schedule: ListSchedule) -> list[list[tuple[float, float]]]:
    """Intervals in which each worker cannot take a new job."""
    busy: list[list[tuple[float, float]]] = [
        [(-EPS, time_s)] if time_s > 0 else [] for time_s in schedule.context.free_s
    ]
    for index, workers in schedule.where.items():
        for worker in workers:
            busy[worker].append((schedule.begin[index], schedule.end[index]))
    return busy


def _gap(
    schedule: ListSchedule, busy: list[list[tuple[float, float]]], degree: int, seconds: float, end_s: float
) -> tuple[float, tuple[int, ...]] | None:
    """Earliest (start, workers) of one node, of workers with little idle time to lose."""
    best: tuple[float, tuple[int, ...]] | None = None
    for workers in schedule.topology.workers:
        if len(workers) < degree:
            continue
        starts = sorted(
            {end for w in workers for _, end in busy[w]} | {min(schedule.context.free_s[w] for w in workers)}
        )
        for start in starts:
            if start + seconds > end_s + EPS or (best is not None and start >= best[0]):
                break
            idle = [
                w
                for w in workers
                if all(end <= start + EPS or begin >= start + seconds - EPS for begin, end in busy[w])
            ]
            idle = [w for w in idle if schedule.topology.speed[w] == 1.0] if not schedule.topology.uniform else idle
            if len(idle) >= degree:
                best = (start, tuple(idle[:degree]))
                break
    return best
