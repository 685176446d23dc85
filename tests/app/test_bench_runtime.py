"""`heddle bench runtime`: a step whose cascades only wait ends like any other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from actors.plan.types import Item
from app.bench.runtime import TimedExecutor
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
