"""A fault on purpose: the process of a worker ends as when its GPU fails or its memory is gone, without a word."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from actors.records.events import GenerationFormed, WorkerReady
from app.records.rundir import RunDir
from app.run.operator import monitor
from ops.typed import ConfigError

_ANSWER_S = 60.0  # Ray starts a process on the worker's node


def seated(run: Path) -> dict[str, WorkerReady]:
    """The workers of the run's newest generation, by name; none before the first has formed."""
    known: dict[str, WorkerReady] = {}
    names: tuple[str, ...] = ()
    for event in RunDir.open(run).events():
        if isinstance(event, WorkerReady):
            known[event.worker] = event
        elif isinstance(event, GenerationFormed):
            names = event.workers
    return {name: known[name] for name in names if name in known}


def kill_worker(run: Path, name: str) -> WorkerReady:
    """SIGKILL to this worker's process, on whatever node it is. Raises ConfigError for a run that has ended, and for a
    worker that does not train."""
    monitor(run)  # connects to the run's Ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from actors.ray_calls import get, remote_of

    there = seated(run)
    if name not in there:
        raise ConfigError(f"worker {name} does not train in {run}; these do: {', '.join(there) or 'none yet'}.")
    found = there[name]

    def end(pid: int) -> bool:  # in here, so that Ray sends it along: a task on that node may not find Heddle
        try:
            if not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                return False  # another process has its number
            os.kill(pid, signal.SIGKILL)
        except OSError:
            return False
        return True

    on_its_node = NodeAffinitySchedulingStrategy(found.node, soft=False)
    task = remote_of(end).options(num_cpus=0, max_retries=0, scheduling_strategy=on_its_node)
    try:
        ended = get(task.remote(found.pid), _ANSWER_S)
    except RayError as error:
        raise ConfigError(
            f"worker {name} on {found.host} is not reached ({type(error).__name__}); ask again."
        ) from None
    if not ended:
        raise ConfigError(f"worker {name} has ended already; `heddle workers list {run}` shows those that live.")
    return found
