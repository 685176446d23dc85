"""Before a generation's first collective: each worker brings its part of the state, then they wait for each other.

A large state comes slowly over a slow network, and not equally slowly everywhere. Collectives have little patience,
which is right for steps; so none begins before every worker holds its part. Both waits end at once with the generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ops.waiting import CancelToken, GroupError

_PAUSES_S = (0.02, 0.5)  # between two looks at the store: the first and the longest


class Store(Protocol):
    """torch.distributed's."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...


def meet(store: Store, generation: int, rank: int, world: int, cancel: CancelToken, patience_s: float) -> None:
    """Say that this worker holds its part; returns when all have said so."""
    keys = [f"g{generation}/holds/{other}" for other in range(world)]
    go_on, pause = patient(cancel, patience_s, "waiting until all hold the state"), _PAUSES_S[0]
    store.set(keys[rank], "1")
    while not store.check(keys):
        go_on()
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES_S[1])


def patient(cancel: CancelToken, patience_s: float, doing: str) -> Callable[[], None]:
    """What one calls while one waits: it raises Cancelled when the generation ends, GroupError after `patience_s`."""
    until = time.monotonic() + patience_s

    def go_on() -> None:
        cancel.check(doing)
        if time.monotonic() > until:
            raise GroupError(f"{doing} took more than {patience_s:g} s (workers.state_timeout_s)")

    return go_on
