"""The end of a run: its last committed step goes to disk, its actors are ended, and what is left is named."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from actors.config import RuntimeConfig
from actors.feed.step_source import DataCounts
from actors.outcome import Events, Exit, StopRun, only_in_memory
from actors.pool.monitor import MonitorHandle
from actors.ray_calls import kill
from actors.records.events import RunFinished
from actors.run.committer import Committer
from actors.step import DataLost, Seat
from data.errors import DataError, DataIOError

log = logging.getLogger(__name__)


class ClosablePart(Protocol):
    """A part that has started actors."""

    def close(self) -> None: ...


@dataclass(kw_only=True)
class Ending:
    """Ends one run, whatever ended its steps.

    ending.finish(world, is_stopped); ending.free_memory()      # all steps are committed; or, where they are not:
    ending.keep_last(world)
    ending.close()              # in any case, last
    """

    config: RuntimeConfig
    events: Events
    committer: Committer
    monitor: MonitorHandle
    parts: Sequence[ClosablePart]  # whose actors end with the run
    left: str = ""  # afterwards: what is not on disk, and how to go on

    def finish(self, world: Sequence[Seat], is_stopped: Callable[[], bool]) -> None:
        """Returns when the last step is on disk: an attempt may have lost its shards with their workers, and `world`
        still holds them. Raises StopRun when it cannot be written, or not in time where `is_stopped` says that the run
        shall end."""
        state, last = self.committer.state, self.config.train.steps - 1

        def look() -> None:
            if is_stopped():
                state.writer.hurry()

        state.writer.wait(look)
        if is_stopped() and state.step_on_disk() < last:  # `keep_last` then makes its own attempt at it
            reason = f"asked to end before the checkpoint of step {last} was written"
            raise StopRun(self.committer.outcome(Exit.RESUMABLE, reason))
        if state.step_on_disk() < last:
            state.keep_last(world, self.committer.log)
            state.seal_last()
        if state.step_on_disk() < last:
            reason = (
                f"all steps are done, but the checkpoint of step {last} was not written (see "
                f"{self._run_dir}/events.jsonl). Make room in {self._run_dir} and continue with --resume."
            )
            raise StopRun(self.committer.outcome(Exit.FAILURE, reason))
        self.events.tell(RunFinished(step=self.committer.committed, ledger=self._account_of_data()))

    def _account_of_data(self) -> DataCounts:
        """What became of every draw. A feeder that has died since the last step is opened anew for it; where that
        fails nothing is known, and the run is finished all the same."""
        try:
            return self.committer.source.ledger()
        except DataLost as error:
            try:
                self.committer.reopen_data(str(error))
                return self.committer.source.ledger()
            except (DataLost, DataError, DataIOError) as again:
                log.warning("how often samples were drawn is not known: %s", again)
                return {}

    def keep_last(self, world: Sequence[Seat]) -> None:
        """The run ends before its last step: what can be resumed goes to disk, nothing stays behind. `world` are
        workers that wait between two steps. Never raises."""
        self.events.end()
        try:
            self.committer.commit_until(self.committer.state.keep_last(world, self.committer.log))
            self.committer.state.seal_last()
        except Exception:  # whatever it is, the rest of the end must come
            log.exception("the last committed step was not written")
        try:
            self.free_memory()
        except Exception:
            log.exception("keepers and monitor could not be ended")

    def close(self) -> None:
        """End the run's workers and helpers, but for keepers and monitor: after an error that Ray Train answers with
        another controller they are what it continues from."""
        for part in self.parts:
            try:
                part.close()
            except Exception:  # Ray may be gone: the others are ended all the same, and the first error is reported
                log.warning("%s could not be ended", type(part).__name__, exc_info=True)

    def free_memory(self) -> None:
        """End keepers and monitor, unless a step is held nowhere else."""
        if self.committer.state.free_memory(self.committer.committed):
            kill(self.monitor)
            return
        self.monitor.stopped.remote()
        state, unread = self.committer.state, self.committer.log.unread
        step = state.newest_in_memory(self.committer.committed)
        on_disk = state.step_on_disk(math.inf if unread else step)
        self.left = only_in_memory(step, on_disk, self._run_dir, unread=unread)

    @property
    def _run_dir(self) -> Path:
        return Path(self.config.run_dir)
