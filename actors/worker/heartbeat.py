"""A worker's heartbeats, sent by a thread of their own: its progress, and the answer when its generation has ended."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import ray

from actors.config import WorkersConfig
from actors.plan.types import GpuPlace
from actors.progress import LinkUse, Orders, Progress
from actors.ray_calls import get
from actors.refs import Method
from actors.worker.outgoing import Outgoing
from actors.worker.run_clock import own_clock
from actors.worker.surroundings import Surroundings
from actors.worker.work_done import Launched
from ops.comm.groups import Groups
from ops.waiting import CancelToken, Patience

log = logging.getLogger(__name__)

_ANSWER_S = 10.0
_LOOK_S = 0.5  # that a device may take to say where it is

T = TypeVar("T")


class Mailbox(Protocol):
    """The monitor as a worker knows it (`actors.pool.monitor`)."""

    @property
    def beat(self) -> Method[[Progress], Orders]: ...
    @property
    def stack(self) -> Method[[str, str], None]: ...


class Heartbeat:
    """The progress of one worker, and a thread that sends it. The task thread alone changes what is sent.

    heartbeat.start()
    cancel = heartbeat.begin(3)             # its waits end when generation 4 has begun, or when it hangs
    heartbeat.activity("dit 9f 64x96 b2 sp1 s7", "forward", step=7, predicted_s=1.2)
    heartbeat.idle()
    """

    def __init__(self, worker: str, config: WorkersConfig, monitor: Mailbox, host: str = "", node: str = "") -> None:
        """`host` and `node`: where the worker is, by the machine's name and Ray's id."""
        self._worker, self._config, self._monitor = worker, config, monitor
        self.waits_on_device = False  # waits for NCCL happen there, where only the time-out in `beat` ends them
        self.leaving = False  # a preemption notice has come
        self.groups: Groups | None = None  # of the running generation
        self.on_device: Callable[[], Launched | None] = lambda: None  # the cascade that the device is in
        self.surroundings = Surroundings(config.suspect_s)  # whether other nodes are within reach
        self._outgoing = Outgoing()
        self._logged: set[tuple[str, type[Exception]]] = set()
        self._looking: threading.Thread | None = None
        progress = Progress.of_start(worker, host, node)
        # One value, since the heartbeat thread must not see the progress of one generation with the token of another.
        self._now: tuple[Progress, CancelToken] = (progress, CancelToken())
        self._since = time.monotonic()  # of the activity; the wall clock may be set meanwhile
        self._patience = Patience(limit_s=config.collective_timeout_s, why="workers.collective_timeout_s")

    @property
    def progress(self) -> Progress:
        return self._now[0]

    @property
    def cancel(self) -> CancelToken:
        """Set when the running generation has ended."""
        return self._now[1]

    def start(self) -> None:
        """Send heartbeats from now on, as long as the process lives."""
        threading.Thread(target=self._beat_for_ever, name="heartbeat", daemon=True).start()

    def begin(self, generation: int) -> CancelToken:
        """The worker enters this generation; the token of the one before it ends."""
        self.groups = None
        self.surroundings.leave()
        self._now = (replace(self.progress, generation=generation), CancelToken())
        return self.cancel

    def activity(
        self, activity: str, phase: str, step: int, predicted_s: float, patience: Patience | None = None
    ) -> None:
        """What the worker does from now on, how long it should take, and when it counts as hung."""
        # These first: the heartbeat thread must not see a new activity with an old time or limit.
        self._since = time.monotonic()
        self._patience = patience or Patience(
            limit_s=self._config.collective_timeout_s, why="workers.collective_timeout_s"
        )
        self._set(
            replace(
                self.progress,
                activity=activity,
                phase=phase,
                step=step,
                since=own_clock.now(),
                predicted_s=predicted_s,
                limit_s=self._patience.limit_s,
            )
        )

    def phase(self, phase: str) -> None:
        """The part of the activity that begins now."""
        self._set(replace(self.progress, phase=phase))

    def sits(self, place: GpuPlace) -> None:
        """Where the worker's GPU is."""
        self._set(replace(self.progress, place=place))

    def idle(self) -> None:
        """The worker waits for a call. Its device may still be in a cascade whose call has returned."""
        self._since = time.monotonic()
        self._set(
            replace(self.progress, activity="idle", phase="idle", since=own_clock.now(), predicted_s=0.0, limit_s=0.0)
        )

    def beat(self) -> None:
        """Send one heartbeat and obey the answer. Raises Ray's errors while the monitor is being started again.

        A device that its host is ahead of is in an earlier cascade: that is what the worker does. What cannot be
        measured is logged, and the heartbeat goes out without it.
        """
        (progress, cancel), groups = self._now, self.groups
        progress = self._looked(partial(self._with_work, progress, groups), partial(_with_begun, progress, groups))
        links: tuple[LinkUse, ...] = ()
        links = self._tried("its links to other hosts", lambda: self._outgoing.look(*self.surroundings.hosts), links)
        beat = self._monitor.beat.options(max_task_retries=0)  # the next one says more, and the run may have ended
        began = own_clock.monotonic()
        orders = get(beat.remote(replace(progress, leaving=self.leaving, links=links)), timeout=_ANSWER_S)
        if orders.at:
            own_clock.heard(began, orders.at, own_clock.monotonic())
        if orders.generation > progress.generation >= 0:
            cancel.set(f"generation {orders.generation} has begun")
        elif failure := self._tried("its communicators' errors", partial(_failure_of, groups), ""):
            # On NCCL no other worker learns of it, and waits.
            cancel.set(f"{failure}, seen by a heartbeat of {self._worker}")
        elif groups is not None and self._hangs(progress):
            cancel.set(f"{progress.activity!r} of {self._worker} has not ended within {self._patience}")
        elif progress.activity != "idle":  # also while it fetches the state of a generation that has no groups yet
            planned_s = 0.0 if progress.phase == "form" else progress.predicted_s  # of a form it is what it may take
            late_s = time.monotonic() - self._since - planned_s
            self._tried("a look at other nodes", lambda: self.surroundings.look(late_s, cancel.set), None)
        if orders.dump_stack:
            self._monitor.stack.remote(self._worker, _stacks())

    def _looked(self, look: Callable[[], Progress], otherwise: Callable[[], Progress]) -> Progress:
        """What `look` finds, or `otherwise` does while the device does not answer: a heartbeat does not wait for it,
        which may be until another worker joins a collective (`ops.waiting.has_passed`)."""
        if not self.waits_on_device:
            return look()
        if self._looking is not None and self._looking.is_alive():
            return otherwise()
        found: list[Progress] = []
        self._looking = threading.Thread(target=lambda: found.append(look()), name="look at the device", daemon=True)
        self._looking.start()
        self._looking.join(_LOOK_S)
        return found[0] if found else otherwise()

    def _with_work(self, progress: Progress, groups: Groups | None) -> Progress:
        progress = self._tried("what its device does", partial(self._with_device, progress), progress)
        if groups is not None:
            progress = self._tried("its count of collectives", partial(_with_collectives, progress, groups), progress)
        return progress

    def _with_device(self, progress: Progress) -> Progress:
        if (running := self.on_device()) is None:
            return progress
        return replace(
            progress,
            activity=running.name,
            phase="device",
            step=running.step,
            since=running.since,
            predicted_s=running.predicted_s,
            limit_s=self._patience.limit_s,
        )

    def _tried(self, what: str, measure: Callable[[], T], otherwise: T) -> T:
        try:
            return measure()
        except Exception as error:  # whatever it is: a worker that sends no heartbeat is replaced
            self._log_once(what, error)
            return otherwise

    def _log_once(self, what: str, error: Exception) -> None:
        """Once for each kind of error: there is a heartbeat every second or so."""
        if (kind := (what, type(error))) not in self._logged:
            self._logged.add(kind)
            log.error("%s goes on without %s (logged once for each kind of error)", self._worker, what, exc_info=error)

    def _set(self, progress: Progress) -> None:
        self._now = (progress, self.cancel)

    def _beat_for_ever(self) -> None:
        while True:
            try:
                self.beat()
            except ray.exceptions.RayError as error:  # the monitor is being restarted
                log.debug("heartbeat of %s not delivered: %r", self._worker, error)
            except Exception as error:  # the next one may do better, and a worker without is replaced
                self._log_once("a heartbeat", error)
            time.sleep(self._config.heartbeat_s)

    def _hangs(self, progress: Progress) -> bool:
        waited = time.monotonic() - self._since
        return self.waits_on_device and progress.activity != "idle" and waited > self._patience.limit_s


def _with_collectives(progress: Progress, groups: Groups) -> Progress:
    bags = groups.progress.values()
    waiting = [bag.name for bag in bags if bag.name]
    return replace(progress, collectives=sum(bag.sequence for bag in bags), waiting_in=waiting[0] if waiting else "")


def _with_begun(progress: Progress, groups: Groups | None) -> Progress:
    """The progress without a look at the device, with the collectives that the host has begun: a count of none would be
    the lowest, which is taken for the late worker's."""
    return progress if groups is None else replace(progress, collectives=groups.begun)


def _failure_of(groups: Groups | None) -> str:
    return "" if groups is None else groups.failure


def _stacks() -> str:
    names = {t.ident: t.name for t in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
