"""Reads heartbeats and says which workers are silent, leaving or late. Pure: report and time in, findings out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from actors.config import WorkersConfig
from actors.pool.monitor import LastHeartbeat, MonitorReport
from actors.progress import ASIDE, Progress

_LEAST_STALL_S = 30.0  # predictions of short cascades are off by more than any factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """Work that goes far beyond its prediction. `first_late` is the worker that the others wait for."""

    first_late: Progress
    running_s: float
    waiting: tuple[str, ...]  # workers that wait in a collective meanwhile

    def __str__(self) -> str:
        late, waiting = self.first_late, ", ".join(self.waiting) or "nobody"
        if not late.predicted_s and late.waiting_in:
            return (
                f"stall: all workers wait for each other's packets in {late.activity!r} (phase {late.phase}), for "
                f"{self.running_s:.1f} s, at most {late.limit_s:g} s; the fewest exchanges have ended on {late.worker}"
            )
        verb = "wait" if len(self.waiting) > 1 else "waits"
        until = f", at most {late.limit_s:g} s" if late.limit_s else ""
        planned = f"planned {late.predicted_s:.1f} s" if late.predicted_s else "beside the plan"
        return (
            f"stall: {late.worker} has been in {late.activity!r} (phase {late.phase}, step {late.step}) for "
            f"{self.running_s:.1f} s, {planned}; {waiting} {verb} for it{until}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What one look at the heartbeats has shown."""

    silent: tuple[str, ...] = ()
    heard: tuple[str, ...] = ()  # suspected before, heard again
    leaving: tuple[str, ...] = ()
    stall: Stall | None = None


@dataclass
class Watch:
    """Remembers which workers it has already reported."""

    config: WorkersConfig
    _life: str = field(default="", init=False)  # of the monitor
    _expected_at: dict[str, float] = field(default_factory=dict, init=False)  # when each member was first looked for
    _suspected: set[str] = field(default_factory=set, init=False)
    _leaving: set[str] = field(default_factory=set, init=False)
    _stalled: set[tuple[str, float]] = field(default_factory=set, init=False)

    def look(self, report: MonitorReport, members: Collection[str], draining: Collection[str] = ()) -> Findings:
        """`members` are the workers that should be heard of; silence counts from the first look for one. A monitor that
        was started again, maybe on another host, has heard of none yet, and has a clock of its own. Workers of the
        nodes `draining` leave as those that announce it."""
        if report.life != self._life:
            self._life, self._expected_at = report.life, {}
        seen = {name: report.seen[name] for name in members if name in report.seen}
        self._expected_at = {name: self._expected_at.get(name, report.now) for name in members}
        heard_at = {name: seen[name].at if name in seen else self._expected_at[name] for name in members}
        silent = {name for name, at in heard_at.items() if report.now - at > self.config.suspect_s}
        fresh = silent - self._suspected
        heard = self._suspected - silent
        self._suspected = silent
        leaving = {name for name, s in seen.items() if s.progress.leaving or s.progress.node in draining}
        leaving |= set(report.wishes.drain) & set(members)
        news = leaving - self._leaving
        self._leaving = leaving
        return Findings(
            silent=tuple(sorted(fresh)),
            heard=tuple(sorted(heard & set(members))),
            leaving=tuple(sorted(news)),
            stall=self._stall(list(seen.values()), report.now),
        )

    def _stall(self, all_seen: list[LastHeartbeat], now: float) -> Stall | None:
        """The late one among the busy: not waiting in a collective, or else with the fewest collectives done."""
        age = {seen.progress.worker: now - seen.since for seen in all_seen}
        all_progress = [seen.progress for seen in all_seen]
        self._stalled &= {(p.worker, p.since) for p in all_progress}
        newest = max((p.generation for p in all_progress), default=-1)
        awaited = _awaited_at_end([p for p in all_progress if p.generation == newest])
        busy = [
            p
            for p in all_progress
            if (p.predicted_s > 0 or p.worker in awaited)
            and age[p.worker] > max(_LEAST_STALL_S, self.config.stall_factor * p.predicted_s)
        ]
        first = first_late(busy)
        if first is None or (first.worker, first.since) in self._stalled:
            return None
        self._stalled.add((first.worker, first.since))
        waiting = tuple(p.worker for p in all_progress if p.waiting_in and p.worker != first.worker)
        return Stall(first_late=first, running_s=age[first.worker], waiting=waiting)


def _awaited_at_end(present: Collection[Progress]) -> set[str]:
    """Workers for which the end of a step waits, of which nothing is predicted: all where all wait in it, or those in a
    turn of an aside where some wait in it and none has work of the plan left."""
    if all(p.waiting_in and p.step >= 0 for p in present):
        return {p.worker for p in present}
    if any(p.predicted_s > 0 for p in present) or not any(p.waiting_in for p in present):
        return set()
    return {p.worker for p in present if p.phase == ASIDE}


def first_late(busy: Collection[Progress]) -> Progress | None:
    """The worker that the others wait for: one that waits in no collective itself, or else the one with the fewest
    done."""
    return min(busy, key=lambda p: (bool(p.waiting_in), p.collectives, p.worker), default=None)
