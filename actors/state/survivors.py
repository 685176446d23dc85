"""What is asked of the workers of an ended generation: to leave their groups, and to hand over their state."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray

from actors.held_state import Snapshot
from actors.messages import Handover, WorkerHandle
from actors.ray_calls import get, wait
from actors.refs import Ref
from actors.step import Seat

log = logging.getLogger(__name__)

_ANSWER_S = 120.0  # a small message, also on a busy cluster
_EXPORT_S = 600.0  # a GPU between two steps copies its shard; only a lost worker hands over nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """A worker has left its broken groups, or died instead."""

    worker: int
    died: str = ""  # of what


class Survivors:
    """Workers that leave the groups of an ended generation.

    survivors.part(7, handle)           # its generation broke, worker 7 lives
    for parted in survivors.poll(): ... # it has left its groups
    """

    def __init__(self) -> None:
        self._parting: dict[Ref[Handover], int] = {}

    def part(self, worker: int, handle: WorkerHandle) -> None:
        """Have a worker of a broken generation leave its groups; its answer comes with `poll`."""
        self._parting[handle.hand_over.remote(None)] = worker

    def poll(self) -> list[Parting]:
        """Survivors that have answered since the last call. Never waits."""
        if not self._parting:
            return []
        done, _ = wait(list(self._parting), num_returns=len(self._parting), timeout=0)
        return [_parted(self._parting.pop(reference), reference) for reference in done]


def _parted(worker: int, reference: Ref[Handover]) -> Parting:
    try:
        get(reference, timeout=_ANSWER_S)
    except ray.exceptions.RayError as error:
        return Parting(worker=worker, died=type(error).__name__)
    return Parting(worker=worker)


def handed_over(world: Sequence[Seat], step: int) -> list[Snapshot]:
    """The state after `step` as these workers have it between two steps, in memory of their nodes; they leave their
    groups."""
    found: list[Snapshot] = []
    asked = [(seat.name, seat.handle.hand_over.remote(step)) for seat in world]
    until = time.monotonic() + _EXPORT_S  # for all of them together
    for name, reference in asked:
        try:
            answer = get(reference, timeout=max(0.0, until - time.monotonic()))
        except ray.exceptions.RayError as error:
            log.warning("%s did not hand over its state: %s", name, error)
            continue
        found += [answer.snapshot] if answer.snapshot is not None else []
    return found
