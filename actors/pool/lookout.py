"""Turns what Ray and the heartbeats show into events of the membership: which workers are ready, lost, silent or
leaving."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import ray

from actors.clock import PatientClock
from actors.config import WorkersConfig
from actors.messages import FailedStart, HostGpu, WorkerInfo
from actors.outcome import Tell
from actors.pool.heartbeats import Watch, first_late
from actors.pool.links import LinkWatch, SlowLink, shared_end
from actors.pool.membership_types import (
    Arrival,
    Event,
    LeaveNotice,
    LifeSign,
    Loading,
    Resize,
    Resources,
    Shortfall,
    Suspect,
)
from actors.pool.monitor import MonitorHandle, MonitorReport, OperatorRequests
from actors.pool.unheard import UnheardStarts
from actors.pool.workers import PoolNews, kill_process, uses_gpu
from actors.progress import LOADING, Progress
from actors.ray_calls import GONE, draining_nodes, free_outside, get, has_come, kill, node_of_process
from actors.records.events import (
    LinkSlow,
    MonitorRestarted,
    MonitorSilent,
    PoolResized,
    StackDumped,
    WorkerLeaving,
    WorkerLost,
    WorkerReady,
    WorkerSilent,
    WorkerStalled,
)
from actors.refs import Ref
from ops.counted import counted
from ops.units import MIB

log = logging.getLogger(__name__)

_ANSWER_S = 1.0  # the monitor answers at once; no step waits longer for one that does not
_FETCH_S = 5.0  # for what it has answered, which may be large and lie on another node
_LEAST_SILENCE_S = 10.0  # it is being started again, or the machine is busy
_SHARE_OF_WAIT = 0.75  # of workers.wait_s, for a process to begin to load; what is left is for another's
FAILED_STARTS = 3  # in a row; one may be its node's fault, several will not end by trying again


class Starts(Protocol):
    """What is looked at of a pool (`actors.pool.workers.Pool`)."""

    shunned: tuple[str, ...]

    @property
    def pending(self) -> list[str]: ...
    @property
    def misplaced(self) -> list[str]: ...
    @property
    def names(self) -> list[str]: ...
    def poll(self) -> PoolNews: ...
    def remove(self, name: str) -> None: ...
    def hosting(self, name: str) -> HostGpu | None: ...


class Lookout:
    """Looks once per call and never waits for a worker. `tell` is given the events that people read."""

    def __init__(
        self,
        config: WorkersConfig,
        pool: Starts,
        monitor: MonitorHandle,
        tell: Tell,
        start_s: float = 600.0,
        keep_size: Callable[[int], None] = lambda workers: None,
    ) -> None:
        """`start_s` is how long a worker may take to load its modules. `keep_size` is given each size that somebody
        asks for, which has to outlive this process and the monitor."""
        self._start_s, self._keep_size = start_s, keep_size
        self._kept_size: int | None = None
        self._config, self._pool, self._monitor, self._tell = config, pool, monitor, tell
        self._watch, self._links, self._unheard = Watch(config), LinkWatch(), UnheardStarts(pool.hosting)
        self._target = config.max
        self._failed_starts = self._loading = 0
        self.hopeless = ""  # why no further start is worth trying
        self.stop = ""  # why somebody wants the run to end
        self.frozen: dict[str, str] = {}  # digests of the weights that the run has trained with, by part
        self._doing: dict[str, Progress] = {}  # at the last look
        self._draining: frozenset[str] = frozenset()  # ids of nodes that are about to leave the cluster
        self._question: Ref[MonitorReport] | None = None  # what the monitor has not answered yet
        self._silent_since: float | None = None  # seconds; None: the monitor has answered
        # how long the monitor may be silent; twice as long after each new start
        self._bears_s = max(config.suspect_s, _LEAST_SILENCE_S)
        self._monitors_process = (0, "")  # pid, and when it was born
        self._clock = PatientClock()
        # What a restarted monitor must get.
        self._life, self._generation, self._wishes = "", -1, OperatorRequests()

    def look(self) -> list[Event]:
        """Everything that has changed since the last look, in an order the membership can take."""
        self._draining = self._leaving_nodes()
        events = self._starts()
        report = self._report()
        if report is not None:
            events += [
                *self._hanging_starts(report),
                *self._unheard_starts(report),
                *self._recalled(report),
                *self._loads(report),
                *self._heartbeats(report),
                *self._wish(report),
            ]
        return [*events, Resources(available=self._room())]

    def try_again(self) -> None:
        """Forget failed starts: a worker has started, or the pool has become smaller, so they say nothing any more."""
        self._failed_starts, self.hopeless = 0, ""

    def last_heard(self, name: str) -> str:
        """What a worker was doing at its last heartbeat, to name the cascade that may have ended it: since then it may
        have begun others, of later steps. "" where nothing is known."""
        progress = self._doing.get(name)
        if progress is None or progress.step < 0:
            return ""
        return f"last heard of{_doing(progress)}"

    def late(self) -> str:
        """The worker that the others were waiting for when they were last heard of."""
        busy = [progress for progress in self._doing.values() if progress.activity != "idle" and progress.step >= 0]
        first = first_late(busy)
        return f"; last heard of {first.worker}{_doing(first)}" if first is not None else ""

    def _report(self) -> MonitorReport | None:
        """The monitor's report, or None while it does not answer; a new one gets what the old one knew. Only the first
        look waits for an answer, the next ones see whether it has come. Raises RuntimeEnvSetupError, by which the next
        controller makes another monitor."""
        asked, self._question = self._question, self._question or self._monitor.collect.remote()
        try:
            if asked is not None and not has_come(asked):
                raise ray.exceptions.GetTimeoutError
            # A large report of another node never comes where it is given no time to be fetched.
            report = get(self._question, timeout=_FETCH_S if asked is not None else _ANSWER_S)
        except ray.exceptions.RuntimeEnvSetupError:
            raise  # Ray gives such an actor up, whatever its restarts: none would come, however long it is waited for
        except (*GONE, ray.exceptions.GetTimeoutError) as error:
            if not isinstance(error, ray.exceptions.GetTimeoutError):
                self._question = None
            self._bear_silence(type(error).__name__)
            return None
        self._question = self._silent_since = None
        self._bears_s = max(self._config.suspect_s, _LEAST_SILENCE_S)
        self._monitors_process = report.pid, report.born
        if self._life and report.life != self._life:
            self._monitor.restore.remote(self._generation, self._wishes)
            self._tell(MonitorRestarted())
        else:
            self._generation, self._wishes = max(self._generation, report.generation), report.wishes
        self._life, self.stop = report.life, self._wishes.stop
        return report

    def _bear_silence(self, why: str) -> None:
        """The monitor does not answer. After a while it is ended: Ray starts it again."""
        now = self._clock.now()
        if self._silent_since is None:
            self._silent_since = now
            log.warning("the monitor does not answer: %s", why)
        silent_s = now - self._silent_since
        if silent_s < self._bears_s:
            return
        self._tell(MonitorSilent(seconds=round(silent_s, 1)))
        self._silent_since, self._bears_s = now, 2 * self._bears_s
        self._question = None  # the new one is asked anew
        kill(self._monitor, no_restart=False)
        pid, born = self._monitors_process
        if pid and (node := node_of_process(self._monitor)):  # a frozen one does not hear Ray
            kill_process(node, pid, born)

    def _starts(self) -> list[Event]:
        news = self._pool.poll()
        events: list[Event] = []
        for info in news.ready:
            if why := self._other_weights(info):
                self._pool.remove(info.worker)
                where = HostGpu(node=info.node, host=info.host)  # files are the node's, whichever its GPU
                events.append(self._failed_start(FailedStart(worker=info.worker, why=why, where=where)))
                continue
            self.try_again()
            self._tell(WorkerReady(worker=info.worker, node=info.node, pid=info.pid, host=info.host))
            events.append(Arrival(worker=worker_number(info.worker), info=info))
        return events + [self._failed_start(failed) for failed in news.failed]

    def _other_weights(self, info: WorkerInfo) -> str:
        """Why a worker that has loaded must not train with the others; "": it may."""
        parts = [part for part, digest in info.frozen if self.frozen.get(part, digest) != digest]
        why = f"the weights of {', '.join(parts)} are not those that the run trains with. Give all nodes the same files"
        return f"{info.host}: {why}" if parts else ""

    def _failed_start(self, failed: FailedStart) -> Event:
        """Where storage did not answer, as to all workers that load at once, the start says nothing of the next ones:
        while it stays away the run ends resumable, as one that has too few workers for too long."""
        self._failed_starts += not failed.passes
        if self._failed_starts >= FAILED_STARTS and not failed.passes:
            self.hopeless = f"{counted(self._failed_starts, 'worker')} in a row failed to start: {failed.why}"
        return self._given_up(failed)

    def _given_up(self, failed: FailedStart) -> Event:
        log.warning("worker %s did not start: %s", failed.worker, failed.why)
        self._monitor.remove.remote(failed.worker)  # it may have sent heartbeats
        self._tell(WorkerLost(worker=failed.worker, why=failed.why))
        return Shortfall(count=1, failed=failed)

    def _hanging_starts(self, report: MonitorReport) -> list[Event]:
        """Starts that take too long. A worker sends heartbeats as soon as its process runs, also while it loads its
        modules; one that still waits for resources sends none."""
        events: list[Event] = []
        for name in self._pool.pending:
            seen = report.seen.get(name)
            if seen is not None and seen.progress.activity == LOADING and report.now - seen.since > self._start_s:
                self._pool.remove(name)
                why = f"it still loads its modules after {self._start_s:.0f} s (workers.start_s)"
                events.append(self._failed_start(FailedStart(worker=name, why=why)))
        return events

    def _unheard_starts(self, report: MonitorReport) -> list[Event]:
        """Starts that hang before their first heartbeat. They do not count as failed ones, many of which are hopeless:
        where all hang the run ends resumable, as one that has too few workers for too long. One that has too few tries
        others before."""
        unheard = [name for name in self._pool.pending if name not in report.seen]
        # `wait_s` does not run either while workers load that would be enough.
        enough = len(self._pool.names) - len(unheard) >= self._config.min
        patience_s = self._start_s if enough else min(self._start_s, _SHARE_OF_WAIT * self._config.wait_s)
        hanging = self._unheard.look(unheard, patience_s, self._clock.now())
        for failed in hanging:
            self._pool.remove(failed.worker)
        return [self._given_up(failed) for failed in hanging]

    def _recalled(self, report: MonitorReport) -> list[Event]:
        """Workers that still wait for resources, and were asked for while other nodes were shunned than now: they are
        asked for again, if still wanted. Ray does not move them."""
        return self._recall([name for name in self._pool.misplaced if name not in report.seen])

    def _recall(self, waiting: Sequence[str]) -> list[Event]:
        """Take back the requests for these workers, which still wait for resources."""
        for name in waiting:
            self._pool.remove(name)
            self._monitor.remove.remote(name)
        return [Shortfall(count=len(waiting))] if waiting else []

    def _loads(self, report: MonitorReport) -> list[Event]:
        seen = [report.seen[name].progress for name in self._pool.pending if name in report.seen]
        before, self._loading = self._loading, sum(progress.activity == LOADING for progress in seen)
        return [Loading(count=self._loading)] if self._loading != before else []

    def _heartbeats(self, report: MonitorReport) -> list[Event]:
        names, pending = self._pool.names, set(self._pool.pending)
        members = set(names)
        self._doing = {name: seen.progress for name, seen in report.seen.items() if name in members}
        found = self._watch.look(report, [name for name in names if name not in pending], self._draining)
        events: list[Event] = []
        for name in found.silent:
            self._tell(WorkerSilent(worker=name))
            reason = f"silent for {self._config.suspect_s:g} s"
            events.append(Suspect(worker=worker_number(name), reason=reason))
        events += [LifeSign(worker=worker_number(name)) for name in found.heard]
        for name in found.leaving:
            self._tell(WorkerLeaving(worker=name))
            events.append(LeaveNotice(worker=worker_number(name)))
        if found.stall is not None:
            log.warning("%s", found.stall)
            self._tell(WorkerStalled(detail=str(found.stall), worker=found.stall.first_late.worker))
            self._monitor.ask_stacks.remote((found.stall.first_late.worker,))
        for name, stack in report.stacks.items():
            self._tell(StackDumped(worker=name, stack=stack))
        uses = (use for progress in self._doing.values() for use in progress.links)
        if slow := self._links.look(uses, report.now):
            self._tell(_told_of(slow))
        return events

    def _wish(self, report: MonitorReport) -> list[Event]:
        """The size that somebody asked for, within the limits of the run. Where it is smaller, workers that still wait
        for resources are the first to go: they would take those that others give back, load, and be let go."""
        wish = self._wishes.target
        if wish is not None and wish != self._kept_size:
            self._kept_size = wish
            self._keep_size(wish)
        target = self._config.max if wish is None else min(max(wish, self._config.min), self._config.max)
        if target == self._target:
            return []
        self._target = target
        self._tell(PoolResized(target=target))
        waiting = [name for name in self._pool.pending if name not in report.seen]
        surplus = max(0, len(self._pool.names) - target)
        return [Resize(min=self._config.min, max=target), *self._recall(waiting[::-1][:surplus])]

    def _leaving_nodes(self) -> frozenset[str]:
        return draining_nodes()

    def _room(self) -> int:
        """How many more workers the cluster could start right now, on nodes that are not shunned and stay."""
        free = free_outside([*self._pool.shunned, *self._draining])
        room = int(free.get("CPU", 0) / self._config.cpus_per_worker + 1e-6)
        if uses_gpu(self._config):
            room = min(room, int(free.get("GPU", 0)))
        return max(0, room - len(self._pool.pending))


def _doing(progress: Progress) -> str:
    if progress.activity == "idle":
        return f" idle, after step {progress.step} or in it"
    return f" in {progress.activity!r} (phase {progress.phase}) of step {progress.step}"


def _told_of(slow: Sequence[SlowLink]) -> LinkSlow:
    """One event for all, by the first of them: a host in a large cluster may have a hundred slow links."""
    first = slow[0]
    return LinkSlow(
        host=first.host,
        other=first.other,
        mib_per_s=round(first.rate / MIB, 2),
        usual_mib_per_s=round(first.usual / MIB, 2),
        busy_s=round(first.busy_s, 1),
        over_s=round(first.over_s, 1),
        more=len(slow) - 1,
        end=shared_end(slow) if len(slow) > 1 else "",
    )


def worker_number(name: str) -> int:
    """The number of a worker in the membership: that of w7, as people and actors name it, is 7."""
    return int(name.removeprefix("w"))


def worker_name(number: int) -> str:
    return f"w{number}"
