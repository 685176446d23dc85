"""Runs and the cluster they live on: one controller per folder, nothing left behind, and an end that can be resumed."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from app.config import RunConfig, run_dir
from app.settings import ConfigError

log = logging.getLogger(__name__)

_GONE_S = 30.0  # ended actors give their names back within this
_ALIVE_S = 15.0  # a run whose workers were heard this recently has a controller
STOP = "stopped by a signal"


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
    """SIGTERM or Ctrl-C end the run after its running steps, with a checkpoint; a second Ctrl-C ends it at once."""
    earlier = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def on_signal(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("stopping after the running steps; Ctrl-C again stops at once", file=sys.stderr, flush=True)
        _ask_to_stop(folder)

    for number in earlier:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _ask_to_stop(folder: Path) -> None:
    from actors.names import find_monitor

    try:
        monitor: Any = find_monitor(folder)
    except (LookupError, OSError) as error:  # the controller is still starting: nothing is lost by ending now
        raise KeyboardInterrupt from error
    monitor.stop.remote(STOP)
