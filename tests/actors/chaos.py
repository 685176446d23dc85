"""A worker that kills itself with SIGKILL in given phases of a step, each once, one after the other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from actors.worker.worker import Worker

FOLDER = "HEDDLE_CHAOS_FOLDER"  # `order` holds one phase per line; a file per phase that has fired


class ChaosWorker(Worker):
    """Dies in the next phase of the list that it enters; of several workers, the first one to enter it."""

    def _phase(self, phase: str) -> None:
        super()._phase(phase)
        if len(self.executor.world) < 2 or self.heartbeat.progress.step < 1:
            return
        folder = Path(os.environ[FOLDER])
        order = (folder / "order").read_text().split()
        waiting = [name for name in order if not (folder / f"fired-{name}").exists()]
        if waiting and waiting[0] == phase:
            try:
                (folder / f"fired-{phase}").touch(exist_ok=False)
            except FileExistsError:  # another worker was first
                return
            os.kill(os.getpid(), signal.SIGKILL)
