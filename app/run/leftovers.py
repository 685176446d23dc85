"""What an earlier start of a run has left in the cluster."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from app.run.lock import FolderHeld
from app.run.operator import monitor_of
from app.settings.config import RunConfig
from app.settings.run_folder import run_dir

log = logging.getLogger(__name__)

_GONE_S = 30.0  # ended actors give their names back within this
_ALIVE_S = 15.0


def end_leftovers(config: RunConfig, *, overwrite: bool, alive_s: float = _ALIVE_S) -> None:
    """Called before a run starts in an existing folder. Raises FolderHeld if the run there is alive. With `overwrite`,
    ends the actors of an earlier run, which still hold memory in this cluster; else they are found again, and a request
    to stop that the earlier run was killed before it met is dropped. Raises OtherKeepers for those that cannot be found
    again. A run whose workers were heard in the last `alive_s` has a controller."""
    import ray

    from actors.names import NAMESPACE, RUN_ID, run_id
    from actors.ray_calls import get
    from actors.state.checkpoint_files import newest_step
    from actors.state.keeper_fleet import OtherKeepers, is_of_this_version, keepers_of_run

    folder = run_dir(config)
    if not (folder / RUN_ID).is_file():
        return
    try:
        monitor = monitor_of(folder)
        report = get(monitor.report.remote(), timeout=30)
    except (LookupError, ray.exceptions.RayError):
        report = None  # its cluster is gone, or it has ended
    if report is not None and any(report.now - seen.at < alive_s for seen in report.seen.values()):
        raise FolderHeld(f"run {folder} is alive on this cluster; end it with `heddle workers stop {folder}` first.")
    if not overwrite:
        if other := [name for name in keepers_of_run(run_id(folder)) if not is_of_this_version(name)]:
            newest = newest_step(folder)
            raise OtherKeepers(other, newest + 1 if newest is not None else None)
        if report is not None and report.wishes.stop:
            get(monitor.stopped.remote(), timeout=30)
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
