"""The Ray cluster of a run: joined or started, watched while the run lives, and left."""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar

from actors.names import NAMESPACE
from app.inputs.cluster import given_cluster
from app.settings.config import RunConfig, check
from app.settings.terminal import say
from ops.code_path import python_environment
from ops.typed import ConfigError
from ops.whole_file import write_whole

if TYPE_CHECKING:
    from actors.pool.device import WorkersDevice

log = logging.getLogger(__name__)

ADDRESS = "RAY_ADDRESS"
CLUSTER = "cluster.json"
_NODES_X_GPUS = re.compile(r"[0-9]+x[0-9]+")
_LAST_PORT = 2**16 - 1
_TOKEN_LOGGER = "ray._private.authentication.authentication_token_setup"
_TRAIN_LOOK = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"  # by Ray's 2 s a run would end that much later
_GONE_S = 30.0  # a node that Ray has called dead for this long is gone
# Without an answer for this long Ray is gone: its GCS may stand still for a while, as on a host that swaps or is moved,
# and Ray's own processes wait 60 s for it, after which they end this process without a word.
_SILENT_S = 50.0
_CONNECT_S = 5.0
_GRACE_S = 120.0  # for Ray Train to end after a run that has; it takes seconds
_WATCH_S = 2.0  # between two looks whether Ray is there
_SHUTDOWN_S = 60.0

T = TypeVar("T")


def is_on_a_cluster() -> bool:
    return bool(os.environ.get("RAY_ADDRESS") or os.environ.get("RAY_JOB_ID"))


def must_answer(address: str, named: str = ADDRESS) -> None:
    """Raises ConfigError for what is no address of a Ray cluster, and if nothing listens at HOST:PORT: Ray itself would
    try for minutes without a message. `named`: the option or variable that gives it."""
    check_address(address, named)
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {as_given(address, named)} ({error.strerror or error}). Start it, or "
            f"{'unset' if named == ADDRESS else f'leave out {named} and'} {ADDRESS} to use this machine."
        ) from None


def check_address(address: str, named: str, *, to_join: bool = False) -> None:
    """Raises ConfigError for what Ray takes for no address. `to_join`: by a node, which takes HOST:PORT alone."""
    if not to_join and (address in ("", "auto", "local") or address.startswith("ray://")):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) > _LAST_PORT:
        other = " NODESxGPUS is of heddle plan and train." if _NODES_X_GPUS.fullmatch(address) else ""
        of, forms = (" to join", "HOST:PORT") if to_join else ("", "HOST:PORT, ray://HOST:PORT or auto")
        raise ConfigError(f"{as_given(address, named)} is no address of a Ray cluster{of}. Give {forms}.{other}")


def as_given(address: str, named: str) -> str:
    """Such as RAY_ADDRESS=10.0.0.1:6379, --cluster auto."""
    return f"{named}{'=' if named == ADDRESS else ' '}{address or repr('')}"


def not_let_in(address: str, otherwise: str) -> ConfigError:
    """The error if Ray does not connect to an address that `must_answer` has let pass. `otherwise`: what to do without
    that cluster."""
    if not address.removeprefix("ray://").rpartition(":")[2].isdigit():  # "auto": nobody has looked whether it is there
        return ConfigError(f"no Ray cluster answers at {address}. Start it, or {otherwise}.")
    return ConfigError(
        f"something answers at {address}, and Ray does not get in. If it is a cluster that asks for a token, set "
        f"RAY_AUTH_MODE=token and give this machine the cluster's token (RAY_AUTH_TOKEN_PATH); else {otherwise}."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterAddress:
    """Where the cluster of a run answers, and whether it asks for a token."""

    address: str  # HOST:PORT of its GCS
    auth: str  # RAY_AUTH_MODE

    def write(self, folder: Path) -> None:
        """Write it into the run's folder, for commands that reach the run from outside."""
        write_whole(folder / CLUSTER, json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> ClusterAddress | None:
        """Read it back; None for a folder of an older version, or a damaged file."""
        try:
            told = json.loads((folder / CLUSTER).read_text(encoding="utf-8"))
            return ClusterAddress(address=str(told["address"]), auth=str(told["auth"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def answers(self) -> bool:
        """Whether something listens there. Nothing does once the cluster has ended, or where only its own nodes reach
        it."""
        try:
            must_answer(self.address)
        except ConfigError:
            return False
        return True


def connect(config: RunConfig) -> None:
    """Join the cluster that this process runs on, or start one here that fits the run."""
    import ray

    from app.run.own_job import as_own_job

    start = partial(
        as_own_job(ray.init, os.environ.get("RAY_ADDRESS", "")),
        log_to_driver=os.environ.get("HEDDLE_WORKER_LOGS", "") not in ("", "0"),
        logging_level=logging.WARNING,
        namespace=NAMESPACE,
        runtime_env={"env_vars": _worker_environment()},
    )
    if is_on_a_cluster():
        must_answer(os.environ.get("RAY_ADDRESS", ""))
        try:
            start(address="auto")
        except ConnectionError:
            address = as_given(os.environ.get(ADDRESS, "auto"), ADDRESS)
            raise not_let_in(address, "unset RAY_ADDRESS to train on this machine") from None
        return
    workers = config.workers
    spare = 2.0  # the controller, decoding, and Ray's own tasks
    cpus = max(os.cpu_count() or 1, int(workers.max * workers.cpus_per_worker + spare + 0.999))
    # Many small actors start at once here; Ray would warn about each batch of processes.
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "32")
    start_ray_here(partial(start, num_cpus=cpus, dashboard_host="127.0.0.1"))


class RayNotStarted(RuntimeError):
    """No Ray came up on this machine."""


def start_ray_here(start: Callable[..., object]) -> None:
    """A Ray of this machine, for this process; `start` is `ray.init` with all but its address. Raises ConfigError where
    the path of its temporary folder is too long for its sockets, RayNotStarted where it does not come up twice."""
    import ray

    logging.getLogger(_TOKEN_LOGGER).addFilter(is_news_of_tokens)
    # Ray would start a process for each core, and use none of them: a job with an environment gets others.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    try:
        start(address="local")
    except Exception as error:  # Ray raises many kinds
        if "AF_UNIX path length" in str(error):
            raise ConfigError(
                f"Ray did not start: {error}. Set RAY_TMPDIR to a shorter folder, such as /tmp."
            ) from None
        # On a busy machine one of its processes may come up too late.
        log.warning("Ray did not start (%s: %s); trying once more", type(error).__name__, error)
        ray.shutdown()
        try:
            start(address="local")
        except Exception as again:
            load = os.getloadavg()[0]
            logs = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "session_latest", "logs")
            raise RayNotStarted(
                f"Ray did not start on this machine, twice: {type(again).__name__}: {again} Its processes must come up "
                f"within 30 s, and {os.cpu_count()} cores have a load of {load:.0f}: where others keep them busy, try "
                f"again when these have ended; else read {logs}."
            ) from again


def _worker_environment() -> dict[str, str]:
    return {
        "RAY_TRAIN_V2_ENABLED": "1",
        _TRAIN_LOOK: os.environ.get(_TRAIN_LOOK, "0.5"),
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        **python_environment(),
    }


def is_news_of_tokens(record: logging.LogRecord) -> bool:
    """A log filter that drops Ray's message that its token is used, which is the default, and keeps the warning that it
    is not."""
    return "Token authentication is enabled" not in record.getMessage()


def joined() -> ClusterAddress:
    """The cluster that this process has joined or started."""
    import ray

    auth = os.environ.get("RAY_AUTH_MODE", "" if is_on_a_cluster() else "token")  # Ray's default for its own clusters
    return ClusterAddress(address=ray.get_runtime_context().gcs_address, auth=auth)


def check_capacity(config: RunConfig) -> None:
    """Say so where the cluster is too small now, before the wait begins."""
    from actors.ray_calls import resources

    workers, have = config.workers, resources(free=False)
    need = workers.min * workers.cpus_per_worker
    if have.get("CPU", 0) < need or (workers.device == "cuda" and have.get("GPU", 0) < workers.min):
        say(
            f"waiting up to {workers.wait_s:g} s: workers.min {workers.min} need {need:g} CPUs"
            f"{f' and {workers.min} GPUs' if workers.device == 'cuda' else ''}; the cluster has "
            f"{have.get('CPU', 0):g} CPUs and {have.get('GPU', 0):g} GPUs.",
            sys.stdout,
        )


def check_device(config: RunConfig) -> None:
    """Raises ConfigError where settings contradict the device that `workers.device: auto` is on this cluster."""
    from actors.pool.workers import uses_gpu

    workers = config.workers
    if workers.device != "auto":
        return
    device: Literal["cuda", "cpu"] = "cuda" if uses_gpu(workers) else "cpu"
    offers = "it has GPUs" if device == "cuda" else "no node has a GPU"
    try:
        check(replace(config, workers=replace(workers, device=device)))
    except ConfigError as error:
        raise ConfigError(f"workers.device auto is {device} on this cluster ({offers}). {error}") from None


def on_usable(config: RunConfig, device: WorkersDevice) -> RunConfig:
    """The config, with CPUs for `workers.device: auto` where the cluster's GPUs cannot be used; a warning says so.
    Raises ConfigError where the config asks for GPUs."""
    if not device.unusable:
        return config
    if config.workers.device == "cuda":
        raise ConfigError(
            f"workers.device cuda: the cluster's GPUs cannot be used. {device.unusable}. "
            f"Or train on CPUs: --set workers.device=cpu"
        )
    say(f"warning: workers.device auto is cpu, as the cluster's GPUs cannot be used. {device.unusable}.", sys.stdout)
    config = replace(config, workers=replace(config.workers, device="cpu"))
    check(config)
    return config


def check_nodes(config: RunConfig) -> None:
    """Raises ConfigError where `workers.cluster` describes none of the nodes with GPUs that are there: it is another
    cluster's. Which of the others it describes is seen when the workers report their GPUs."""
    from actors.pool.workers import uses_gpu
    from actors.ray_calls import nodes

    given = given_cluster(config)
    if given is None or not uses_gpu(config.workers):
        return
    sizes = sorted({int(node["Resources"].get("GPU", 0)) for node in nodes() if node["Alive"]} - {0})
    if sizes and not set(sizes) & set(given.nodes):
        raise ConfigError(
            f"workers.cluster {config.workers.cluster} describes nodes of {_listed(given.nodes)} GPUs, and the cluster "
            f"has nodes of {_listed(sizes)}. Correct the file, or leave it out: a run takes what its workers tell."
        )


def _listed(sizes: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(set(sizes))))


class RayGone(RuntimeError):
    """The cluster has ended under the run."""


def wait_while_ray_lives(
    result: Future[T], is_over: Callable[[], bool] = lambda: False, grace_s: float = _GRACE_S
) -> None:
    """Returns when the result is there, or has not come although the run has been over for `grace_s`. Raises RayGone
    when this process's node has been gone for a while, or Ray has not answered for longer."""
    lost, late = threading.Event(), threading.Event()
    threading.Thread(target=_watch_node, args=(result, lost), name="watch-ray", daemon=True).start()
    threading.Thread(target=_watch_end, args=(result, is_over, grace_s, late), name="watch-end", daemon=True).start()
    while not wait([result], timeout=1.0).done:
        if lost.is_set():
            raise RayGone("Ray has ended under the run")
        if late.is_set():
            return


def _watch_end(result: Future[T], is_over: Callable[[], bool], grace_s: float, late: threading.Event) -> None:
    """Sets `late` when the run has been over for `grace_s`. In a thread, as the storage that is asked may hang."""
    over_at: float | None = None
    while not wait([result], timeout=1.0).done:
        now = time.monotonic()
        over_at = (now if over_at is None else over_at) if is_over() else None  # another controller may go on
        if over_at is not None and now - over_at >= grace_s:
            late.set()
            return


@dataclass
class NodeSigns:
    """What Ray has said of this process's node, in monotonic seconds."""

    alive_at: float
    answered_at: float

    def is_gone(self, now: float) -> bool:
        """Whether there is nothing to wait for any more."""
        patience_s = _GONE_S if self.answered_at > self.alive_at else _SILENT_S
        return now - self.alive_at > patience_s


def _watch_node(result: Future[T], lost: threading.Event) -> None:
    """Sets `lost` when this process's node is gone. Ray is asked in a thread, since the question may hang."""
    import ray

    from actors.ray_calls import nodes

    mine = ray.get_runtime_context().get_node_id()
    signs = NodeSigns(alive_at=time.monotonic(), answered_at=time.monotonic())

    def ask() -> None:
        while not result.done():
            with suppress(Exception):  # no answer, of whatever kind
                is_alive = any(node["NodeID"] == mine and node["Alive"] for node in nodes())
                signs.answered_at = time.monotonic()
                signs.alive_at = signs.answered_at if is_alive else signs.alive_at
            time.sleep(_WATCH_S)

    threading.Thread(target=ask, name="ask-ray", daemon=True).start()
    while not result.done():
        if signs.is_gone(time.monotonic()):
            lost.set()
            return
        time.sleep(_WATCH_S)


_stuck = False  # ray.shutdown has not returned


def shut_down_ray() -> None:
    """Leave the cluster, or end the one of this machine. A cluster that is gone may never answer and is left after a
    while."""
    global _stuck
    import ray

    ending = threading.Thread(target=ray.shutdown, name="shutdown", daemon=True)
    _stuck = True  # also where Ctrl-C ends the wait
    ending.start()
    ending.join(_SHUTDOWN_S)
    _stuck = ending.is_alive()


def leave(code: int) -> NoReturn:
    """End this process, without Python's freeing of each object, which takes a second or two after Ray and torch. If
    Ray is stuck in it, end without exit handlers, too: Ray's own would wait for ever."""
    if not _stuck:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def leave_if_stuck(code: int) -> None:
    """End this process where Python's own end would not: if Ray is stuck in it."""
    if _stuck:
        leave(code)
