"""The processes of one start of a run, seen from outside: which there are, what each is, and whether they have gone.

Ray names its processes after what they do at the moment, so a role is noted when a title shows it and kept.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil

MARK = "HEDDLE_BLACKBOX_RUN"  # an environment variable that every child inherits
_LOOK_S = 0.4
_YOUNG_S = 2.0

# Class names in the titles of idle actors, and words in the command lines of the others.
_TITLES = {
    "ray::Worker": "worker",
    "ray::Feeder": "feeder",
    "ray::Planner": "planner",
    "ray::Keeper": "keeper",
    "ray::Monitor": "monitor",
    "ray::RayTrainWorker": "controller",
    "ray::TrainController": "train_controller",
}
_COMMANDS = {"raylet/raylet": "raylet", "gcs/gcs_server": "gcs"}


@dataclass(frozen=True, slots=True)
class Seen:
    """A process: its id may be given to another one later, its id with its start time is not."""

    pid: int
    started: float


class Processes:
    """All processes of one start, from the driver down, watched by a thread until `close`."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._known: set[Seen] = set()
        self._strangers: set[Seen] = set()
        self._roles: dict[Seen, str] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"processes of {mark}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def of(self, role: str) -> list[int]:
        """Living processes with this role, oldest first."""
        self._look()
        with self._lock:
            found = [seen for seen, known in self._roles.items() if known == role]
        return [seen.pid for seen in sorted(found, key=lambda s: s.started) if _lives(seen)]

    def roles(self) -> dict[int, str]:
        with self._lock:
            return {seen.pid: role for seen, role in self._roles.items() if _lives(seen)}

    def alive(self) -> list[tuple[int, str]]:
        """(pid, title) of everything that lives, the driver included."""
        self._look()
        with self._lock:
            known = list(self._known)
        return [(seen.pid, _title(seen.pid)) for seen in known if _lives(seen)]

    def wait_until_gone(self, timeout_s: float) -> list[tuple[int, str]]:
        """What is left when the time is up; empty as soon as nothing is."""
        deadline = time.monotonic() + timeout_s
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.3)
        return left

    def end_all(self) -> None:
        """SIGKILL to what lives: after a fault that leaves processes behind, and when the harness gives up."""
        for _attempt in range(20):
            left = self.alive()
            for pid, _ in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                return
            time.sleep(0.2)

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        with self._lock:
            for process in _all():
                seen = Seen(process.pid, process.create_time())
                if seen in self._strangers:
                    continue
                if seen not in self._known and not self._belongs(process):
                    # A child has its parent's environment until it runs a program of its own: look again while young.
                    if time.time() - seen.started > _YOUNG_S + 3:
                        self._strangers.add(seen)
                    continue
                self._known.add(seen)
                if seen not in self._roles and (role := _role(process)):
                    self._roles[seen] = role

    def _belongs(self, process: psutil.Process) -> bool:
        """By the inherited mark, or by a known parent: a process that sets its title overwrites its environment."""
        with suppress(psutil.Error):
            if process.environ().get(MARK) == self._mark:
                return True
        with suppress(psutil.Error):
            parent = process.parent()
            return parent is not None and Seen(parent.pid, parent.create_time()) in self._known
        return False


def _all() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                process.create_time()
                yield process


def _lives(seen: Seen) -> bool:
    with suppress(psutil.Error):
        process = psutil.Process(seen.pid)
        return process.create_time() == seen.started and process.status() != psutil.STATUS_ZOMBIE
    return False


def _title(pid: int) -> str:
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())[:120]
    return ""


def _role(process: psutil.Process) -> str:
    title = _title(process.pid)
    if not title.startswith("ray::"):
        if time.time() - process.create_time() < _YOUNG_S:  # a child shows its parent's command until it has its own
            return ""
        if "-m app.train" in title:
            return "driver"
        return next((role for word, role in _COMMANDS.items() if word in title.split(" ")[0]), "")
    actor = title.split(".")[0].split("(")[0].strip()
    return _TITLES.get(actor, "")


def wait_for(what: Callable[[], bool], timeout_s: float, poll_s: float = 0.05) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True
