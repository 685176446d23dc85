"""A generation's first collective waits for the slowest to hold its state, however short collectives may wait."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import ray

from actors.state.pulling import value
from actors.worker.meeting import meet, patient
from ops.waiting import Cancelled, CancelToken, GroupError


class Store:
    """Keys of all workers of a generation."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def set(self, key: str, value: str) -> None:
        self.keys.add(key)

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= self.keys


def test_nobody_goes_on_before_the_last_one_holds_its_part() -> None:
    store, cancel, gone_on = Store(), CancelToken(), []

    def worker(rank: int) -> None:
        meet(store, 4, rank, 3, cancel, 60.0)
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
    store = Store()
    for rank in range(2):
        store.set(f"g3/holds/{rank}", "1")
    with pytest.raises(GroupError, match="state_timeout_s"):
        meet(store, 4, 0, 2, CancelToken(), 0.05)


def test_waiting_ends_with_the_generation() -> None:
    cancel = CancelToken()
    threading.Timer(0.2, cancel.set, ("generation 5 has begun",)).start()
    with pytest.raises(Cancelled, match="generation 5"):
        meet(Store(), 4, 0, 2, cancel, 600.0)


def test_a_slow_part_is_waited_for_and_an_endless_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()

    def wait(references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        time.sleep(0.01)
        done = [r for r in references if time.monotonic() - began > r]
        return done, [r for r in references if r not in done]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda reference: f"shard {reference}")

    def fetched(at: Any, cancel: CancelToken, patience_s: float) -> Any:
        return value(at, patient(cancel, patience_s, "fetching the state"))

    assert [fetched(at, CancelToken(), 60.0) for at in (0.3, 0.1)] == ["shard 0.3", "shard 0.1"]
    with pytest.raises(GroupError, match="fetching the state took more than"):
        fetched(1e9, CancelToken(), 0.05)
    cancel = CancelToken()
    cancel.set("over")
    with pytest.raises(Cancelled):
        fetched(1e9, cancel, 60.0)
