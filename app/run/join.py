"""`heddle workers join`: a machine that is lent to a run for a while, as by a batch system or a spot market.

It belongs to the run's Ray cluster as long as that lives, waits for the next one when the run starts anew, and goes
with the run. When it is to leave (SIGTERM, SIGUSR1, Ctrl-C), Ray starts nothing more here, the workers on it
finish the steps that they were given, and no committed step is lost.

A batch system tells all processes of a job at once. Ray's own would end at that and take the workers along: they are
started with these signals blocked. Workers hear SIGTERM (`Worker._on_sigterm`).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from actors.outcome import Exit
from app.run.cluster import ClusterAddress, check_address
from app.run.operator import lives
from app.run.outcomes import read_outcome
from app.run.ray_files import check_no_sessions, remove_ray_files
from app.run.signals import signals_wait, unwinds_on_signal
from app.settings.terminal import say
from ops.cores import usable_cores

if TYPE_CHECKING:
    from actors.refs import RayNode
    from app.run.operator import OperatorHandle

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_LOOK_S = 2.0  # between looks for a cluster
_WATCH_S = 0.5  # between looks at the node
_HEED_S = 0.1  # until a notice is noticed
_ANSWER_S = 30.0
_SHORT_S, _SHORT_STARTS = 30.0, 3  # starts in a row that end sooner than this: after as many it is not tried again
_ENDS_S, _ENDS_LOOK_S = 10.0, 0.05  # that processes have to end after SIGKILL, and between looks
_SAID = 2000  # letters of what Ray said last
_ENDED_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Joining:
    """What is joined, and how patiently."""

    run: Path | None = None  # whose cluster.json names the cluster
    cluster: str | None = None  # HOST:PORT, where no run does
    address: str = ""  # of this machine, as the others reach it; empty: that from which it reaches the cluster
    wait_s: float = 3600.0  # for a cluster to answer
    leave_s: float = 120.0  # for workers to finish
    to_the_end: bool = False  # of the cluster: signals are those of the run, which ends by them
    temp_dir: Path | None = None  # of Ray's files here, which go at the end; None: where the head has its own


def join_until_told(joining: Joining, *, ended_s: float = _ENDED_S) -> int:
    """Returns the exit code: 0 when told to leave, or when the run has ended; 75 where no cluster came; 1 where this
    machine cannot join. `ended_s`: that a run whose cluster has gone may take to say how it ended.

    Nothing stays in `temp_dir`, but for Ray's logs where this machine could not join, or the run has failed. Raises
    ConfigError where another Ray has its files there, and for a cluster that is no address."""
    if joining.cluster is not None:
        check_address(joining.cluster, "--cluster", to_join=True)
    if joining.temp_dir is not None:
        check_no_sessions(joining.temp_dir)
    could = True
    try:
        code = _join(joining, ended_s)
        could = code != Exit.FAILURE
    except Exception:
        could = False
        raise
    finally:  # also by a signal, which is a SystemExit
        if joining.temp_dir is not None:
            remove_ray_files(joining.temp_dir, logs=could and not _has_failed(joining))
    return code


def _join(joining: Joining, ended_s: float) -> int:
    short = 0  # starts in a row that lasted no time
    # a terminal that is gone tells this process alone: Ray has a session of its own
    with unwinds_on_signal(), _told_to_leave(joining.to_the_end) as leaves:
        while True:
            found = _cluster(joining, leaves)
            if found is None:
                return Exit.OK if leaves.is_set() or _is_over(joining) else _no_cluster(joining)
            leaving = "" if joining.to_the_end else " (SIGTERM, SIGUSR1: workers finish, then this machine leaves)"
            say(f"joining {found.address}{leaving}", sys.stdout)
            with ExitStack() as held:
                with signals_wait():
                    if joining.temp_dir is not None:
                        held.callback(remove_ray_files, joining.temp_dir, logs=False)
                    node = JoinedNode(found, joining.address, joining.temp_dir)
                    held.callback(node.end)
                while node.lives and not leaves.wait(_WATCH_S):
                    pass
                if leaves.is_set():
                    _leave(found, node, joining.leave_s)
                    return Exit.OK
            short = short + 1 if node.lasted_s < _SHORT_S else 0
            if short == _SHORT_STARTS:
                say(f"error: this machine cannot join {found.address}: {node.said}", sys.stderr)
                return Exit.FAILURE
            say(f"the cluster at {found.address} is gone", sys.stdout)
            if joining.cluster is not None or _is_over(joining, ended_s, leaves):
                return Exit.OK


class _Notice:
    """What a signal's handler sets. For the lock of a `threading.Event` it would wait for good where the thread that it
    interrupts holds it."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Whether it is set by then."""
        until = time.monotonic() + seconds
        while not self._is_set and (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, _HEED_S))
        return self._is_set


@contextmanager
def _told_to_leave(never: bool) -> Iterator[_Notice]:
    """A notice that the first of the signals sets, and with `never` none; the next one does nothing more."""
    leaves = _Notice()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not never:
            leaves.set()

    earlier = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield leaves
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _cluster(joining: Joining, leaves: _Notice) -> ClusterAddress | None:
    """The cluster, once it answers; None where it does not in time, where the run has ended, or when told to leave."""
    until = time.monotonic() + joining.wait_s
    said = False
    while True:
        found = _named(joining)
        if found is not None and found.answers():
            return found
        if leaves.is_set() or time.monotonic() > until or _is_over(joining):
            return None
        if not said:
            say(f"waiting up to {joining.wait_s:g} s for {_what(joining)}", sys.stdout)
            said = True
        leaves.wait(_LOOK_S)


def _named(joining: Joining) -> ClusterAddress | None:
    if joining.cluster is not None:
        return ClusterAddress(address=joining.cluster, auth=os.environ.get("RAY_AUTH_MODE", ""))
    assert joining.run is not None, "the command line asks for one of the two"
    return ClusterAddress.read(joining.run)


def _what(joining: Joining) -> str:
    if joining.cluster is not None:
        return f"a Ray cluster at {joining.cluster}"
    return f"the run {joining.run} to live on a Ray cluster that this machine reaches"


def _is_over(joining: Joining, patience_s: float = 0.0, leaves: _Notice | None = None) -> bool:
    """Whether the run has ended for good: nobody holds its folder, and it does not ask to be continued."""
    if joining.run is None:
        return False
    until = time.monotonic() + patience_s
    while True:
        outcome = read_outcome(joining.run)
        if outcome is not None and not lives(joining.run):
            return outcome.code != Exit.RESUMABLE
        if time.monotonic() >= until or (leaves is not None and leaves.is_set()):
            return False
        time.sleep(_LOOK_S)


def _has_failed(joining: Joining) -> bool:
    outcome = read_outcome(joining.run) if joining.run is not None else None
    return outcome is not None and outcome.code not in (Exit.OK, Exit.RESUMABLE)


def _no_cluster(joining: Joining) -> int:
    say(f"error: {_what(joining)} did not come within {joining.wait_s:g} s.", sys.stderr)
    return Exit.RESUMABLE


class JoinedNode:
    """Ray's processes of this machine."""

    def __init__(self, cluster: ClusterAddress, address: str, temp_dir: Path | None) -> None:
        """`address`, `temp_dir`: as in `Joining`."""
        ray = str(Path(sys.executable).with_name("ray"))
        own = address or _address_towards(cluster.address)
        options = [f"--num-cpus={usable_cores()}", *([f"--node-ip-address={own}"] if own else [])]
        options += [f"--temp-dir={temp_dir.absolute()}"] if temp_dir is not None else []
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  # without a name: it goes with this process
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [ray, "start", f"--address={cluster.address}", "--block", *options],
            env={**os.environ, "RAY_AUTH_MODE": cluster.auth} if cluster.auth else None,
            stdout=self._printed,
            stderr=self._printed,
            preexec_fn=_deaf,
            start_new_session=True,  # by which what it has started is known when it has ended itself
        )
        self.lasted_s, self.said = 0.0, ""  # once it has ended

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def id_among(self, cluster: Sequence[RayNode]) -> str:
        """Its id in Ray, by the socket of its raylet: a machine may have several. Raises LookupError."""
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.Error):
                words = process.cmdline()
                for node in cluster:
                    if node["Alive"] and f"--raylet_socket_name={node['RayletSocketName']}" in words:
                        return str(node["NodeID"])
        raise LookupError("this machine is in the cluster no more")

    def end(self) -> None:
        """End these processes by SIGKILL, as they hear nothing else. `said` is then the end of what they printed."""
        until = time.monotonic() + _ENDS_S
        while living := _living_in(self._process.pid):
            for process in living:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.poll()
            if time.monotonic() > until:
                names = ", ".join(f"process {process.pid}" for process in living)
                say(f"{names} of Ray on this machine did not end within {_ENDS_S:g} s of SIGKILL", sys.stderr)
                break
            time.sleep(_ENDS_LOOK_S)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_S)
        self.lasted_s = time.monotonic() - self._began
        with self._printed as printed:
            printed.seek(0)
            self.said = printed.read().decode(errors="replace")[-_SAID:].strip()


def _living_in(session: int) -> list[psutil.Process]:
    """Processes of a session, and what they have started, also when its first one is gone."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session:
                found |= {process, *process.children(recursive=True)}
    return [process for process in found if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _address_towards(cluster: str) -> str:
    """The address of this machine on the network that leads to the cluster; "" where the cluster has gone meanwhile."""
    host, _, port = cluster.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S) as connection:
            found: str = connection.getsockname()[0]
            return found
    except OSError:
        return ""


def _deaf() -> None:
    """The signals wait in this process and all that it starts, until one of them asks for them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _leave(found: ClusterAddress, node: JoinedNode, leave_s: float) -> None:
    """Returns when no worker is on this machine any more, its cluster has gone, or time is up."""
    if found.auth:  # which Ray reads when it is imported
        os.environ.setdefault("RAY_AUTH_MODE", found.auth)
    import ray

    from actors.ray_calls import drain, nodes

    until = time.monotonic() + leave_s
    try:
        _connect(found.address, until)
        here = node.id_among(nodes())
        drain(found.address, here, leave_s, "heddle workers join leaves")
        left = _drained(here)
        say(f"leaving: {', '.join(left) or 'no worker'} of this machine finishes first", sys.stdout)
        while left and node.lives and time.monotonic() < until:
            time.sleep(_WATCH_S)
            left = _drained(here)
        if left:
            say(f"{', '.join(left)} did not finish within {leave_s:g} s", sys.stdout)
    except Exception as error:  # the cluster goes meanwhile, in one of Ray's many ways
        say(f"the cluster at {found.address} does not answer ({type(error).__name__})", sys.stdout)
    finally:
        with suppress(Exception):
            ray.shutdown()


def _connect(address: str, until: float) -> None:
    """Join the cluster, and let the next notice do nothing: Ray's handler of SIGTERM ends this process while it
    connects, and aborts it from then on."""
    import ray

    from actors.names import NAMESPACE

    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    while True:
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
            return
        except SystemExit as ended:
            if ended.code != signal.SIGTERM or time.monotonic() > until:
                raise
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        ray.shutdown()  # what it has of a connection


def _drained(node: str) -> list[str]:
    """Workers that are on the node, of all runs of this cluster; they have been asked to go."""
    from actors.ray_calls import GONE, get

    found = []
    for monitor in _monitors():
        try:
            seen = get(monitor.report.remote(), timeout=_ANSWER_S).seen
            names = [name for name, one in seen.items() if one.progress.node == node]
            if names:
                get(monitor.drain.remote(tuple(names)), timeout=_ANSWER_S)
        except GONE:  # its run has ended since, and its workers with it; those of others go on
            continue
        found += names
    return sorted(found)


def _monitors() -> Iterator[OperatorHandle]:
    import ray
    from ray.util import list_named_actors

    from actors.names import NAMESPACE, is_monitor

    for one in list_named_actors(all_namespaces=True):
        if one["namespace"] == NAMESPACE and is_monitor(one["name"]):
            with suppress(ValueError):  # it has ended since
                yield ray.get_actor(one["name"], namespace=NAMESPACE)
