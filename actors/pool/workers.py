"""Starts, watches and ends the actors of a run. Worker actors that find no room stay pending, which is what Ray's
autoscaler acts on; the controller learns when one is ready or gone."""

from __future__ import annotations

import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import process
from actors.config import WorkersConfig
from actors.memory_kills import in_short
from actors.messages import IO, SNAPSHOTS, FailedStart, HostGpu, WorkerHandle, WorkerInfo, WorkerSettings
from actors.names import NAMESPACE, monitor_name
from actors.pool.monitor import Monitor, MonitorHandle
from actors.pool.own_gpu import gpu_environment
from actors.pool.room import Need, nodes_with_room, where
from actors.ray_calls import get, kill, node_id, node_of_process, nodes, remote_of, resources, wait
from actors.refs import Ref
from actors.worker.worker import Worker
from ops.listing import paths_below
from ops.models.config import ModelConfig

log = logging.getLogger(__name__)

# Ray's own is 15 for all of its workers: the thread that launches a GPU's kernels would wait for its turn beside those
# that decode. Workers that compute on CPUs keep it, or the controller beside them would wait.
_NICENESS = "RAY_worker_niceness"
_WEIGHT_FILES = (".safetensors", ".bin")
_ADDRESS = re.compile(r"\bip[=:]\s*([0-9A-Fa-f.:]+)")
_BARS_S = 1.2  # a process gives Ray the bars of its timeline once a second; what is ended before loses them


@dataclass(kw_only=True, slots=True)
class PoolMember:
    """One worker actor, from its request to its end."""

    name: str
    handle: WorkerHandle
    info_ref: Ref[WorkerInfo | FailedStart]
    wished: str | None  # the node it was asked for
    shunned: tuple[str, ...] = ()  # nodes on which it does not start
    info: WorkerInfo | None = None  # None while it waits for resources or loads its modules


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolNews:
    """What has changed since the last look."""

    ready: tuple[WorkerInfo, ...] = ()
    failed: tuple[FailedStart, ...] = ()  # of workers that are gone


class Pool(ABC):
    """The workers of a run: which are there, which are coming, and where. A subclass starts and ends them. Not
    thread-safe; used by the controller alone."""

    def __init__(self) -> None:
        self._members: dict[str, PoolMember] = {}
        self._serial = 0
        self.shunned: tuple[str, ...] = ()  # ids of nodes for which no worker is asked
        self.at_rest: tuple[str, ...] = ()  # ids of nodes that come last
        self._resting_since: float | None = None  # monotonic seconds; None while they may work

    def taken(self) -> list[str]:
        """The node of every worker that is there, or was asked for and is not there yet."""
        places = (m.info.node if m.info else m.wished for m in self._members.values())
        return [node for node in places if node]

    @abstractmethod
    def _request(self, names: Sequence[str]) -> Iterator[PoolMember]:
        """Ask for more workers, one after the other; for fewer where it makes no sense to ask for all yet."""

    @abstractmethod
    def _end(self, member: PoolMember, frozen: bool) -> None:
        """End a worker; with `frozen`, one that may not answer."""

    def start(self, count: int) -> list[str]:
        """Request this many more workers. Returns the names of those that are on their way."""
        names = []
        for member in self._request([f"w{self._serial + n}" for n in range(count)]):
            self._serial += 1
            member.shunned = self.shunned
            self._members[member.name] = member
            names.append(member.name)
        return names

    def poll(self) -> PoolNews:
        """Look once, without waiting, at workers that are coming up."""
        pending = {m.info_ref: m for m in self._members.values() if m.info is None}
        done, _ = wait(list(pending), num_returns=len(pending), timeout=0) if pending else ([], [])
        ready: list[WorkerInfo] = []
        failed: list[FailedStart] = []
        for reference in done:
            member = pending[reference]
            try:
                answer = get(reference)
            except ray.exceptions.RayError as error:
                del self._members[member.name]
                failed.append(FailedStart(worker=member.name, why=cause_of(error), where=where_of(error)))
                continue
            if isinstance(answer, FailedStart):
                self.remove(member.name)
                failed.append(answer)
            else:
                member.info = answer
                ready.append(answer)
        return PoolNews(ready=tuple(ready), failed=tuple(failed))

    def handle(self, name: str) -> WorkerHandle:
        return self._members[name].handle

    def info(self, name: str) -> WorkerInfo:
        info = self._members[name].info
        assert info is not None, f"{name} is not ready yet"
        return info

    @property
    def pending(self) -> list[str]:
        """Workers that wait for resources or load their modules, oldest first."""
        return [m.name for m in self._members.values() if m.info is None]

    @property
    def misplaced(self) -> list[str]:
        """Those of `pending` that were asked for while other nodes were shunned than now."""
        return [name for name in self.pending if self._members[name].shunned != self.shunned]

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def node_of(self, name: str) -> str:
        """The first digits of the node's id, as people read it; "" for a worker that is gone."""
        return self.info(name).node[:8] if name in self._members else ""

    def hosting(self, name: str) -> HostGpu | None:
        """The node on which a worker of `pending` has its process; None while it waits for resources, or where nobody
        knows."""
        return None

    def remove(self, name: str, frozen: bool = False) -> None:
        """End a worker; with `frozen`, also by a signal, since a stopped process does not answer."""
        if (member := self._members.pop(name, None)) is not None:
            self._end(member, frozen)

    def rest(self) -> None:
        """The workers have run their last cascades, and only wait to be ended."""
        self._resting_since = time.monotonic()

    def close(self) -> None:
        """End all workers."""
        for name in self.names:
            self.remove(name)


class RayPool(Pool):
    """Workers that are Ray actors. One that finds no room stays pending, which is what Ray's autoscaler acts on."""

    def __init__(self, run: str, settings: WorkerSettings, monitor: MonitorHandle, worker_class: type[Worker]) -> None:
        super().__init__()
        self._run, self._settings, self._monitor = run, settings, monitor
        # With concurrency groups Ray runs the other calls, still one at a time and in order, off the main thread.
        self._actor = remote_of(worker_class, {IO: 1, SNAPSHOTS: 1} if uses_gpu(settings.workers) else None)

    def _request(self, names: Sequence[str]) -> Iterator[PoolMember]:
        workers = self._settings.workers
        need = Need(workers.cpus_per_worker, 1.0 if uses_gpu(workers) else 0.0)
        fill = workers.placement == "fill"
        wanted = [node for node in nodes() if node["NodeID"] not in self.shunned] if fill else []
        wished = nodes_with_room(wanted, self.taken(), need, len(names), self.at_rest) if fill else [None] * len(names)
        for name, node in zip(names, wished, strict=True):
            handle: WorkerHandle = self._actor.options(
                name=f"{self._run}/{name}",
                namespace=NAMESPACE,
                num_cpus=need.cpus,
                num_gpus=need.gpus,
                max_restarts=0,
                runtime_env={"env_vars": worker_environment(workers.torch_threads, os.environ, cuda=need.gpus > 0)},
                **where(node, self.shunned),
            ).remote(name, self._settings, self._monitor)
            yield PoolMember(name=name, handle=handle, info_ref=handle.info.remote(), wished=node)

    def hosting(self, name: str) -> HostGpu | None:
        node = node_of_process(self._members[name].handle)
        hosts = [one["NodeManagerHostname"] for one in nodes() if one["NodeID"] == node] if node else []
        return HostGpu(node=node, host=hosts[0]) if hosts else None

    def close(self) -> None:
        """End all workers, once Ray has the bars of their last cascades."""
        if any(member.info for member in self._members.values()):
            now = time.monotonic()
            time.sleep(max(0.0, (self._resting_since or now) + _BARS_S - now))
        super().close()

    def _end(self, member: PoolMember, frozen: bool) -> None:
        kill(member.handle)
        if frozen and member.info is not None:
            kill_process(member.info.node, member.info.pid, member.info.born)


def worker_environment(torch_threads: int, given: Mapping[str, str], cuda: bool) -> dict[str, str]:
    """What a worker's process is started with; allocator and niceness as the user has set them, if so."""
    niceness = {} if not cuda or _NICENESS in given else {_NICENESS: "0"}
    gpu = gpu_environment(given) if cuda else {}
    threads = {"OMP_NUM_THREADS": str(torch_threads)}
    return {**gpu, **niceness, **threads, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def uses_gpu(workers: WorkersConfig) -> bool:
    """`auto` means CUDA as soon as any node of the cluster offers a GPU."""
    if workers.device == "auto":
        return resources(free=False).get("GPU", 0) > 0
    return workers.device == "cuda"


def start_monitor(run: str) -> MonitorHandle:
    """The run's monitor, beside the caller; found again by a restarted controller, wherever it is."""
    monitor: MonitorHandle = (
        remote_of(Monitor)
        .options(
            name=monitor_name(run),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=-1,
            # Not `beside_me`: a controller that follows on another node keeps it where it is, and when that node dies
            # Ray has to start it again on any other; the workers know no other monitor.
            **where(node_id()),
        )
        .remote()
    )
    return monitor


def kill_process(node: str, pid: int, born: str) -> None:
    """SIGKILL a process on a node: a frozen one does not answer Ray's own kill. Nothing happens if the node is gone, or
    the process is and another has its number."""

    @ray.remote(num_cpus=0, max_retries=0)
    def end(pid: int, born: str) -> None:
        if not process.kill(pid, born):
            log.debug("process %d had already ended", pid)

    end.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(pid, born)


def cause_of(error: BaseException) -> str:
    """The last line of what an actor's constructor raised, or the first line of Ray's own words."""
    lines = [line.strip() for line in in_short(str(error)).strip().splitlines() if line.strip()]
    raised = [line for line in lines if ": " in line and line.split(": ")[0].endswith(("Error", "Exception"))]
    return (raised or lines or [type(error).__name__])[-1 if raised else 0]


def where_of(error: BaseException) -> HostGpu:
    """The node of an actor that died before it could say anything, by the address in Ray's words; of several nodes with
    that address nobody knows which."""
    told = _ADDRESS.search(str(error))
    here = [node for node in nodes() if told is not None and node["Alive"] and node["NodeManagerAddress"] == told[1]]
    return HostGpu(node=here[0]["NodeID"], host=here[0]["NodeManagerHostname"]) if len(here) == 1 else HostGpu()


def weights_bytes(model: ModelConfig) -> int:
    """Size of the weight files in the model's local folders, each counted once; 0 for models that are built here."""
    image = model.image.path if model.image else None
    folders = {Path(path).expanduser() for path in (model.dit.path, model.vae.path, model.text.path, image) if path}
    files = {file for folder in folders for file in paths_below(folder) if file.name.endswith(_WEIGHT_FILES)}
    return sum(file.stat().st_size for file in files if file.is_file())
