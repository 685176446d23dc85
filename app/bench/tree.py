"""CPU time and memory of a process with all its descendants, also of those that end while it is watched.

Each reading goes through /proc for every process of the machine: 9 ms with the 35 of a small Ray cluster. Its own CPU
time is left out, but not its effect on others, so long measurements read seldom.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

# What a process does, by what its command line has in it: Ray writes there what its processes run at the moment. The
# first role that fits; the rest of Ray's is "other Ray", and of all, "other".
ROLES = {
    "raylet": ("/raylet/raylet ",),
    "gcs": ("/gcs_server ",),
    "dashboard": ("/dashboard.py ", "ray-dashboard-", "ray.dashboard.subprocess"),
    "agents": ("ray::DashboardAgent", "ray::RuntimeEnvAgent"),
    "log monitor": ("/log_monitor.py ", "/autoscaler/_private/monitor.py "),
    "feeder": ("ray::Feeder", "ray::Gate"),
    "planner": ("ray::Planner",),
    "monitor": ("ray::Monitor",),
    "keeper": ("ray::Keeper",),
    "controller": ("ray::RayTrainWorker",),  # Heddle's, which Ray Train runs as its one worker
    "Ray Train": (
        *("ray::TrainController", "ray::DatasetManager", "ray::PreemptionWatcher", "ray::PlacementGroupCleaner"),
        *("ray::SynchronizationActor", "ray::_AutoscalingCoordinator", "ray::_StatsActor"),
    ),
    "decode": ("ray::Map", "ray::map", "-m app.bench.peers.ddp"),  # a DataLoader's processes are called as their loop
}
LAUNCHERS = ("torch.distributed.run", "app.train ", "app.cli ", "app.bench.peers.ray_deepspeed")  # named before others
SERVICES = frozenset({"gcs", "dashboard", "agents", "log monitor"})  # run whatever a Ray cluster does


@dataclass(frozen=True, slots=True)
class TreeLook:
    """What was seen at one moment. CPU seconds are those since each process began, also of those that have ended."""

    time: float  # unix seconds
    cpu_s: Mapping[int, float]  # by process id
    private_mib: float  # of all processes together
    roles_s: Mapping[tuple[int, str], float]  # the CPU seconds by process id and what it did meanwhile


def role_of(words: Sequence[str]) -> str | None:
    """What the process of this command line does; None for one of Ray's that waits for work."""
    line = " ".join(words) + " "
    if any(mark in line for mark in LAUNCHERS):
        return "driver"
    for role, marks in ROLES.items():
        if any(mark in line for mark in marks):
            return role
    if line.startswith("ray::IDLE"):
        return None
    return "other Ray" if line.startswith("ray::") else "other"


class Tree:
    """`with Tree() as tree: work()`, then `tree.cpu_s` and `tree.memory_mib` (the largest private memory of one)."""

    def __init__(self, every_s: float = 0.25, pid: int | None = None, course: bool = False) -> None:
        """A process that is there for less than `every_s` may not be seen. `pid` is the root of the tree, this process
        unless given; with `course` every look is kept in `looks`."""
        self._every_s = every_s
        self._me = psutil.Process(pid)
        self.looks: list[TreeLook] = []
        self._course = course
        self._cpu: dict[int, float] = {}
        self._before: dict[int, float] = {}
        self._largest: dict[int, int] = {}
        self._role: dict[int, str] = {}
        self._roles_s: dict[tuple[int, str], float] = {}
        self._roles_before: dict[tuple[int, str], float] = {}
        self._looking_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Tree:
        self._look()
        self._before, self._roles_before, self._largest = dict(self._cpu), dict(self._roles_s), {}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    @property
    def cpu_s(self) -> float:
        return sum(seconds - self._before.get(pid, 0.0) for pid, seconds in self._cpu.items()) - self._looking_s

    @property
    def services_s(self) -> float:
        """The part of `cpu_s` that the services of a Ray cluster took, which run whatever it does (raylets not
        counted)."""
        return sum(
            seconds - self._roles_before.get(key, 0.0) for key, seconds in self._roles_s.items() if key[1] in SERVICES
        )

    @property
    def memory_mib(self) -> float:
        return max(self._largest.values(), default=0) / 2**20

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self._look()
        self._looking_s = time.thread_time()

    def _look(self) -> None:
        together = 0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                times = process.cpu_times()
                memory = process.memory_info()
                self._grow(process.pid, times.user + times.system, process.cmdline())
                private = memory.rss - memory.shared
                self._largest[process.pid] = max(private, self._largest.get(process.pid, 0))
                together += private
        if self._course:
            self.looks.append(TreeLook(time.time(), dict(self._cpu), together / 2**20, dict(self._roles_s)))

    def _grow(self, pid: int, seconds: float, words: Sequence[str]) -> None:
        """What a process has computed since the last look goes to what it does now, or did last if it waits."""
        role = self._role[pid] = role_of(words) or self._role.get(pid, "other Ray")
        self._roles_s[pid, role] = self._roles_s.get((pid, role), 0.0) + seconds - self._cpu.get(pid, 0.0)
        self._cpu[pid] = seconds

    def _processes(self) -> list[psutil.Process]:
        """None when the root has ended."""
        try:
            return [self._me, *self._me.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
