"""Writes checkpoints in the background, from the shards that workers have just exported; keeps the newest.

One Ray task writes all shards of a step, a few at a time, out of the object store or the keepers' memory: no worker
waits for the disk, and no state passes through the controller. One checkpoint is written at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path

import ray

from actors.config import CheckpointConfig
from actors.messages import Origin, ShardKeeper, Snapshot
from actors.outcome import Events
from actors.ray_calls import cancel, get, remote_of, wait
from actors.records.events import CheckpointFailed
from actors.refs import Ref
from actors.state import checkpoint_files as checkpoint
from actors.state.checkpoint_files import Meta
from ops.shards import ShardState

log = logging.getLogger(__name__)

_WRITE_S = 3600.0
_AT_ONCE = 4  # shards that are written at the same time, and so in the writing task's memory


def root_of(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def latest(run_dir: Path) -> tuple[int, Path] | None:
    """(step, folder) of the newest complete checkpoint; its bytes are not read."""
    folders = checkpoint.complete(root_of(run_dir))
    return (step_of(folders[-1]), folders[-1]) if folders else None


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFiles:
    """Shards of a step in its folder, which is no checkpoint yet."""

    meta: Meta
    bounds: list[tuple[int, int]]
    files: list[checkpoint.File]


class Writer:
    """Checkpoints of one run. What becomes whole, or could not be written, is told to `events`."""

    def __init__(self, run_dir: Path, config: CheckpointConfig, last_step: int, events: Events) -> None:
        self._root, self._config, self._last, self._events = root_of(run_dir), config, last_step, events
        self._writing: dict[Ref[WrittenFiles | None], tuple[int, Path]] = {}
        self._last_state: WrittenFiles | None = None  # written, and no checkpoint yet
        self._owed = False  # shards were lost with their workers before they were read

    def due(self, step: int) -> bool:
        """Whether a checkpoint is taken after this step: every so many steps, after the last, and soon after one that
        was lost with its workers."""
        return self._owed or step == self._last or (self._config.every > 0 and (step + 1) % self._config.every == 0)

    def puts_off(self, step: int) -> bool:
        """Whether an earlier checkpoint is still being written: then a later step is taken instead. Never the last."""
        if not self._writing or step == self._last:
            return False
        late = min(s for s, _ in self._writing.values())
        if not self._owed:
            log.warning("the checkpoint of step %d is still being written: that of step %d is put off", late, step)
        self._owed = True
        return True

    def save(self, snapshots: Sequence[Snapshot], meta: Meta) -> None:
        """Begin to write a step; `meta` is what the checkpoint says about itself, with that step. Not when the last
        state of the run has been written."""
        self._owed = False
        if self._last_state is not None:
            return
        self._begin([s.shard for s in snapshots], (), meta)

    def save_origin(self, origin: Origin, meta: Meta) -> bool:
        """Write the last step from keepers and living workers, and wait for it: the run is about to stop. It becomes
        a checkpoint by `seal_last`. False when it could not be written, or is one."""
        self.wait()  # for an attempt at this step that may have lost its shards with their workers
        self._begin(origin.exports, origin.keepers, meta, seal=False)
        self.wait()
        return self._last_state is not None

    def seal_last(self) -> None:
        """Make a checkpoint of what `save_origin` has written, if anything."""
        if (written := self._last_state) is None:
            return
        self._last_state, step = None, written.meta["step"]
        folder = checkpoint.step_folder(self._root, step)
        try:
            checkpoint.seal(folder, written.meta, written.bounds, written.files)
        except (OSError, checkpoint.CheckpointError) as error:
            self._give_up(step, str(error))
            checkpoint.remove_torn(folder)
        else:
            self._is_whole(step, folder)

    def poll(self) -> None:
        """Seal what has been written; never waits."""
        self._collect(timeout_s=0)

    def wait(self) -> None:
        """Returns when everything begun is complete or has failed; what is not written within an hour has failed."""
        while self._writing:
            if not self._collect(timeout_s=_WRITE_S):
                for reference, (step, folder) in self._writing.items():
                    cancel(reference)
                    self._give_up(step, f"{folder} was not written in {_WRITE_S:.0f} s")
                self._writing.clear()

    def _begin(
        self, shards: Sequence[Ref[ShardState]], keepers: Sequence[ShardKeeper], meta: Meta, seal: bool = True
    ) -> None:
        step: int = meta["step"]
        folder = checkpoint.step_folder(self._root, step)
        if any(f == folder for _, f in self._writing.values()):
            return
        named = remote_of(_write).options(num_cpus=0, max_retries=0, name="checkpoint")
        reference: Ref[WrittenFiles | None] = named.remote(str(folder), meta, list(shards), list(keepers), seal)
        self._writing[reference] = (step, folder)

    def _give_up(self, step: int, why: str) -> None:
        log.error("the checkpoint of step %d was not written: %s", step, why)
        self._events.tell(CheckpointFailed(step=step, why=why))

    def _collect(self, timeout_s: float) -> bool:
        """Take what is done within the timeout. False when nothing was."""
        if not self._writing:
            return False
        done, _ = wait(list(self._writing), num_returns=1, timeout=timeout_s)
        for reference in done:
            step, folder = self._writing.pop(reference)
            try:
                unsealed = get(reference)
            except ray.exceptions.RayTaskError as error:
                self._owed |= isinstance(error.cause, ray.exceptions.ObjectLostError)
                self._give_up(step, str(error.cause))
                continue
            except ray.exceptions.RayError as error:  # its process was ended: it could not clean up
                self._give_up(step, str(error))
                checkpoint.remove_torn(folder)
                continue
            if unsealed is not None:
                self._last_state = unsealed
            else:
                self._is_whole(step, folder)
        return bool(done)

    def _is_whole(self, step: int, folder: Path) -> None:
        for removed in checkpoint.prune(self._root, self._config.keep_last, self._config.keep_every):
            log.info("removed %s", removed.name)
        self._events.checkpoint(folder, step)


def _write(
    folder: str, meta: Meta, shards: list[Ref[ShardState]], keepers: list[ShardKeeper], seal: bool = True
) -> WrittenFiles | None:
    """Runs as a Ray task. Every range is written once, also when several holders have it. What a failed attempt has
    written is removed: on a full disk it would make the next one fail, too. Returns what is to be sealed, if not
    `seal`."""
    target = Path(folder)
    if not checkpoint.begin(target):
        return None
    try:
        written = _write_shards(target, meta, shards, keepers)
        done = WrittenFiles(meta=meta, bounds=sorted(written), files=list(written.values()))
        if not seal:
            return done
        checkpoint.seal(target, meta, done.bounds, done.files)
        return None
    except BaseException:
        checkpoint.remove_torn(target)
        raise


def _write_shards(
    target: Path, meta: Meta, shards: list[Ref[ShardState]], keepers: list[ShardKeeper]
) -> dict[tuple[int, int], checkpoint.File]:
    """The files by their ranges. What has begun is written or has failed when this returns or raises."""
    writing: dict[tuple[int, int], Future[checkpoint.File]] = {}
    under_way: set[Future[checkpoint.File]] = set()
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="shard") as pool:
        for shard in _one_by_one(meta["step"], shards, keepers):
            if not writing:
                needed = checkpoint.forecast_bytes(
                    shard.total,
                    ema="ema" in shard.arrays,
                    num_shards=len(shards),
                    num_parameters=len(meta["parameters"]),
                )
                checkpoint.check_free_space(target, needed)
            if (shard.lo, shard.hi) in writing or shard.lo == shard.hi:
                continue
            begun = writing[shard.lo, shard.hi] = pool.submit(checkpoint.write_shard, target, shard)
            del shard
            under_way.add(begun)
            while len(under_way) == _AT_ONCE:
                done, under_way = wait_for(under_way, return_when=FIRST_COMPLETED)
                for one in done:
                    one.result()  # after an error nothing more is fetched
    return {bounds: one.result() for bounds, one in writing.items()}


def _one_by_one(step: int, shards: list[Ref[ShardState]], keepers: list[ShardKeeper]) -> Iterator[ShardState]:
    """A large state does not fit into one node's memory: each shard is fetched when there is a place for it."""
    while shards:
        yield get(shards.pop(0))
    for keeper in keepers:
        for lo, hi in get(keeper.held.remote()).get(step, []):
            yield from get(keeper.get.remote(step, lo, hi))
