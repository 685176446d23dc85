"""Numbers from the host of each member of a group to all others, through the store in which they meet.

    exchange = HostExchange(store, rank, size)
    exchange.give([12, 1, 1])
    while not exchange.have_come():
        ...                              # whoever waits looks at its limit, and names `missing()`
    rows = exchange.take()               # in rank order

A collective would carry them, too. But on CUDA its result is there when the device has ended all that was queued
before, and a host that reads it stands still until then, when it could queue the next cascade.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch.distributed as dist


class HostExchange:
    """The exchanges of one member, one after the other. All members do the same number of them in the same order."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        """`store` is that of the members alone."""
        self._store, self._rank, self._size, self._turn = store, rank, size, 0

    def give(self, numbers: Sequence[int]) -> None:
        """Begin the next one, with this member's numbers, of which each member may have as many as it likes."""
        self._turn += 1
        self._store.set(self._key(self._rank), json.dumps(list(numbers)))

    def have_come(self) -> bool:
        """Whether all members have given theirs."""
        return bool(self._store.check([self._key(rank) for rank in range(self._size)]))

    def missing(self) -> list[int]:
        """Ranks that have not."""
        return [rank for rank in range(self._size) if not self._store.check([self._key(rank)])]

    def take(self) -> list[list[int]]:
        """Those of all members, in rank order, when all have come."""
        rows = [json.loads(row) for row in self._store.multi_get([self._key(rank) for rank in range(self._size)])]
        if self._turn > 1:  # who has come to this one has taken those of the one before
            self._store.delete_key(self._key(self._rank, self._turn - 1))
        return rows

    def forget(self) -> None:
        """When all members have taken the last one: nothing of this member stays in the store."""
        if self._turn:
            self._store.delete_key(self._key(self._rank))

    def _key(self, rank: int, turn: int = 0) -> str:
        return f"numbers/{turn or self._turn}/{rank}"
