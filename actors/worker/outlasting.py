"""An encode for a later step that its own step does not wait for: it goes on in a thread beside the step's end.

    outlasting = OutlastingEncode(task, encode)   # on the task thread, after the step's other cascades
    outlasting.start()
    ...                                           # sum, update, snapshot
    results = outlasting.end()                    # exchanges with its bag, and returns what `encode` has returned

Collectives of a bag must not run beside those of the update (their order would differ between workers). So the thread
computes alone, and waits at a gate before it exchanges anything: `end` opens it, while the task thread stands still.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from actors.messages import CascadeTask
from actors.worker.handoff import EncodeResult
from actors.worker.work_done import Launched


class OutlastingEncode:
    """One such encode of this worker. A worker has at most one: it is the last cascade of its step here."""

    def __init__(self, task: CascadeTask, encode: Callable[[], list[EncodeResult]]) -> None:
        """`encode` runs in the thread that `start` begins, and calls `pass_gate` before its first collective."""
        self.task = task
        self.launched: Launched | None = None  # what is measured of it
        self.kept: list[EncodeResult] = []  # results that stay on this worker
        self._encode = encode
        self._gate = threading.Event()
        self._results: list[EncodeResult] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"heddle-{task.module}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_own(self) -> bool:
        """Whether the caller is the thread of this encode."""
        return threading.current_thread() is self._thread

    def pass_gate(self) -> None:
        """Returns when the step that the encode outlasts has ended."""
        self._gate.wait()

    def end(self) -> list[EncodeResult]:
        """Let the encode exchange its results with its bag, and return them. Raises the error of `encode`."""
        self.abandon()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._results

    def abandon(self) -> None:
        """Wait until the thread has ended, well or not. Where the groups were closed before, its collectives raise."""
        self._gate.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._results = self._encode()
        except Exception as error:  # raised again by `end`
            self._error = error
