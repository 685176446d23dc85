"""A generation's first collective waits for the slowest to hold its state, however short collectives may wait."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from ops.groups import Groups
from ops.waiting import Cancelled, CancelToken, GroupError, Patience

DOING = "waiting until all hold the state"
LONG = Patience(limit_s=600.0)


def groups_of(
    store: dist.Store, rank: int, size: int, cancel: CancelToken | None = None, generation: int = 4
) -> Groups:
    """With little patience for collectives."""
    return Groups(store, rank, tuple(range(size)), "gloo", generation, 0.05, cancel or CancelToken(), "127.0.0.1")


def test_nobody_goes_on_before_the_last_one_holds_its_part() -> None:
    store, gone_on = dist.HashStore(), []

    def worker(rank: int) -> None:
        groups_of(store, rank, 3).meet(DOING, LONG)
        gone_on.append(rank)

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    assert gone_on == []
    worker(1)
    for thread in threads:
        thread.join(60)
    assert sorted(gone_on) == [0, 1, 2]


def test_an_older_generation_does_not_count() -> None:
    store = dist.HashStore()
    both = [threading.Thread(target=groups_of(store, r, 2, generation=3).meet, args=(DOING, LONG)) for r in (0, 1)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    short = Patience(limit_s=0.05, why="workers.state_timeout_s")
    with pytest.raises(TimeoutError, match=r"not all workers of generation 4 came within 0.05 s \(workers.state_timeo"):
        groups_of(store, 0, 2).meet(DOING, short)


def test_waiting_ends_with_the_generation() -> None:
    cancel = CancelToken()
    threading.Timer(0.2, cancel.set, ("generation 5 has begun",)).start()
    with pytest.raises(Cancelled, match="generation 5"):
        groups_of(dist.HashStore(), 0, 2, cancel).meet(DOING, LONG)


def test_waiting_ends_when_the_groups_are_closed() -> None:
    groups = groups_of(dist.HashStore(), 0, 2)
    threading.Timer(0.2, groups.close).start()
    with pytest.raises(GroupError, match="closed"):
        groups.meet(DOING, LONG)
