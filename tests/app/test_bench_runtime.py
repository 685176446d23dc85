"""`heddle bench runtime`: a step whose cascades only wait ends like any other."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from actors.config import TrainConfig
from actors.feed.feeder import Feeder
from actors.plan.types import Item
from app.bench.runtime import TimedExecutor, TimedWorker, WorkloadFeeder
from ops.models.config import ModelConfig
from ops.models.folders import resolve
from ops.models.load import num_trained
from tests.actors.exactness import Host, close_hosts, make_hosts, one_worker, run_step, train_config

ITEMS = [Item(id=f"s0.{i}", batch=2, frames=5, height=32, width=32, text_tokens=12) for i in range(2)]
WAIT_S = 0.05


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    yield make_hosts(2, torch.float32, train_config(), executor=TimedExecutor)
    close_hosts()


def test_a_step_of_waits_is_whole_and_lasts_at_least_as_planned(hosts: list[Host]) -> None:
    alone = [replace(c, start_s=c.start_s * WAIT_S, end_s=c.end_s * WAIT_S) for c in one_worker(ITEMS)]
    plan = [replace(c, workers=(0, 1), degree=2) if c.module == "dit" else c for c in alone]
    run_step(hosts, ITEMS, plan)  # asserts that weights of all workers add up to one
    for host in hosts:
        assert host.done is not None and host.done.result.applied
        waits = [span for span in host.done.spans if span.module == "dit"]
        assert len(waits) == len(ITEMS) and all(span.end - span.start >= 0.9 * WAIT_S for span in waits)


def test_workers_that_wait_have_as_many_weights_as_the_run_and_their_feeder_is_started_as_others_are() -> None:
    settings = SimpleNamespace(model=ModelConfig(), train=TrainConfig(steps=1))
    worker = SimpleNamespace(settings=settings, device=torch.device("cpu"), _phase=lambda name: None)
    executor = TimedWorker._load(worker)  # type: ignore[arg-type]  # all that it asks of itself
    assert executor.sync.total == num_trained(resolve(ModelConfig())[0].dit)
    given, wanted = (list(inspect.signature(one.start).parameters) for one in (WorkloadFeeder, Feeder))
    assert given == wanted
