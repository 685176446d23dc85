"""What the workers of an ended generation still hold of the run's state: asked for and kept here alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray

from actors.messages import Handover, Snapshot, WorkerHandle
from actors.ray_calls import get, wait
from actors.refs import Ref
from actors.step import Seat

log = logging.getLogger(__name__)

_ANSWER_S = 120.0  # a small message, also on a busy cluster
_EXPORT_S = 600.0  # a worker between two steps copies its shard; only a lost worker hands over nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Parted:
    """A worker has left its broken groups, or died instead."""

    worker: int
    died: str = ""  # of what


class Survivors:
    """Workers that leave the groups of an ended generation, and the shards they hand over.

    survivors.ended(3); survivors.part(7, handle)     # generation 3 broke, worker 7 lives
    for parted in survivors.poll(): ...               # it has left its groups, and its shards are in `exports`
    survivors.outlived(4)                             # a step of generation 4 is committed: they are not needed
    """

    def __init__(self) -> None:
        self.exports: tuple[Snapshot, ...] = ()
        self._generation = -1  # the last that ended
        self._parting: dict[Ref[Handover], int] = {}

    def ended(self, generation: int) -> None:
        """The generation is over. What earlier survivors held is held by its workers, or by keepers."""
        self._generation, self.exports = generation, ()

    def part(self, worker: int, handle: WorkerHandle) -> None:
        """Have a worker of a broken generation leave its groups; its answer comes with `poll`."""
        self._parting[handle.hand_over.remote(None)] = worker

    def poll(self) -> list[Parted]:
        """Who has answered since the last call. Never waits."""
        if not self._parting:
            return []
        done, _ = wait(list(self._parting), num_returns=len(self._parting), timeout=0)
        return [self._parted(self._parting.pop(reference), reference) for reference in done]

    def take(self, world: Sequence[Seat], step: int) -> None:
        """Workers of a cleanly ended generation hand over the state after `step`, held besides the keepers."""
        self.exports += tuple(exports_of(world, step))

    def outlived(self, generation: int) -> None:
        """A step of this generation is committed: a newer state is held, theirs may leave the memory."""
        if generation > self._generation:
            self.exports = ()

    def _parted(self, worker: int, reference: Ref[Handover]) -> Parted:
        try:
            self.exports += get(reference, timeout=_ANSWER_S).exports
        except ray.exceptions.RayError as error:
            return Parted(worker=worker, died=type(error).__name__)
        return Parted(worker=worker)


def exports_of(world: Sequence[Seat], step: int) -> list[Snapshot]:
    """The state after `step` as these workers hold it between two steps; they leave their groups."""
    answers: list[Snapshot] = []
    asked = [(seat.name, seat.handle.hand_over.remote(step)) for seat in world]
    until = time.monotonic() + _EXPORT_S  # for all of them together
    for name, reference in asked:
        try:
            answers.extend(get(reference, timeout=max(0.0, until - time.monotonic())).exports)
        except ray.exceptions.RayError as error:
            log.warning("%s did not hand over its state: %s", name, error)
    return answers
