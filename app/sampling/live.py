"""Samples while a run trains: made from a checkpoint by a Ray task of its own, so that no worker waits for pictures."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from app.settings.config import RunConfig

if TYPE_CHECKING:
    from ray import ObjectRef

log = logging.getLogger(__name__)

FINISH_S = 600.0  # the last samples of a run may take this long after its last step


def make(run_dir: str, device: str) -> list[str]:
    """Runs in the task: the config's prompts from the latest checkpoint, into RUN/samples."""
    from app.sampling.clips import sample_run

    return [str(path) for path in sample_run(Path(run_dir), device=device)]


class LiveSamples:
    """Starts a task at every checkpoint whose step count is a multiple of `sample.every`; one at a time.

    Where the workers use GPUs the task asks for one, too: it waits for one that no worker holds.
    """

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._every = config.sample.every if config.sample.prompts else 0
        self._workers = config.workers
        self._run_dir = run_dir
        self._running: ObjectRef[list[str]] | None = None

    def on_checkpoint(self, step: int) -> None:
        """Called after the checkpoint of `step` is complete."""
        if not self._every or (step + 1) % self._every:
            return
        import ray

        from actors.pool.workers import uses_gpu

        if self._running is not None and not self._collect(self._running, 0.0):
            log.warning("samples after %d steps are left out: the earlier ones are still being made", step + 1)
            return
        gpu = uses_gpu(self._workers)
        task = ray.remote(make).options(num_cpus=0.1, num_gpus=1 if gpu else 0, max_retries=0)
        # without a GPU of its own it would still see those of the node
        self._running = task.remote(str(self._run_dir), "cuda" if gpu else "cpu")

    def close(self) -> None:
        """Wait for the samples that are being made."""
        if self._running is not None and not self._collect(self._running, FINISH_S):
            log.warning("samples are not ready after %.0f s; make them with `heddle sample`", FINISH_S)

    def _collect(self, running: ObjectRef[list[str]], timeout_s: float) -> bool:
        """Whether the running task has ended; its failure is logged, it never ends the run."""
        import ray

        ready, _ = ray.wait([running], timeout=timeout_s)
        if not ready:
            return False
        try:
            files: list[str] = ray.get(running)
            log.info("samples: %s", ", ".join(files))
        except ray.exceptions.RayError as error:
            log.warning("sampling failed: %s", error)
        self._running = None
        return True
