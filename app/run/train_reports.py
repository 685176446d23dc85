"""Tells Ray Train how far a run is, in a thread: Ray Train takes in one report each time that it looks at the process,
every two seconds, and `ray.train.report` returns no sooner than the one before is taken in, however long that is.

    reports = TrainReports()
    reports.put(step)                   # returns at once
    reports.close()
"""

from __future__ import annotations

import logging
import threading

log = logging.getLogger(__name__)

_LAST_S = 5.0  # for the last report to be taken in


class TrainReports:
    """Reports checkpoints to Ray Train, from a thread. If they come faster than Ray Train takes them, only the newest
    is reported. After a refused report none is made: Ray Train counts those that have begun, and each later one would
    wait for ever for its turn."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._step: int | None = None  # to be reported
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, step: int) -> None:
        """The checkpoint after this step is whole."""
        with self._change:
            self._step = step
            self._change.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="train-reports", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Returns when the newest step is reported, or that takes too long."""
        with self._change:
            self._closed = True
            self._change.notify()
        if self._thread is not None:
            self._thread.join(_LAST_S)

    def _run(self) -> None:
        import ray.train

        while True:
            with self._change:
                self._change.wait_for(lambda: self._step is not None or self._closed)
                step, self._step = self._step, None
            if step is None:
                return
            # Without the checkpoint itself: at the next start Ray Train would insist that all that was reported still
            # exist.
            try:
                ray.train.report({"step": step})
            except Exception as error:  # of any kind, from Ray Train's own actors: the run does not depend on them
                why = f"{type(error).__name__}: {error}"
                log.warning("Ray Train does not hear of step %d and later ones, and the run goes on: %s", step, why)
                return
