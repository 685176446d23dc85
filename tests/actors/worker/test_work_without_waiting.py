"""A cascade's work is apart from what its worker waits for the others of its bag."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.messages import FinishTask, Span
from actors.plan.types import Item
from actors.worker.executor import Executor
from ops.comm.groups import Groups
from ops.update.shard_export import CopyAtOnce, CopyWait
from tests.actors.exactness import Host, make_hosts, on_all, one_worker, run_step, train_config

ITEM = Item(id="s0.0", batch=2, frames=5, height=32, width=32, text_tokens=12)
LATE_S = 0.6


@pytest.fixture
def hosts() -> list[Host]:
    return make_hosts(2, torch.float32, train_config())


def spans_after(hosts: list[Host], monkeypatch: pytest.MonkeyPatch, late: Host | None) -> list[Span]:
    """The DiT's span on each worker, of one cascade of both; the `late` one comes LATE_S after the other."""
    get, waits = Groups.get, threading.Event()

    def bag(self: Groups, members: tuple[int, ...]) -> object:
        if late is not None and members == (0, 1):
            if self is late.executor.groups:
                assert waits.wait(120), "the other worker never came to the cascade"
                time.sleep(LATE_S)
            else:
                waits.set()
        return get(self, members)

    monkeypatch.setattr(Groups, "get", bag)
    plan = [replace(c, workers=(0, 1), degree=2) if c.module == "dit" else c for c in one_worker([ITEM])]
    run_step(hosts, [ITEM], plan)
    return [next(s for s in host.done.spans if s.module == "dit") for host in hosts]


def test_who_comes_early_waits_and_that_is_not_work(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    early, late = spans_after(hosts, monkeypatch, late=hosts[1])
    assert early.wait_s >= 0.9 * LATE_S and early.phases["wait"] >= 0.9 * LATE_S
    assert early.work_s is not None and late.work_s is not None
    assert early.work_s <= early.end - early.start - 0.9 * LATE_S
    assert early.bag == late.bag == (0, 1)


def test_only_the_first_run_of_a_shape_is_marked(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [s.first_here for s in spans_after(hosts, monkeypatch, None)] == [True, True]
    assert [s.first_here for s in spans_after(hosts, monkeypatch, None)] == [False, False]


def test_what_a_generation_waits_for_while_it_forms_is_of_no_cascade(monkeypatch: pytest.MonkeyPatch) -> None:
    formed, left = Executor.form, []

    def form(self: Executor, generation: int, groups: Groups, *rest: Any) -> None:
        groups.clock.waited(lambda: time.sleep(0.05), on_stream=False)
        formed(self, generation, groups, *rest)
        left.append(groups.clock.take().seconds)  # of this thread

    monkeypatch.setattr(Executor, "form", form)
    make_hosts(2, torch.float32, train_config())
    assert left == [0.0, 0.0]


def test_the_gradient_sum_is_not_work_of_the_cascade_that_starts_it(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    for host in hosts:
        monkeypatch.setattr(host.executor.sync, "start_sum", lambda: time.sleep(LATE_S))
    for span in spans_after(hosts, monkeypatch, None):
        assert span.work_s is not None and span.work_s <= span.end - span.start - 0.9 * LATE_S


class Late(CopyAtOnce):
    """A device whose state takes time to copy."""

    def __call__(self, arrays: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> CopyWait:
        time.sleep(LATE_S)
        return super().__call__(arrays, into)


def test_the_copy_of_the_state_is_no_part_of_the_end_of_a_step_which_plans_learn() -> None:
    (host,) = make_hosts(1, torch.float32, train_config())
    host.executor.sync.state.copy_arrays = Late()  # type: ignore[attr-defined]
    run_step([host], [ITEM], one_worker([ITEM]), finish=False)
    began = time.time()
    done = host.executor.finish(FinishTask(generation=1, step=0, export=True, cascades=(), weight=1.0))
    took_s = time.time() - began
    (end,) = [span for span in done.spans if span.module == "finish"]
    assert done.copy_s >= 0.9 * LATE_S and end.end - end.start <= took_s - 0.9 * LATE_S
    assert list(end.phases) == ["reduce", "update", "gather"]
    assert done.result.export is not None and done.result.export.shard.updates == 1


def test_a_worker_alone_waits_for_nobody(hosts: list[Host]) -> None:
    on_all(hosts, lambda rank: None)
    run_step(hosts, [ITEM], one_worker([ITEM]))
    for span in hosts[0].done.spans:
        if span.module != "finish":
            assert span.wait_s == 0 and "wait" not in span.phases
