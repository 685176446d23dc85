"""What the controller sees of workers that start."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import Mock

import pytest
import ray

from actors.config import WorkersConfig
from actors.lookout import Lookout
from actors.membership_types import Refused
from actors.messages import LOADING, Progress
from actors.monitor import Monitor
from actors.pool import PoolNews


@pytest.mark.parametrize(("activity", "age_s", "given_up"), [(LOADING, 700, True), (LOADING, 500, False),
                                                             ("", 700, False)])
def test_a_worker_that_hangs_while_it_loads_is_given_up_one_that_waits_for_room_is_not(
    monkeypatch: pytest.MonkeyPatch, activity: str, age_s: float, given_up: bool
) -> None:
    monitor = Monitor()
    if activity:
        since = time.time() - age_s
        monitor.beat(Progress(worker="w3", generation=-1, step=-1, activity=activity, phase="", since=since,
                              predicted_s=0.0, collectives=0, waiting_in=""))
    handle, pool, told = Mock(), Mock(pending=["w3"], names=["w3"]), Mock()
    pool.poll.return_value = PoolNews()
    handle.collect.remote.return_value = monitor.collect()
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr(ray, "available_resources", dict)
    events: list[Any] = Lookout(WorkersConfig(min=1, max=4, device="cpu"), pool, handle, told).look()
    assert (Refused(count=1) in events) == given_up
    assert pool.discard.called == handle.forget.remote.called == told.called == given_up


def test_a_spare_that_could_not_start_is_forgotten_when_workers_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, pool = Mock(), Mock(pending=[], names=[])
    pool.poll.return_value = PoolNews(lost=(("w5", "CUDA error: unknown"),))
    handle.collect.remote.return_value = Monitor().collect()
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr(ray, "available_resources", dict)
    lookout = Lookout(WorkersConfig(min=1, max=4, device="cpu"), pool, handle, Mock())
    for _ in range(3):
        lookout.look()
    assert "CUDA error" in lookout.hopeless
    lookout.try_again()
    assert not lookout.hopeless
    lookout.look()
    assert not lookout.hopeless, "three more, not one"
