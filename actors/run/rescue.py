"""The end of a run whose controller could not write one: what its keepers hold goes to disk, nothing stays behind."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import ray

from actors.config import RuntimeConfig
from actors.names import find_monitor, run_id
from actors.outcome import only_in_memory
from actors.records.events import RunEvent
from actors.state.commit_log import CommitLog
from actors.state.run_state import RunState
from actors.step import DataLost
from ops.models.folders import resolve

log = logging.getLogger(__name__)


def rescue(config: RuntimeConfig) -> str:
    """Called when no controller of the run is alive. Returns what is not on disk and how to go on; "": all is."""
    run_dir = Path(config.run_dir)
    commits = CommitLog(commit=lambda done: None, committed=-1)
    state = RunState(run_id(run_dir), config, resolve(config.model)[0], commits, _no_feeder, _sealed, _tell)
    commits.committed = state.standing.committed
    try:
        state.keep_last(())
    except Exception:  # a full disk, or keepers that are gone, too: the caller's error is the one that is told
        log.exception("step %d was not written", commits.committed)
    if not state.let_go():
        on_disk = state.on_disk()
        return only_in_memory(commits.committed, on_disk[0] if on_disk is not None else -1, run_dir)
    try:
        ray.kill(find_monitor(run_dir))
    except LookupError:
        log.debug("the monitor has ended, too")
    return ""


def _no_feeder(step: int) -> dict[str, Any]:
    raise DataLost("its feeder is gone")


def _sealed(folder: Path, step: int) -> None:
    log.info("%s was written from the keepers", folder)


def _tell(event: RunEvent) -> None:
    log.warning("%s: %s", event.event, event.line())
