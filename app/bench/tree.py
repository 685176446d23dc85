"""CPU time and memory of a process with all its descendants, also of those that end while it is watched.

Each reading goes through /proc for every process of the machine: 9 ms with the 35 of a small Ray cluster. Its own CPU
time is left out, but not its effect on others, so long measurements read seldom.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

RAY_SERVICES = ("gcs_server", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "log_monitor.py", "dashboard.py")


@dataclass(frozen=True, slots=True)
class TreeLook:
    """What was seen at one moment. CPU seconds are those since each process began, also of those that have ended."""

    time: float  # unix seconds
    cpu_s: Mapping[int, float]  # by process id
    private_mib: float  # of all processes together
    services_s: float  # of the CPU seconds, those of a Ray cluster's services


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
        self._services: set[int] = set()
        self._looking_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Tree:
        self._look()
        self._before, self._largest = dict(self._cpu), {}
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
        return sum(self._cpu[pid] - self._before.get(pid, 0.0) for pid in self._services)

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
                if process.pid not in self._cpu and _is_service(process):
                    self._services.add(process.pid)
                self._cpu[process.pid] = times.user + times.system
                private = memory.rss - memory.shared
                self._largest[process.pid] = max(private, self._largest.get(process.pid, 0))
                together += private
        if self._course:
            services = sum(self._cpu[pid] for pid in self._services)
            self.looks.append(TreeLook(time.time(), dict(self._cpu), together / 2**20, services))

    def _processes(self) -> list[psutil.Process]:
        """None when the root has ended."""
        try:
            return [self._me, *self._me.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _is_service(process: psutil.Process) -> bool:
    return any(word.endswith(RAY_SERVICES) for word in process.cmdline()[:3])
