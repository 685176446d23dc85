"""The training state of a run outside its workers: shards in keepers, checkpoints on disk, and which of it is newest.

A generation starts from `choose`, a controller from `first`, and a run that ends early leaves its last committed step
on disk (`keep_last`) and nothing in the cluster's memory (`let_go`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import ray

from actors import checkpoints, keeper
from actors.checkpoint import load, trained_parameters
from actors.commits import CommitLog
from actors.config import RuntimeConfig
from actors.gone import GONE
from actors.keepers import Keepers
from actors.snapshots import Origin, Snapshot, origin_of
from actors.source import DataLost
from actors.steps import CollectedStep, GenerationLost, Seat
from ops.config import ModelConfig

log = logging.getLogger(__name__)

_EXPORT_S = 30.0  # a worker between two steps answers at once
_REPAIR_S = 60.0  # steps that are under way come first
_REPAIR_PAUSE_S = 0.5  # between two repairs of the keepers


class RunState:
    """Where a run's training state is held. `tell` gets what belongs into events.jsonl."""

    def __init__(
        self,
        run: str,
        config: RuntimeConfig,
        model: ModelConfig,
        commits: CommitLog,
        token: Callable[[int], dict[str, Any]],
        sealed: Callable[[Path, int], None],
        tell: Callable[..., None],
    ) -> None:
        """`token(step)` is the data position before it, or raises DataLost; `sealed(folder, step)` is told of whole
        checkpoints."""
        self._config, self._model, self._commits, self._token, self._tell = config, model, commits, token, tell
        self._run_dir = Path(config.run_dir)
        self.keepers = Keepers(run, config.snapshot, lost=lambda name: tell("keeper_lost", keeper=name))
        last = config.train.steps - 1
        self.writer = checkpoints.Writer(self._run_dir, config.checkpoint, last, self._meta, sealed, self._not_written)
        # Keepers refuse generations that they have left behind, also when the monitor has forgotten them.
        self.standing = self.keepers.standing(timeout_s=_EXPORT_S)
        self.survivors: list[Snapshot] = []  # held by workers that have left a failed generation
        self._first: Origin | None = None  # found by `first`, used by no generation yet
        self._generation = 0  # the newest that has been given a state
        self._forecast_told = False
        self._repaired_at = 0.0  # monotonic seconds

    def first(self) -> Origin | None:
        """What this controller continues from; None: a new run."""
        newest = self.standing.committed
        self._first = origin_of(self.keepers, [], self.on_disk(), timeout_s=_EXPORT_S, newest=newest)
        return self._first

    def choose(self, generation: int, world: Sequence[Seat]) -> Origin | None:
        """The newest whole state for a generation; `world` are workers of a cleanly ended one, which still hold it."""
        self._generation = generation
        if (first := self._first) is not None:
            self._first = None
            return first
        newest = self._commits.newest
        exports = [*self.survivors, *exports_of(world, newest)]
        origin = origin_of(self.keepers, exports, self.on_disk(), timeout_s=10, newest=newest)
        step = origin.step if origin is not None else -1
        if (lost := self._commits.committed - step) > 0:
            where = origin.checkpoint if origin is not None else "the start"
            self._tell("fallback", to_step=step, lost_steps=lost)
            log.warning("no snapshot is whole; %d steps are computed again from %s", lost, where)
        self._commits.keep_until(step)
        self.keepers.rollback(step, generation)
        return origin

    def data_token(self) -> Mapping[str, Any] | None:
        """Position and identity of the data at or before the committed step: the keepers', else the checkpoint's."""
        position, found = self.keepers.standing(timeout_s=_EXPORT_S).position, self.on_disk()
        committed = self._commits.committed
        held = position if position is not None and position[0] <= committed else None
        if found is not None and (held is None or held[0] < found[0] <= committed):
            return load(found[1])[0].get("data_token")
        return held[1] if held is not None else None

    def on_disk(self) -> tuple[int, Path] | None:
        return checkpoints.latest(self._run_dir)

    # -- during the run ------------------------------------------------------------------------------------------------

    def is_exported(self, step: int) -> bool:
        """Whether workers copy their state after this step, for keepers or for a checkpoint."""
        snapshot = self._config.snapshot
        return (snapshot.enabled and step % snapshot.every == 0) or self.writer.due(step)

    def finished(self, done: CollectedStep) -> None:
        """All workers have finished a step; it is committed when its shards are held."""
        if not self._forecast_told:
            self._forecast_told = True
            self._forecast(done.snapshots)
        self._commits.add(done)
        if done.snapshots and self.writer.due(done.running.step):
            self.writer.save(done.running.step, done.snapshots)

    def committed(self, done: CollectedStep, position: Mapping[str, Any] | None) -> None:
        """The step is safe: older ones may go. `position` is the data's behind it, with its counts: kept with the
        state, so that whoever goes on from that state has them exactly."""
        if done.running.generation == self._generation:  # it holds a newer state: theirs may leave the memory
            self.survivors = []
        if done.snapshots:  # with snapshot.every > 1 the last one that was taken must stay
            self.keepers.commit(done.running.step, position)
        self.writer.poll()

    def repair_keepers(self, world: Sequence[Seat]) -> None:
        """A keeper is gone: start another and give it the newest shards of the workers it served. Raises GenerationLost
        when it is a worker that is gone.

        On a lost node that Ray has not noticed yet, every new one is lost at once: such tries keep a distance.
        """
        time.sleep(max(0.0, self._repaired_at + _REPAIR_PAUSE_S - time.monotonic()))
        self._repaired_at = time.monotonic()
        self.keepers.repair([seat.node for seat in world])
        asked = {seat.handle.set_keepers.remote(self.keepers.of(rank)): seat for rank, seat in enumerate(world)}
        held: list[Snapshot] = []
        while asked:
            done, _ = ray.wait(list(asked), timeout=_REPAIR_S)
            if not done:
                log.warning("%s could not be given new keepers yet", ", ".join(seat.name for seat in asked.values()))
                return
            seat = asked.pop(done[0])
            try:
                held += filter(None, [ray.get(done[0])])
            except GONE:
                raise GenerationLost([seat.name], {}) from None
            except ray.exceptions.RayError as error:
                log.warning("%s could not be given new keepers yet: %s", seat.name, error)
                return
        self._commits.replace_acknowledgements(held)

    # -- the end -------------------------------------------------------------------------------------------------------

    def keep_last(self, world: Sequence[Seat]) -> None:
        """The run ends before its last step: the last committed one goes from memory to disk. `world` are workers that
        wait between two steps."""
        newest = self._commits.committed
        exports = [*self.survivors, *exports_of(world, newest)]
        found = origin_of(self.keepers, exports, self.on_disk(), timeout_s=10, newest=newest)
        if found is not None and found.checkpoint is None:
            self.writer.save_origin(found)
        self.writer.wait()

    def let_go(self) -> bool:
        """Free the cluster's memory. False when a step is held nowhere else: then the keepers stay."""
        on_disk = self.on_disk()
        if (on_disk[0] if on_disk is not None else -1) < self._commits.committed:
            log.error("step %d is not on disk; the keepers stay, and --resume on this cluster continues from them",
                      self._commits.committed)
            return False
        self.keepers.close()
        return True

    # -- parts ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _parameters(self) -> list[dict[str, Any]]:
        """Names and shapes of what is trained. Needs no worker and no memory."""
        return trained_parameters(self._model)

    def _meta(self, step: int) -> dict[str, Any]:
        """What a checkpoint says about itself."""
        return {
            "step": step,
            "parameters": self._parameters,
            "config": self._config.config_yaml,
            "seed": self._config.train.seed,
            "data_token": self._position_after(step),
        }

    def _position_after(self, step: int) -> Mapping[str, Any] | None:
        """The feeder's word, or without one the newest position that is known, from which the next feeder walks on."""
        try:
            return self._token(step + 1)
        except DataLost as error:
            log.info("step %d is written with an earlier position of the data: %s", step, error)
            return self.data_token()

    def _not_written(self, step: int, why: str) -> None:
        self._tell("checkpoint_failed", step=step, why=why)

    def _forecast(self, snapshots: Sequence[Snapshot]) -> None:
        """Say what snapshots take of the nodes' memory."""
        total, keepers = max((s.total for s in snapshots), default=0), len(self.keepers.find())
        if total and keepers:
            ema = self._config.train.optimizer.ema_decay > 0
            held = keeper.forecast_bytes(total, ema=ema, copies=self._config.snapshot.copies, num_keepers=keepers)
            self._tell("snapshots", keepers=keepers, mib_per_keeper=round(held / 2**20, 1))


def exports_of(world: Sequence[Seat], step: int) -> list[Snapshot]:
    """The state after `step` as these workers hold it between two steps; they leave their groups."""
    answers: list[Snapshot] = []
    asked = [(seat.name, seat.handle.hand_over.remote(step)) for seat in world]
    for name, reference in asked:
        try:
            answers.extend(ray.get(reference, timeout=_EXPORT_S).exports)
        except ray.exceptions.RayError as error:
            log.warning("%s did not hand over its state: %s", name, error)
    return answers
