"""A range of a version of the state, from a keeper of another node into memory of this one.

It goes through the object store in pieces, a few at a time: however large the state is, it takes less of the store than
a batch of clips.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from actors.held_state import READS, NodeKeeper
from actors.ray_calls import get, wait
from actors.refs import Ref
from ops.shards import Distance, ShardState, missing

PIECE = 1 << 22  # elements: 64 MiB of a state with an EMA
AHEAD = 3  # pieces that are on their way at a time
_LOOK_S = 0.25

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What a version says of itself beside its values."""

    names: tuple[str, ...]  # of its arrays
    updates: int
    part_updates: tuple[int, ...] = ()
    distances: tuple[Distance, ...] = ()

    @classmethod
    def of(cls, shard: ShardState) -> Counts:
        return cls(
            names=tuple(shard.arrays),
            updates=shard.updates,
            part_updates=shard.part_updates,
            distances=shard.distances,
        )


def pull(
    source: NodeKeeper,
    version: tuple[int, int],
    lo: int,
    hi: int,
    into: Mapping[str, np.ndarray],
    go_on: Callable[[], None],
    lock: AbstractContextManager[object] | None = None,
    *,
    piece_elements: int,
) -> Counts | None:
    """Copy [lo, hi) of a `version` (step, generation) into arrays [hi - lo], and return its counts. None: the keeper
    does not hold it, or has let it go meanwhile. `go_on` is called now and then, and may raise; with a `lock` also
    right before each piece is put in place, while that is held: nothing is written after `go_on` would have raised.
    `piece_elements` come at a time. Raises Ray's error where the keeper is gone."""
    read = source.read.options(concurrency_group=READS)
    coming: deque[tuple[int, Ref[ShardState | None]]] = deque()
    counts: Counts | None = None
    for at in [*range(lo, hi, piece_elements), None]:
        if at is not None:
            coming.append((at, read.remote(*version, at, min(hi, at + piece_elements))))
        while coming and (at is None or len(coming) == AHEAD):
            first, reference = coming.popleft()
            piece = value(reference, go_on)
            if piece is None:
                return None
            counts = Counts.of(piece)
            with lock or nullcontext():
                go_on()
                for name, array in piece.arrays.items():
                    into[name][first - lo : first - lo + len(array)] = array
    # A bank is written over only after its version was dropped: what is held now was so while it was read.
    held = value(source.held.remote(*version), go_on)
    return counts if not missing([(one.lo, one.hi) for one in held], lo, hi) else None


def value(reference: Ref[T], go_on: Callable[[], None]) -> T:
    """What a call gives; `go_on` is called while it is awaited."""
    while not wait([reference], timeout=_LOOK_S)[0]:
        go_on()
    go_on()
    return get(reference)
