"""Before a generation's first collective: each worker fetches its part of the state, then they wait for each other.

A large state comes slowly over a slow network, and not equally slowly everywhere. Collectives have little patience,
which is right for steps; so none begins before everybody holds its part. Both waits end at once with the generation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, TypeVar

from actors.ray_calls import get, wait
from actors.refs import Ref
from ops.waiting import CancelToken, GroupError

T = TypeVar("T")

_LOOK_S = 0.25
_PAUSES_S = (0.02, 0.5)  # between two looks at the store: the first and the longest


class Store(Protocol):
    """torch.distributed's."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...


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
