"""A host that is ahead of its device, by a watch whose device goes on only as a test says, or when it is waited for."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.messages import CascadeTask, StaleGeneration, SumStart
from actors.plan.types import Item
from actors.worker.executor import Executor
from actors.worker.handoff import Inputs, gather_inputs
from actors.worker.work_done import DeviceFailure
from actors.worker.worker import Worker
from tests.actors.exactness import Host, make_hosts, one_worker, run_step, train_config

ITEMS = [Item(id=f"s0.{n}", batch=1, frames=5, height=32, width=48, text_tokens=12) for n in range(2)]
APART_S = 10.0  # between two marks on the device


class LateDevice:
    """Has come to the marks below `reached`; at mark n at 1000 + 10 n seconds."""

    def __init__(self) -> None:
        self.made, self.reached, self.waits = 0, 0, 0
        self.fails_at: int | None = None

    def mark(self) -> int:
        self.made += 1
        return self.made - 1

    def has_come(self, mark: object) -> bool:
        self._check()
        return int(mark) < self.reached  # type: ignore[call-overload]

    def wait(self, mark: object) -> None:
        self._check()
        if not self.has_come(mark):
            self.waits, self.reached = self.waits + 1, int(mark) + 1  # type: ignore[call-overload]

    def settle(self) -> None:
        self._check()
        if self.reached < self.made:
            self.waits, self.reached = self.waits + 1, self.made

    def seconds(self, first: object, second: object) -> float:
        return self.unix(second) - self.unix(first)

    def unix(self, mark: object) -> float:
        assert isinstance(mark, int) and mark < self.reached, "the device has not come there"
        return 1000.0 + APART_S * mark

    def _check(self) -> None:
        if self.fails_at is not None and self.reached >= self.fails_at:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def behind(ahead_s: float = 1000.0) -> tuple[Host, LateDevice]:
    (host,) = make_hosts(1, torch.float32, train_config(), ahead_s=ahead_s)
    device = LateDevice()
    host.executor.watch = device
    return host, device


def test_no_cascade_waits_and_the_end_of_the_step_does_once() -> None:
    (usual,) = make_hosts(1, torch.float32, train_config())
    loss = run_step([usual], ITEMS, one_worker(ITEMS))
    host, device = behind()
    run_step([host], ITEMS, one_worker(ITEMS), finish=False)
    assert device.waits == 0 and len(host.executor.work.under_way) == 6
    running = host.executor.on_device()
    assert running is host.executor.work.under_way[0] and running.step == 0
    device.reached = device.made - 1
    last = host.executor.on_device()
    assert last is host.executor.work.under_way[-1], "what has ended meanwhile has not been read"
    host, device = behind()
    assert run_step([host], ITEMS, one_worker(ITEMS)) == loss
    assert host.done is not None and host.executor.on_device() is None and not host.executor.work.under_way
    assert device.waits == 6, "of six cascades, one after the other; on a device the first five end meanwhile"
    pairs = zip(usual.executor.modules.dit.parameters(), host.executor.modules.dit.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def queued_by(host: Host) -> threading.Thread:
    """A thread in which the host queues all cascades of a step, each of which takes a second by the plan."""

    def queue() -> None:
        with suppress(StaleGeneration):  # which the host has as its error, too
            run_step([host], ITEMS, one_worker(ITEMS), finish=False)

    thread = threading.Thread(target=queue, daemon=True)
    thread.start()
    return thread


def comes_to(count: int, host: Host) -> bool:
    until = time.monotonic() + 60
    while len(host.executor.work.under_way) < count and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.3)  # in which it would queue more
    return len(host.executor.work.under_way) == count


def test_a_host_queues_no_more_than_some_seconds() -> None:
    host, device = behind(ahead_s=1.5)
    queueing = queued_by(host)
    assert comes_to(3, host), "one that runs, and two of a second each"
    first, second, _ = host.executor.work.under_way
    while host.executor.on_device() is first:
        device.reached += 1
    assert comes_to(3, host) and host.executor.work.under_way[0] is second
    while queueing.is_alive():
        device.reached += 1
        time.sleep(0.01)
    assert host.error is None and device.waits == 0, "it has looked, and not held up the stream"


@pytest.mark.parametrize("ended", ["queueing", "between calls"])
def test_what_is_not_queued_when_a_generation_ends_is_not_run(ended: str) -> None:
    host, _ = behind(ahead_s=1.5)
    assert host.executor.groups is not None
    cancel = host.executor.groups._cancel
    if ended == "between calls":
        cancel.set("generation 2 has begun")
    queueing = queued_by(host)
    if ended == "queueing":
        assert comes_to(3, host)
        cancel.set("generation 2 has begun")
    queueing.join(60)
    assert not queueing.is_alive() and isinstance(host.error, StaleGeneration)
    assert "generation 2 has begun" in str(host.error)
    assert len(host.executor.work.under_way) == (3 if ended == "queueing" else 0)


def test_a_span_has_the_times_of_the_device() -> None:
    host, device = behind()
    run_step([host], ITEMS, one_worker(ITEMS), finish=False)
    spans = host.executor.work.spans
    assert [span.name.split()[0] for span in spans].count("dit") == 2 and device.reached == device.made
    for before, after in itertools.pairwise(spans):
        assert before.end < after.start
    for span in spans:
        assert span.work_s is not None and 0 < span.work_s < span.end - span.start
        assert 0 < sum(span.phases.values()) < span.end - span.start
        assert all(seconds > 0 and seconds % APART_S == 0 for seconds in span.phases.values())
    (dit, *_) = [span for span in spans if span.module == "dit"]
    assert set(dit.phases) == {"handoff", "forward", "backward"}


def test_a_cascade_that_the_device_still_runs_holds_no_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take room that the next one was planned with: the allocator gives memory out again in the stream's
    order, and need not wait for the device."""
    gathered: list[weakref.ref[torch.Tensor]] = []

    def gather(*arguments: Any, **settings: Any) -> Inputs:
        found = gather_inputs(*arguments, **settings)
        gathered.extend(weakref.ref(one) for one in (*found.rows, *found.text))
        return found

    monkeypatch.setattr("actors.worker.executor.gather_inputs", gather)
    host, _ = behind()
    run_step([host], ITEMS, one_worker(ITEMS), finish=False)
    gc.collect()
    assert len(host.executor.work.under_way) == 6 and gathered and not any(one() is not None for one in gathered)


def test_spans_are_read_as_their_cascades_end() -> None:
    host, device = behind()
    run_step([host], ITEMS[:1], one_worker(ITEMS[:1]), finish=False)
    work = host.executor.work
    assert len(work.under_way) == 3 and work.ended_at is None
    device.reached = device.made
    assert work.ended_at == 1000.0 + APART_S * (device.made - 1) and not work.under_way
    assert device.waits == 0


@pytest.mark.parametrize("moment", ["next cascade", "finish", "fetching"])
def test_a_failure_of_the_device_names_the_cascade_that_had_not_ended(moment: str) -> None:
    host, device = behind()
    executor: Executor = host.executor
    run_step([host], ITEMS[:1], one_worker(ITEMS[:1]), finish=False)
    first = executor.work.under_way[0].name
    device.fails_at = device.reached
    with pytest.raises(DeviceFailure, match=f"{first} failed on the device: CUDA error"):
        if moment == "next cascade":
            run_step([host], ITEMS[1:], one_worker(ITEMS[1:]), finish=False)
        elif moment == "finish":
            executor.settle()
        else:
            executor.ended_at()
    assert executor.broken is not None and first in executor.broken
    with pytest.raises(StaleGeneration, match="failed on the device"):
        executor.admit(executor.generation)
    assert executor.on_device() is None, "the heartbeat's thread lives"


@pytest.mark.parametrize("failed", [False, True])
def test_a_worker_whose_device_has_failed_survives_no_generation(failed: bool) -> None:
    """It is lost then like one that has died; each generation with it would break."""
    host, device = behind()
    run_step([host], ITEMS[:1], one_worker(ITEMS[:1]), finish=False)
    heartbeat = SimpleNamespace(groups=host.executor.groups, idle=lambda: None)
    home = SimpleNamespace(leave=lambda: None)
    worker: Any = SimpleNamespace(name="w0", executor=host.executor, heartbeat=heartbeat, _home=home)
    if failed:
        device.fails_at = device.reached
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            Worker.hand_over(worker, None)
    else:
        assert Worker.hand_over(worker, None).snapshot is None and device.reached == device.made
    assert host.executor.groups is None and heartbeat.groups is None


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`"),
    ],
    ids=["torch", "triton", "cublas"],
)
def test_an_error_of_the_device_in_a_later_launch_names_those_before(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    host, _ = behind()
    run_step([host], ITEMS[:1], one_worker(ITEMS[:1]), finish=False)
    earlier = [one.name for one in host.executor.work.under_way]

    def failing(*arguments: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr("actors.worker.executor.train_pass", failing)
    with pytest.raises(RuntimeError, match="CUDA") as caught:
        run_step([host], ITEMS[1:], one_worker(ITEMS[1:]), finish=False)
    (note,) = caught.value.__notes__
    assert all(name in note for name in earlier) and host.executor.broken is not None
    assert earlier[-1] in host.executor.broken


def test_a_bag_is_left_when_the_device_has_ended_its_collectives() -> None:
    host, device = behind()
    run_step([host], ITEMS[:1], one_worker(ITEMS[:1]), finish=False)
    with pytest.raises(ValueError, match="not connected"):
        host.executor.leave_bag((0, 1))
    assert device.waits == 1 and device.reached == device.made


@pytest.mark.parametrize("leave", [True, False])
def test_a_bag_is_left_before_the_gradient_sum_begins(leave: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NCCL leaving it waits for all that the device has to do, and a sum ends when the slowest worker has come."""
    host, _ = behind()
    done: list[str] = []
    monkeypatch.setattr(host.executor, "leave_bag", lambda bag: done.append("left"))
    monkeypatch.setattr(host.executor.sync, "start_sum", lambda: done.append("sum"))
    task = CascadeTask(
        generation=1,
        step=0,
        cascade="0/dit/0",
        name="dit",
        module="dit",
        bag=(0,),
        samples=(),
        pieces=(),
        planned_start_s=0.0,
        planned_end_s=1.0,
        start_sum=SumStart.AFTER,
        leave=leave,
    )
    with host.executor.cascade(task):
        pass
    assert done == (["left", "sum"] if leave else ["sum"])
