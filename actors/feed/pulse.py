"""Whether an actor that is busy for minutes still runs: a call that it answers in a thread of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from actors import process
from actors.clock import PatientClock
from actors.ray_calls import get, node_id, wait
from actors.refs import Ref

log = logging.getLogger(__name__)

PULSE = "pulse"  # the concurrency group in which an actor answers


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessId:
    """One process of a cluster."""

    node: str
    pid: int
    born: str  # see actors.process


class AnsweringActor:
    """Base of an actor's class."""

    def pulse(self) -> ProcessId:
        """The process of this actor. Call it in the group `PULSE`, so that no call that takes its time holds it up."""
        return ProcessId(node=node_id(), pid=os.getpid(), born=process.birth(os.getpid()))


class Silent(Exception):
    """A process has answered nothing for too long: it is stopped, or its machine hangs."""


class Pulse:
    """Asks a feeder, a question at a time. Nothing is held against a feeder before its first answer, since it may
    wait for room, nor for the time in which there was no look."""

    def __init__(self, ask: Callable[[], Ref[ProcessId]], silent_s: float) -> None:
        self._ask, self._silent_s = ask, silent_s
        self._clock = PatientClock()
        self._asked: Ref[ProcessId] = ask()
        self._asked_at = self._clock.now()
        self._warned = False
        self.stopped: ProcessId | None = None  # what was found silent; it hears nothing, so only a signal ends it
        self._process: ProcessId | None = None  # known from the first answer on

    def check(self) -> None:
        """Look without waiting. Raises Silent, and what Ray raises of an actor that is gone."""
        now = self._clock.now()
        if wait([self._asked], timeout=0)[0]:
            self._process = get(self._asked)
            self._asked, self._asked_at, self._warned = self._ask(), now, False
            return
        silent = now - self._asked_at
        if self._process is None or silent < self._silent_s / 2:
            return
        if silent >= self._silent_s:
            self.stopped = self._process
            raise Silent(f"the feeder has answered nothing for {silent:.0f} s (process {self._process.pid})")
        if not self._warned:
            self._warned = True
            log.warning(
                "the feeder (process %d) has answered nothing for %.0f s; after %.0f s it is replaced",
                self._process.pid,
                silent,
                self._silent_s,
            )
