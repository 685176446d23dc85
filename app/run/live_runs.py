"""Runs and the cluster they live on: one controller per folder, nothing left behind, and an end that can be resumed."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from actors.outcome import Exit, Outcome
from app.settings.config import RunConfig, run_dir
from ops.typed import ConfigError

log = logging.getLogger(__name__)

_GONE_S = 30.0  # ended actors give their names back within this
_ALIVE_S = 15.0  # a run whose workers were heard this recently has a controller
_CONNECT_S = 5.0
_WATCH_S = 2.0  # between two looks whether Ray is there
_SHUTDOWN_S = 60.0
STOP = "stopped by a signal"
OUTCOME = "outcome.json"
CLUSTER = "cluster.json"


def end_leftovers(config: RunConfig, *, overwrite: bool) -> None:
    """Before a run starts in an existing folder: no other controller may be writing there, and with `overwrite` the
    memory that an earlier run still holds in this cluster is given back. Raises ConfigError for a live run."""
    import ray

    from actors.names import NAMESPACE, find_monitor, run_id

    folder = run_dir(config)
    if not (folder / "run_id").is_file():
        return
    try:
        report = ray.get(find_monitor(folder).report.remote(), timeout=30)
    except (LookupError, ray.exceptions.RayError):
        report = None  # its cluster is gone, or it has ended
    if report is not None and any(report.now - seen.at < _ALIVE_S for seen in report.seen.values()):
        raise ConfigError(f"run {folder} is alive on this cluster; end it with `heddle workers stop {folder}` first.")
    if not overwrite:
        return

    def left() -> list[str]:
        named = ray.util.list_named_actors(all_namespaces=True)
        return [e["name"] for e in named if e["namespace"] == NAMESPACE and e["name"].startswith(f"{run_id(folder)}/")]

    for name in left():
        log.info("ending %s of the earlier run", name)
        with suppress(ValueError):  # it has ended by itself meanwhile
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    deadline = time.monotonic() + _GONE_S
    while (names := left()) and time.monotonic() < deadline:  # the new run will ask for actors of the same names
        time.sleep(0.05)
    if names:
        log.warning("%s did not end within %.0f s", ", ".join(names), _GONE_S)


@contextmanager
def stops_on_signal(folder: Path) -> Iterator[None]:
    """SIGTERM, the end of the terminal (SIGHUP) or Ctrl-C end the run after its running steps, with a checkpoint; a
    second Ctrl-C ends it at once. Under nohup the terminal may go."""
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    earlier = {number: signal.getsignal(number) for number in watched}

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _write_nowhere()
        else:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(OSError):  # not `print`: a write to the same stream may be what the signal has interrupted
            os.write(2, b"stopping after the running steps; Ctrl-C again stops at once\n")
        _ask_to_stop(folder)

    for number, handler in earlier.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _write_nowhere() -> None:
    """The terminal is gone: whoever writes to it would fail, in the middle of ending the run."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # captured, closed
            if os.isatty(stream.fileno()):
                os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _ask_to_stop(folder: Path) -> None:
    from actors.names import find_monitor

    try:
        monitor: Any = find_monitor(folder)
    except (LookupError, OSError) as error:  # the controller is still starting: nothing is lost by ending now
        raise KeyboardInterrupt from error
    monitor.stop.remote(STOP)


# -- Ray itself --------------------------------------------------------------------------------------------------------


def must_answer(address: str) -> None:
    """Raises ConfigError for a HOST:PORT where nobody listens: Ray would try for minutes without a word."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at RAY_ADDRESS={address} ({error.strerror or error}). Start it, or "
            f"unset RAY_ADDRESS to use this machine."
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterAddress:
    """Where a run's cluster answers, and how it wants to be asked."""

    address: str  # HOST:PORT of its GCS
    auth: str  # RAY_AUTH_MODE

    def write(self, folder: Path) -> None:
        """Into the run's folder, for whoever wants to reach the run from outside."""
        part = folder / f"{CLUSTER}.part"
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(part, folder / CLUSTER)

    @staticmethod
    def read(folder: Path) -> ClusterAddress | None:
        """None for a folder of an older version, or one that somebody has damaged."""
        try:
            told = json.loads((folder / CLUSTER).read_text(encoding="utf-8"))
            return ClusterAddress(address=str(told["address"]), auth=str(told["auth"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def answers(self) -> bool:
        """Whether somebody listens there: not where the cluster has ended, or only its own nodes reach it."""
        try:
            must_answer(self.address)
        except ConfigError:
            return False
        return True


class RayGone(RuntimeError):
    """The cluster has ended under the run."""


def wait_while_ray_lives(result: Future[Any]) -> None:
    """Returns when the result is there. Raises RayGone when this process's node has been gone for a while."""
    lost = threading.Event()
    threading.Thread(target=_watch_node, args=(result, lost), name="watch-ray", daemon=True).start()
    while not wait([result], timeout=1.0).done:
        if lost.is_set():
            raise RayGone("Ray has ended under the run")


def _watch_node(result: Future[Any], lost: threading.Event) -> None:
    """Sets `lost` when Ray does not know this node as alive for _GONE_S. A thread: the question itself may hang."""
    import ray

    mine = ray.get_runtime_context().get_node_id()
    alive = time.monotonic()

    def ask() -> None:
        nonlocal alive
        while not result.done():
            with suppress(Exception):  # no answer, of whatever kind
                if any(node["NodeID"] == mine and node["Alive"] for node in ray.nodes()):
                    alive = time.monotonic()
            time.sleep(_WATCH_S)

    threading.Thread(target=ask, name="ask-ray", daemon=True).start()
    while not result.done():
        if time.monotonic() - alive > _GONE_S:
            lost.set()
            return
        time.sleep(_WATCH_S)


_stuck = False  # Ray did not let itself be shut down


def shut_down_ray() -> None:
    """Leave the cluster, or end the one of this machine; one that is gone may never answer."""
    global _stuck
    import ray

    ending = threading.Thread(target=ray.shutdown, name="shutdown", daemon=True)
    ending.start()
    ending.join(_SHUTDOWN_S)
    _stuck = ending.is_alive()


def leave(code: int) -> NoReturn:
    """End this process; at once when Ray is stuck in it, whose own end would wait for ever."""
    if not _stuck:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


# -- the end -----------------------------------------------------------------------------------------------------------


def read_outcome(folder: Path, token: str) -> Outcome | None:
    """What the controller of this start has written at its end, or None."""
    try:
        told = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
        if told.pop("token", token) == token:
            return Outcome(**told)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.debug("no outcome in %s: %s", folder, error)
    return None


def came_to_anything(folder: Path) -> bool:
    """Whether a started run has left what somebody may want: a step, a checkpoint, a list of faults, a trace."""
    metrics = folder / "metrics.jsonl"
    return (
        (metrics.is_file() and metrics.stat().st_size > 0)
        or (folder / "checkpoints").is_dir()
        or any((folder / name).is_file() for name in ("bad.jsonl", "error.txt"))
        or resumable(folder)
    )


def resumable(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / OUTCOME).read_text(encoding="utf-8"))["code"] == Exit.RESUMABLE)
    except (OSError, ValueError, KeyError, TypeError):
        return False
