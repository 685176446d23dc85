"""Before a generation's first collective: each worker fetches its part of the state, then they wait for each other.

A large state comes slowly over a slow network, and not equally slowly everywhere. Collectives have little patience,
which is right for steps; so none begins before everybody holds its part. Both waits end at once with the generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from actors.messages import FormTask
from actors.ray_calls import get, wait
from actors.refs import Ref
from actors.state.checkpoint_files import load
from ops.shards import ShardState, cut, shard_bounds
from ops.waiting import CancelToken, GroupError

T = TypeVar("T")

_LOOK_S = 0.25
_PAUSES_S = (0.02, 0.5)  # between two looks at the store: the first and the longest


class Store(Protocol):
    """torch.distributed's."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...


def own_shards(
    task: FormTask, total: int, first: Callable[[int, int], ShardState], cancel: CancelToken, patience_s: float
) -> list[ShardState]:
    """Parts of the state that cover this worker's range of the flat vector of `total` elements.

    Without an origin it is the `first` state of that range, also when everything was lost: the weights in a worker may
    have been trained. Raises GroupError after `patience_s`, or when the generation ends.
    """
    origin = task.origin
    lo, hi = shard_bounds(total, task.world)[task.rank]
    if origin is None:
        return [first(lo, hi)]
    if origin.checkpoint is not None:
        return [cut(load(Path(origin.checkpoint))[1], lo, hi)]
    parts = fetch(list(origin.exports), cancel, patience_s)
    for held in fetch([k.get.remote(origin.step, lo, hi) for k in origin.keepers], cancel, patience_s):
        parts.extend(held)
    return parts


def fetch(references: Sequence[Ref[T]], cancel: CancelToken, patience_s: float) -> list[T]:
    """The values, in order. Raises Ray's error where the process that held one is gone."""
    until, waiting = time.monotonic() + patience_s, list(references)
    while waiting:
        _, waiting = wait(waiting, num_returns=len(waiting), timeout=_LOOK_S)
        _go_on(cancel, until, waiting, patience_s, "fetching the state")
    return [get(reference) for reference in references]


def meet(store: Store, generation: int, rank: int, world: int, cancel: CancelToken, patience_s: float) -> None:
    """Say that this worker holds its part; returns when all have said so."""
    keys = [f"g{generation}/holds/{other}" for other in range(world)]
    until, pause = time.monotonic() + patience_s, _PAUSES_S[0]
    store.set(keys[rank], "1")
    while not store.check(keys):
        _go_on(cancel, until, keys, patience_s, "waiting until all hold the state")
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES_S[1])


def _go_on(cancel: CancelToken, until: float, waiting: Sequence[object], patience_s: float, doing: str) -> None:
    cancel.check(doing)
    if waiting and time.monotonic() > until:
        raise GroupError(f"{doing} took more than {patience_s:g} s (workers.state_timeout_s)")
