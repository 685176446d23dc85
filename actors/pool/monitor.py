"""The post box between workers, controller and command line: heartbeats in, orders out.

It decides nothing (that is `actors.pool.membership`); it exists because the controller is busy and a worker must be
heard while its one task thread waits inside a collective. Lost with its node, it is started again empty: the controller
sees another `life` and repeats generation and wishes, the workers repeat their heartbeats.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Protocol

from actors.process import birth
from actors.progress import Orders, Progress
from actors.refs import Method
from ops.sending import sent_often


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class LastHeartbeat:
    """A worker's last heartbeat, when it arrived, and when the first one with this activity did.

    Seconds on the monitor's monotonic clock: the workers' own clocks may be set anew, and differ from node to node.
    """

    progress: Progress
    at: float
    since: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorRequests:
    """What people asked for on the command line since the run began."""

    target: int | None = None  # number of workers; None: as many as workers.max allows
    drain: tuple[str, ...] = ()  # workers that shall leave
    stop: str = ""  # why the run shall end, resumable; empty: it goes on


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorReport:
    """What the controller reads in one call."""

    seen: dict[str, LastHeartbeat]
    wishes: OperatorRequests
    stacks: dict[str, str] = field(default_factory=dict)
    now: float = 0.0  # on the same clock as `seen`
    generation: int = -1  # the newest one announced
    life: str = ""  # changes when the monitor was started anew
    trouble: str = ""  # what the run waits for and a person can help with, where its files cannot say it
    pid: int = 0  # of the monitor
    born: str = ""  # with the pid the process itself: see actors.process


class MonitorHandle(Protocol):
    """The monitor as the controller knows it."""

    @property
    def begin(self) -> Method[[], MonitorReport]: ...
    @property
    def collect(self) -> Method[[], MonitorReport]: ...
    @property
    def announce(self) -> Method[[int], None]: ...
    @property
    def restore(self) -> Method[[int, OperatorRequests], None]: ...
    @property
    def ask_stacks(self) -> Method[[tuple[str, ...]], None]: ...
    @property
    def remove(self) -> Method[[str], None]: ...
    @property
    def stopped(self) -> Method[[], None]: ...
    @property
    def say(self) -> Method[[str], None]: ...
    @property
    def beat(self) -> Method[[Progress], Orders]: ...
    @property
    def stack(self) -> Method[[str, str], None]: ...


class Monitor:
    """Plain class; `actors.pool.workers.start_monitor` makes the actor of it."""

    def __init__(self) -> None:
        self._life, self._born = uuid.uuid4().hex, birth(os.getpid())
        self._seen: dict[str, LastHeartbeat] = {}
        self._gone: set[str] = set()  # a last heartbeat may be on its way while the process is ended
        self._generation = -1
        self._wishes = OperatorRequests()
        self._dump: set[str] = set()
        self._stacks: dict[str, str] = {}
        self._trouble = ""

    def beat(self, progress: Progress) -> Orders:
        """Called by a worker's heartbeat thread."""
        now, last = time.monotonic(), self._seen.get(progress.worker)
        goes_on = last is not None and _activity(last.progress) == _activity(progress)
        since = last.since if last is not None and goes_on else now
        if progress.worker not in self._gone:
            self._seen[progress.worker] = LastHeartbeat(progress=progress, at=now, since=since)
        dump = progress.worker in self._dump
        self._dump.discard(progress.worker)
        return Orders(generation=self._generation, dump_stack=dump, at=time.time())

    def stack(self, worker: str, text: str) -> None:
        self._stacks[worker] = text

    def announce(self, generation: int) -> None:
        """Called by the controller when a generation begins: everything older must end now."""
        self._generation = max(self._generation, generation)

    def begin(self) -> MonitorReport:
        """Called by a controller that takes the run over. Its workers are new and may have the names of earlier ones,
        whose heartbeats and leaves are dropped. A requested size and a requested stop stay."""
        self._seen, self._gone, self._stacks, self._dump, self._trouble = {}, set(), {}, set(), ""
        self._wishes = replace(self._wishes, drain=())
        return self.report()

    def report(self) -> MonitorReport:
        """What is known, for any caller."""
        return MonitorReport(
            seen=dict(self._seen),
            wishes=self._wishes,
            stacks=dict(self._stacks),
            now=time.monotonic(),
            generation=self._generation,
            life=self._life,
            trouble=self._trouble,
            pid=os.getpid(),
            born=self._born,
        )

    def collect(self) -> MonitorReport:
        """The same for the controller, which takes the stacks along."""
        report = self.report()
        self._stacks = {}
        return report

    def ask_stacks(self, workers: tuple[str, ...]) -> None:
        """Have these workers send their stacks with the next heartbeat."""
        self._dump.update(workers)

    def restore(self, generation: int, wishes: OperatorRequests) -> None:
        """Called by the controller when this monitor was restarted: what people asked for before still holds."""
        self.announce(generation)
        drain = tuple(dict.fromkeys((*wishes.drain, *self._wishes.drain)))
        target = wishes.target if self._wishes.target is None else self._wishes.target
        self._wishes = OperatorRequests(target=target, drain=drain, stop=self._wishes.stop or wishes.stop)

    def remove(self, worker: str) -> None:
        """The worker is gone; a request that it leave is met, and nobody waits for one that was heard late."""
        self._seen.pop(worker, None)
        self._gone.add(worker)
        self._wishes = replace(self._wishes, drain=tuple(w for w in self._wishes.drain if w != worker))

    def drain(self, workers: tuple[str, ...]) -> None:
        """`heddle workers drain NAME`: these finish what runs, hand over and go."""
        self._wishes = replace(self._wishes, drain=tuple(dict.fromkeys((*self._wishes.drain, *workers))))

    def scale(self, target: int) -> None:
        """`heddle workers scale N`: keep N workers from now on, within workers.min and workers.max."""
        self._wishes = replace(self._wishes, target=target)

    def stop(self, reason: str) -> None:
        """`heddle workers stop`, Ctrl-C: finish the running steps, write a checkpoint, end with code 75."""
        self._wishes = replace(self._wishes, stop=reason)

    def stopped(self) -> None:
        """Called by the controller at its end: the request to stop is met, the next controller goes on."""
        self._wishes = replace(self._wishes, stop="")

    def say(self, trouble: str) -> None:
        """Called by the controller: what the run waits for; "": for nothing any more."""
        self._trouble = trouble

    def trouble(self) -> str:
        """What the controller said last, for whoever shows the run to a person."""
        return self._trouble

    def ping(self) -> bool:
        return True


def _activity(progress: Progress) -> tuple[str, int, float]:
    """Identifies one stretch of work. `since` is only a part of its name: the worker's clock may have been set."""
    return progress.activity, progress.step, progress.since
