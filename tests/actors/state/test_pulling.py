"""What is pulled from another node is waited for as long as the state may take, and no longer than its generation."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray

from actors.state.pulling import value
from ops.waiting import Cancelled, CancelToken, Patience, patient


def test_a_slow_part_is_waited_for_and_an_endless_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()

    def wait(references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        time.sleep(0.01)
        done = [r for r in references if time.monotonic() - began > r]
        return done, [r for r in references if r not in done]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda reference: f"shard {reference}")

    def fetched(at: Any, cancel: CancelToken, limit_s: float) -> Any:
        patience = Patience(limit_s=limit_s, why="workers.state_timeout_s")
        return value(at, patient(cancel, patience, "fetching the state"))

    assert [fetched(at, CancelToken(), 60.0) for at in (0.3, 0.1)] == ["shard 0.3", "shard 0.1"]
    with pytest.raises(TimeoutError, match=r"fetching the state took more than 0.05 s \(workers.state_timeout_s\)"):
        fetched(1e9, CancelToken(), 0.05)
    cancel = CancelToken()
    cancel.set("over")
    with pytest.raises(Cancelled):
        fetched(1e9, cancel, 60.0)
