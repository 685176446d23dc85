"""What Ray Data keeps of an execution that has ended, and how little of it a long run leaves behind.

A run of a month starts a hundred thousand executions, one per window of microbatches. Of each, Ray 2.60 keeps a remote
function and the description of an actor class in the process that started it, some 60 KiB; a hundred gauges and more in
its actor of statistics, some 500 KiB; and a log file. So names come again, and what is cached under keys that do not is
forgotten. A version of Ray that keeps these things elsewhere, or not at all, is left alone.

What is still kept is 1 KiB of each execution in that process (the kind of its tasks, in Ray's own code) and 0.4 KiB in
the cluster's table of functions; the cluster keeps its last 100,000 tasks as well, at some 4 KiB each.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import uuid
from functools import reduce
from typing import Protocol

EXECUTION_END_S = 25.0
KEPT = 32  # of a cache of Ray's, the newest: those of executions that run, and of classes that are in use
# Keyed by what is drawn for each execution: a remote function per operator, an actor class per look for its actor.
GROWING = (("ray.data._internal.remote_fn", "CACHED_FUNCTIONS"), ("ray.actor", "_ActorClassMethodMetadata._cache"))


class Executed(Protocol):
    """A dataset of Ray's that is executed."""

    def get_dataset_id(self) -> str: ...


class ExecutionNames:
    """Names for executions of this process, each of one at a time. Two or three are ever made, since no more windows
    overlap."""

    def __init__(self) -> None:
        self._prefix = uuid.uuid4().hex[:12]  # of no other process: the cluster's statistics are by name
        self._free: list[str] = []
        self._made = 0
        self._lock = threading.Lock()

    def take(self) -> str:
        """A name that no execution has until it is given back."""
        with self._lock:
            if self._free:
                return self._free.pop()
            self._made += 1
            return f"{self._prefix}{self._made}"

    def give_back(self, name: str) -> None:
        """The execution of this name has ended, and all of its threads."""
        with self._lock:
            self._free.append(name)


def call_it(dataset: Executed, name: str) -> None:
    """Give an execution that has not begun this name in Ray's statistics and logs, instead of one of its own."""
    rename = getattr(dataset, "_set_uuid", None)
    if rename is not None:
        rename(name)


def forget_ended() -> None:
    """Drop what Ray's caches hold for executions long ended. A function is looked up once, by its own execution; a
    description that is asked for again is made again."""
    for module, path in GROWING:
        forget_oldest(growing(module, path), KEPT)


def forget_oldest(cache: dict[object, object], kept: int) -> None:
    """Drop all but the entries added last. Others may add to the cache meanwhile."""
    for key in list(cache)[:-kept]:
        cache.pop(key, None)


def growing(module: str, path: str) -> dict[object, object]:
    """A cache of Ray's; an empty one where this version of Ray has none of this name."""
    try:
        found = reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def await_executions(dataset_id: str = "") -> bool:
    """Wait for the scheduling threads of Ray Data, of one dataset or of all. Returns whether they have ended. Ray waits
    2 s for them; one that is still there after `ray.shutdown` ends the whole process (core_worker_process.cc,
    QuickExit)."""
    threads = [t for t in threading.enumerate() if t.name.startswith(f"StreamingExecutor-{dataset_id}")]
    for thread in threads:
        thread.join(timeout=EXECUTION_END_S)
    return not any(thread.is_alive() for thread in threads)


def remove_log(dataset_id: str) -> None:
    """Ray Data opens a log file per execution and keeps all of them. A worker process that has still something to say
    of an execution makes its file again: it goes with the next execution of that name."""
    try:
        from ray.data._internal.logging import get_log_directory  # loads ray.data, which reads its environment then
    except ImportError:  # this version of Ray has none of this name
        return

    folder = get_log_directory()
    if folder is not None:
        with contextlib.suppress(OSError):  # never written, or gone with the session
            os.unlink(os.path.join(str(folder), f"ray-data-{dataset_id}.log"))
