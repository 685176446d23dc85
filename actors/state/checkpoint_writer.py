"""Has checkpoints written in the background, by the keepers that hold the state; keeps the newest.

Each keeper writes what lies on its node, all of them at a time: no worker waits for the disk, and no state crosses the
network. A Ray task says which keeper writes what, and makes a checkpoint of it. One that is due is put off while
another is written; the last one is not, nor one of what leaves with its nodes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from actors.config import CheckpointConfig
from actors.held_state import WRITES, HeldShard, NodeKeeper, Origin, WrittenShard
from actors.outcome import Events
from actors.ray_calls import GONE, cancel, get, remote_of, wait
from actors.records.events import CheckpointFailed
from actors.refs import Ref
from actors.state import checkpoint_files as checkpoint
from actors.state.checkpoint_files import Meta
from actors.state.checkpoint_retention import prune, remove_torn
from actors.state.keeper import VersionLost
from ops.shards import missing

log = logging.getLogger(__name__)

_WRITE_S = 3600.0
_STOPPING_S = 600.0  # at least, where somebody waits for the end of the run
_SLOW_BYTES = 50e6  # a second, of storage that is slow and does not hang
_LOOK_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFiles:
    """Shards of a step in its folder, which is no checkpoint yet."""

    meta: Meta
    bounds: list[tuple[int, int]]
    files: list[checkpoint.File]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attempt:
    """A step that is being written."""

    step: int
    folder: Path
    num_bytes: int
    began: float
    until: float


class Writer:
    """Checkpoints of one run, whose state takes `weight_bytes` of each trained weight. `events` hears what becomes
    whole, or could not be written."""

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        last_step: int,
        events: Events,
        *,
        weight_bytes: int,
        unmoved: set[int],
        disown: Callable[[int], None],
    ) -> None:
        """`unmoved`: steps of which storage may have an old checkpoint that is not the run's own, see
        `CheckpointsOnDisk`. A step whose checkpoint has become whole is taken out of it; one that could not be written
        is given to `disown`."""
        self._root, self._config, self._last, self._events = checkpoint.root_of(run_dir), config, last_step, events
        self._weight_bytes = weight_bytes
        self._unmoved, self._disown = unmoved, disown
        self._writing: dict[Ref[WrittenFiles | None], _Attempt] = {}
        self._last_state: WrittenFiles | None = None  # written, and no checkpoint yet
        self._newest_whole = -1  # of those that this writer has made, and that the run has not gone back from
        self._known: dict[Path, int] = {}  # seen whole, by anybody: see `prune`
        self._torn: list[Path] = []  # left by those that were given up: removed when storage answers again
        self._longest_s = 0.0  # that a checkpoint took that is whole
        self._hurries = False  # somebody waits for the end of the run
        # One was put off, given up, lost with those who wrote it, or failed where an old one may lie there, which the
        # next start could take for the run's own: a later step is taken soon.
        self._owed = False

    def due(self, step: int) -> bool:
        """Whether a checkpoint is taken after this step: at the interval of the settings, after the last, and soon
        after one that was put off, given up, or lost with those who wrote it; not while the one before is being
        written, or workers would copy their state after every step of that time."""
        owed = self._owed and not self._writing
        return owed or step == self._last or (self._config.every > 0 and (step + 1) % self._config.every == 0)

    def puts_off(self, step: int) -> bool:
        """Whether an earlier checkpoint is still being written: then a later step is taken instead. Never the last."""
        if not self._writing or step == self._last:
            return False
        late = min(self.steps)
        if not self._owed:
            log.warning("the checkpoint of step %d is still being written: that of step %d is put off", late, step)
        self._owed = True
        return True

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints that are being written."""
        return sorted(one.step for one in self._writing.values())

    def has(self, step: int) -> bool:
        """Whether a checkpoint of this step is being written, or was by this writer, or one of a later step was."""
        return step in self.steps or step <= self._newest_whole

    def go_back(self, step: int) -> None:
        """A generation goes on after this step: later checkpoints, which it has passed over, count no more, or the next
        one would be taken for an old one."""
        self._newest_whole = min(self._newest_whole, step)

    def save(self, version: Origin, meta: Meta) -> None:
        """Begin to write a step, which its keepers hold until it is written; `meta` is what the checkpoint says about
        itself, with that step. Not when the last state of the run has been written."""
        self._owed = False
        if self._last_state is None:
            self._begin(version, meta)

    def hurry(self) -> None:
        """The run shall end. What is written, now or later, has five times as long as the slowest one took or, where
        none was written yet, what slow storage takes for it; ten minutes at least. An hour is the most, as ever."""
        if self._hurries:
            return
        self._hurries, now = True, time.monotonic()
        for reference, one in self._writing.items():
            limit_s = self._limit_s(one.num_bytes)
            log.warning("the checkpoint of step %d is waited for up to %.0f s more", one.step, limit_s)
            self._writing[reference] = replace(one, until=min(one.until, now + limit_s))

    def save_origin(self, origin: Origin, meta: Meta) -> bool:
        """Write the last step and wait for it: the run is about to stop. It becomes a checkpoint by `seal_last`. False
        when it could not be written, or is a checkpoint already."""
        self.wait()  # for an attempt at this step that may have lost its state
        self._begin(origin, meta, seal=False)
        self.wait()
        return self._last_state is not None

    def seal_last(self) -> None:
        """Make a checkpoint of what `save_origin` has written, if anything."""
        if (written := self._last_state) is None:
            return
        self._last_state, step = None, written.meta["step"]
        folder = checkpoint.step_folder(self._root, step)
        self._events.before_checkpoint()
        try:
            checkpoint.seal(folder, written.meta, written.bounds, written.files)
        except (OSError, checkpoint.CheckpointError) as error:
            self._give_up(step, str(error))
            remove_torn(folder)
        else:
            self._is_whole(step, folder)

    def poll(self) -> None:
        """Seal what has been written; never waits. What is not written within an hour has failed."""
        self._collect(timeout_s=0)

    def wait(self, look: Callable[[], None] = lambda: None) -> None:
        """Returns when everything begun is complete or has failed, as for `poll`. `look` is called again and again."""
        while self._writing:
            look()
            left_s = min(one.until for one in self._writing.values()) - time.monotonic()
            self._collect(timeout_s=min(max(0.0, left_s), _LOOK_S))

    def _begin(self, version: Origin, meta: Meta, seal: bool = True) -> None:
        step: int = meta["step"]
        folder = checkpoint.step_folder(self._root, step)
        if step in self.steps:
            return
        self._known.pop(folder, None)
        if seal:
            self._events.before_checkpoint()
        named = remote_of(_write).options(num_cpus=0, max_retries=0, name="checkpoint")
        reference: Ref[WrittenFiles | None] = named.remote(
            str(folder), meta, version.generation, list(version.keepers), seal, step in self._unmoved
        )
        now, num_bytes = time.monotonic(), _weights_of(meta) * self._weight_bytes
        until = now + (self._limit_s(num_bytes) if self._hurries else _WRITE_S)
        self._writing[reference] = _Attempt(step=step, folder=folder, num_bytes=num_bytes, began=now, until=until)

    def _limit_s(self, num_bytes: int) -> float:
        usual_s = 5 * self._longest_s or num_bytes / _SLOW_BYTES
        return min(_WRITE_S, max(_STOPPING_S, usual_s))

    def _give_up(self, step: int, why: str) -> None:
        self._owed |= step in self._unmoved
        self._disown(step)
        log.error("the checkpoint of step %d was not written: %s", step, why)
        self._events.tell(CheckpointFailed(step=step, why=why))

    def _collect(self, timeout_s: float) -> None:
        """Take what is done within the timeout, and give up what takes too long: storage that hangs would keep every
        later checkpoint back, and the version in the nodes' memory."""
        if not self._writing:
            return
        done, late = wait(list(self._writing), num_returns=1, timeout=timeout_s)
        for reference in late:
            if time.monotonic() >= (hanging := self._writing[reference]).until:
                del self._writing[reference]
                cancel(reference)
                self._owed = True
                self._torn.append(hanging.folder)  # to look into it now could hang this process, too
                seconds = time.monotonic() - hanging.began
                self._give_up(hanging.step, f"{hanging.folder} was not written in {seconds:.0f} s")
        for reference in done:
            ended = self._writing.pop(reference)
            step, folder = ended.step, ended.folder
            try:
                unsealed = get(reference)
            except ray.exceptions.RayTaskError as error:
                self._owed |= isinstance(error.cause, StateLost)
                self._give_up(step, str(error.cause))
                continue
            except ray.exceptions.RayError as error:  # its process or node is gone: it could not clean up
                self._owed = True
                self._give_up(step, str(error))
                remove_torn(folder)
                continue
            self._longest_s = max(self._longest_s, time.monotonic() - ended.began)
            if unsealed is not None:
                self._last_state = unsealed
            else:
                self._is_whole(step, folder)
            self._remove_torn()

    def _remove_torn(self) -> None:
        """Storage answers: what attempts have left there that were given up takes no more room."""
        writing = {one.folder for one in self._writing.values()}
        last = {checkpoint.step_folder(self._root, self._last_state.meta["step"])} if self._last_state else set()
        for folder in set(self._torn) - writing - last:
            remove_torn(folder)
        self._torn = []

    def _is_whole(self, step: int, folder: Path) -> None:
        self._newest_whole = max(self._newest_whole, step)  # an earlier one may be whole later
        self._unmoved.discard(step)
        last, every, until = self._config.keep_last, self._config.keep_every, self._newest_whole
        old = prune(self._root, last, every, until=until, writing=self.steps, known=self._known)
        for removed in old:
            log.info("removed %s", removed.name)
        self._events.checkpoint(folder, step)


def _weights_of(meta: Meta) -> int:
    """Number of trained weights."""
    total: int = sum(math.prod(parameter["shape"]) for parameter in meta["parameters"])
    return total


class StateLost(RuntimeError):
    """Keepers do not hold all of a step any more. A later one is written soon."""


def _write(
    folder: str, meta: Meta, generation: int, keepers: list[NodeKeeper], seal: bool = True, anew: bool = False
) -> WrittenFiles | None:
    """Runs as a Ray task. Every range is written once, also when several keepers have it. What a failed attempt has
    written is removed: on a full disk it would make the next one fail, too. Returns what is to be sealed, if not
    `seal`. `anew`: as of `checkpoint_files.begin`. Raises StateLost, OSError, CheckpointError."""
    target, step = Path(folder), meta["step"]
    if not checkpoint.begin(target, anew):
        return None
    try:
        held = _held(keepers, step, generation)
        _check(target, meta, [shard for shards in held for shard in shards])
        shares = _shares([[(shard.lo, shard.hi) for shard in shards] for shards in held])
        asked = [
            keeper.write.options(concurrency_group=WRITES).remote(folder, step, generation, ranges)
            for keeper, ranges in zip(keepers, shares, strict=True)
            if ranges
        ]
        written = _answers(asked)
        files = [checkpoint.File(name=file.name, size=file.size, crc32=file.crc32) for file in written]
        done = WrittenFiles(meta=meta, bounds=sorted((file.lo, file.hi) for file in written), files=files)
        if not seal:
            return done
        checkpoint.seal(target, meta, done.bounds, done.files)
        return None
    except BaseException:
        remove_torn(target)
        raise


def _held(keepers: Sequence[NodeKeeper], step: int, generation: int) -> list[list[HeldShard]]:
    """What each of these keepers holds of a version; nothing where it is gone."""
    found = []
    for reference in [keeper.held.remote(step, generation) for keeper in keepers]:
        try:
            found.append(get(reference))
        except GONE:
            found.append([])
    return found


def _shares(held: Sequence[Sequence[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """The ranges that each keeper writes of those that it holds: each element once, and no keeper much more than the
    others, as far as that can be.

    >>> _shares([[(0, 10), (10, 20)], [(0, 10), (10, 20), (20, 30)]])
    [[(0, 10), (10, 20)], [(20, 30)]]
    """
    shares: list[list[tuple[int, int]]] = [[] for _ in held]
    taken: list[tuple[int, int]] = []
    holders: dict[tuple[int, int], list[int]] = {}
    for number, ranges in enumerate(held):
        for part in ranges:
            holders.setdefault(part, []).append(number)
    for lo, hi in sorted(holders, key=lambda part: (len(holders[part]), part)):  # what one keeper alone has comes first
        least = min(holders[lo, hi], key=lambda number: sum(b - a for a, b in shares[number]))
        parts = missing(taken, lo, hi)
        shares[least] += parts
        taken += parts
    return shares


def _check(target: Path, meta: Meta, held: Sequence[HeldShard]) -> None:
    """Raises StateLost where this is not the whole vector, CheckpointError where that does not fit the disk."""
    total = max((shard.total for shard in held), default=1)
    if gaps := missing([(shard.lo, shard.hi) for shard in held], 0, total):
        raise StateLost(f"no keeper holds {gaps} of step {meta['step']} any more")
    weight_bytes = max((shard.num_bytes // (shard.hi - shard.lo) for shard in held if shard.lo < shard.hi), default=0)
    needed = checkpoint.forecast_bytes(
        total, weight_bytes=weight_bytes, num_shards=len(held), num_parameters=len(meta["parameters"])
    )
    checkpoint.check_free_space(target, needed)


def _answers(asked: Sequence[Ref[list[WrittenShard]]]) -> list[WrittenShard]:
    """What keepers have written, when all have ended: what a failed attempt leaves is removed, and one that goes on
    would leave more. Raises what kept the first of them from it."""
    written: list[WrittenShard] = []
    failures: list[Exception] = []
    for reference in asked:
        try:
            written += _answer(reference)
        except Exception as failure:  # of any kind: the others end first
            failures.append(failure)
    if failures:
        raise failures[0]
    return written


def _answer(reference: Ref[list[WrittenShard]]) -> list[WrittenShard]:
    """What a keeper has written. Raises the error that stopped it."""
    try:
        return get(reference)
    except GONE as error:
        raise StateLost(f"a keeper is gone: {type(error).__name__}") from None
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, VersionLost):
            raise StateLost(str(error.cause)) from None
        raise error.cause from None
