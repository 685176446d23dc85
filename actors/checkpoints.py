"""Writes checkpoints in the background, from the shards that workers have just exported; keeps the newest.

The writing task reads the shards out of the object store, so no worker waits for the disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from actors import checkpoint
from actors.config import CheckpointConfig
from actors.snapshots import Origin, Snapshot

log = logging.getLogger(__name__)

_FETCH_S = 120.0  # shards of a step, from keepers to this process
_WRITE_S = 3600.0


def root_of(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def latest(run_dir: Path) -> tuple[int, Path] | None:
    """(step, folder) of the newest complete checkpoint."""
    folder = checkpoint.latest(root_of(run_dir))
    return (int(folder.name.removeprefix("step-")), folder) if folder is not None else None


class Writer:
    """Checkpoints of one run. `meta` gives what a checkpoint says about itself; `sealed` is told when one is whole,
    `failed` when one could not be written."""

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        last_step: int,
        meta: Callable[[int], dict[str, Any]],
        sealed: Callable[[Path, int], None],
        failed: Callable[[int, str], None],
    ) -> None:
        self._root, self._config, self._last = root_of(run_dir), config, last_step
        self._meta, self._sealed, self._failed = meta, sealed, failed
        self._writing: dict[Any, tuple[int, Path]] = {}
        self._owed = False  # shards were lost with their workers before they were read

    def due(self, step: int) -> bool:
        """Whether a checkpoint is taken after this step: every so many steps, after the last, and soon after one that
        was lost with its workers."""
        return self._owed or step == self._last or (self._config.every > 0 and (step + 1) % self._config.every == 0)

    def save(self, step: int, snapshots: Sequence[Snapshot]) -> None:
        """Begin to write this step."""
        self._owed = False
        self._begin(step, [s.shard for s in snapshots])

    def save_origin(self, origin: Origin) -> None:
        """Write the last committed step from keepers and living workers, and wait for it: the run is about to stop."""
        self.wait()  # for an attempt at this step that may have lost its shards with their workers
        held = ray.get([keeper.get.remote(origin.step) for keeper in origin.keepers], timeout=_FETCH_S)
        self._begin(origin.step, [*origin.exports, *(ray.put(shard) for shards in held for shard in shards)])
        self.wait()

    def poll(self) -> None:
        """Seal what has been written; never waits."""
        self._collect(timeout_s=0)

    def wait(self) -> None:
        """Returns when everything begun is complete or has failed; a disk that takes no byte for an hour has failed."""
        while self._writing:
            if not self._collect(timeout_s=_WRITE_S):
                for step, folder in self._writing.values():
                    self._give_up(step, f"{folder} was not written in {_WRITE_S:.0f} s")
                self._writing.clear()

    def _begin(self, step: int, shards: Sequence[Any]) -> None:
        folder = checkpoint.step_folder(self._root, step)
        if any(f == folder for _, f in self._writing.values()):
            return
        task = ray.remote(_write).options(num_cpus=0, max_retries=0, name="checkpoint")
        self._writing[task.remote(str(folder), self._meta(step), list(shards))] = (step, folder)

    def _give_up(self, step: int, why: str) -> None:
        log.error("the checkpoint of step %d was not written: %s", step, why)
        self._failed(step, why)

    def _collect(self, timeout_s: float) -> bool:
        """Take what is done within the timeout. False when nothing was."""
        if not self._writing:
            return False
        done, _ = ray.wait(list(self._writing), num_returns=1, timeout=timeout_s)
        for reference in done:
            step, folder = self._writing.pop(reference)
            try:
                ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                self._owed = isinstance(error.cause, ray.exceptions.ObjectLostError)
                self._give_up(step, str(error.cause))
                continue
            except ray.exceptions.RayError as error:
                self._give_up(step, str(error))
                continue
            for removed in checkpoint.prune(self._root, self._config.keep_last, self._config.keep_every):
                log.info("removed %s", removed.name)
            self._sealed(folder, step)
        return bool(done)


def _write(folder: str, meta: dict[str, Any], shards: list[Any]) -> None:
    """Runs as a Ray task. Every range is written once, also when several holders have it."""
    target = Path(folder)
    if not checkpoint.begin(target):
        return
    written: set[tuple[int, int]] = set()
    for reference in shards:
        shard = ray.get(reference)
        if not written:
            needed = checkpoint.forecast_bytes(
                shard.total, ema="ema" in shard.arrays, num_shards=len(shards), num_parameters=len(meta["parameters"])
            )
            checkpoint.check_free_space(target, needed)
        if (shard.lo, shard.hi) not in written and shard.lo < shard.hi:
            checkpoint.write_shard(target, shard)
            written.add((shard.lo, shard.hi))
    checkpoint.seal(target, meta, sorted(written))
