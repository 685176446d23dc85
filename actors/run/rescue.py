"""The end of a run whose controller is gone: what its keepers hold goes to disk, nothing stays behind."""

from __future__ import annotations

import logging
from pathlib import Path

from actors.config import RuntimeConfig
from actors.names import find_monitor, run_id
from actors.outcome import Events, only_in_memory
from actors.ray_calls import kill
from actors.records.events import RunEvent
from actors.state.assemble import assemble_state
from actors.state.recovery import CommitLog
from actors.step import DataLost, Position
from ops.models.folders import resolve

log = logging.getLogger(__name__)


class _NoFeeder:
    """It is not known where the data stands."""

    def token(self, step: int) -> Position:
        raise DataLost("its feeder is gone")


class _LogListener:
    """The run's own listener is gone, too."""

    def on_step(self, metrics: object, timeline: object, plan: object) -> None:
        raise AssertionError("no step is committed here")

    def on_event(self, event: RunEvent) -> None:
        log.warning("%s: %s", event.event, event.line())

    def newest_line(self) -> None: ...
    def before_checkpoint(self) -> None: ...

    def on_checkpoint(self, folder: Path, step: int) -> None:
        log.info("%s was written from the keepers", folder)


def rescue(config: RuntimeConfig, recorded: tuple[int, int] | None) -> str:
    """Called when no controller of the run is alive. `recorded` are step and generation of the newest line of metrics,
    whose step counts, whether keepers have heard of it or not. Returns what is not on disk and how to go on; "": all
    is."""
    run_dir, model = Path(config.run_dir), resolve(config.model)[0]
    state = assemble_state(run_id(run_dir), config, model, _NoFeeder(), Events(_LogListener()))
    committed = state.standing.committed
    try:
        committed = max(committed, state.keep_last((), CommitLog(committed=committed, recorded=recorded)))
        state.seal_last()
    except Exception:  # a full disk, or keepers that are gone, too: the caller's error is the one to report
        log.exception("step %d was not written", committed)
    if not state.free_memory(committed):
        step = state.newest_in_memory(committed)
        return only_in_memory(step, state.step_on_disk(step), run_dir)
    try:
        kill(find_monitor(run_dir))
    except LookupError:
        log.debug("the monitor has ended, too")
    return ""
