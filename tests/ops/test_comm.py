"""Bags and collectives: equal to plain references, any creation order, cancel, death, frozen peers, no leaks.

Ranks are threads that share a store; only death and freezing need processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ops.comm.collectives import Group, _bury, _QueuedWait, _Remains, free_ended
from ops.comm.groups import Groups
from ops.waiting import Cancelled, CancelToken, GroupError, Patience, PendingCollective, WaitClock, has_passed

torch.set_num_threads(1)
REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 120.0  # of a wait for others that come: nothing takes as long, also on a machine with other work
ABORTS = "abort of a generation"  # the thread
SOON_S = 60.0  # at once, on such a machine: long before the limit of a rank that waits on


def run_ranks(
    size: int,
    work: Callable[[int, Groups], Any],
    *,
    generation: int = 0,
    timeout_s: float = LIMIT_S,
    grace_s: float = 5.0,
    store: Any = None,
) -> list[Any]:
    """`work(rank, groups)` on threads; their results, or the first error."""
    store, token = store or dist.HashStore(), CancelToken()
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        world = tuple(range(size))
        groups = Groups(store, rank, world, "gloo", generation, timeout_s, token, "127.0.0.1", grace_s=grace_s)
        try:
            results[rank] = work(rank, groups)
        except BaseException as error:
            errors.append(error)
            token.set(f"rank {rank}: {error}")
        finally:
            groups.close()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not hung, f"ranks {hung} do not end; errors so far: {errors}"
    if errors:
        raise errors[0]
    return results


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_to_all_moves_uneven_rows_of_any_type(dtype: torch.dtype) -> None:
    size = 3
    splits = [[1, 0, 4], [2, 3, 0], [0, 0, 5]]  # splits[a][b]: rows from a to b
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randint(0, 2, (sum(row), 2, 3), generator=generator).to(dtype) for row in splits]
    pieces = [list(torch.split(tensor, row)) for tensor, row in zip(inputs, splits)]

    def work(rank: int, groups: Groups) -> torch.Tensor:
        output_splits = [splits[source][rank] for source in range(size)]
        output = torch.empty(sum(output_splits), 2, 3, dtype=dtype)
        groups.world_group().all_to_all(output, inputs[rank], output_splits, splits[rank])
        return output

    for rank, output in enumerate(run_ranks(size, work)):
        assert torch.equal(output, torch.cat([pieces[source][rank] for source in range(size)]))


def test_all_to_all_accepts_strided_tensors() -> None:
    def work(rank: int, groups: Groups) -> torch.Tensor:
        whole = torch.zeros(4, 6)
        source = torch.arange(12.0).view(3, 4).t() + 100 * rank
        groups.world_group().all_to_all(whole[:, :3], source, [2, 2], [2, 2])
        return whole

    first, second = run_ranks(2, work)
    expected = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(first[:, :3], torch.cat([expected[:2], expected[:2] + 100]))
    assert torch.equal(second[:, :3], torch.cat([expected[2:], expected[2:] + 100]))
    assert not first[:, 3:].any()


def test_reductions_and_broadcast_match_plain_arithmetic() -> None:
    values = torch.randn(4, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def work(rank: int, groups: Groups) -> dict[str, torch.Tensor]:
        group = groups.world_group()
        total, largest, sent = values[rank].clone(), values[rank].clone(), values[rank].clone()
        group.all_reduce(total)
        group.all_reduce(largest, op="max")
        group.broadcast(sent, source_rank=2)
        group.barrier()
        return {"total": total, "largest": largest, "sent": sent}

    for found in run_ranks(4, work):
        torch.testing.assert_close(found["total"], values.sum(0), rtol=1e-14, atol=0)
        assert torch.equal(found["largest"], values.amax(0))
        assert torch.equal(found["sent"], values[2])


@pytest.mark.parametrize(
    "bounds", [[(0, 7), (7, 7), (7, 20)], [(0, 0), (0, 20), (20, 20)], [(0, 6), (6, 12), (12, 20)]]
)
def test_reduce_scatter_and_all_gather_of_unpadded_ranges(bounds: list[tuple[int, int]]) -> None:
    values = torch.randn(3, 20, generator=torch.Generator().manual_seed(2))

    def work(rank: int, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        flat, (lo, hi) = values[rank].clone(), bounds[rank]
        for pending in groups.world_group().reduce_scatter_ranges_async(flat, bounds):
            pending.wait()
        own = flat[lo:hi].clone()
        groups.world_group().all_gather_ranges(flat, bounds)
        return own, flat

    expected = (values[0] + values[1]) + values[2]
    for (lo, hi), (own, flat) in zip(bounds, run_ranks(3, work)):
        assert torch.equal(own, expected[lo:hi])
        assert torch.equal(flat, expected)


def test_a_sum_may_begin_long_before_the_last_member_joins_it() -> None:
    """Longer than the backend's own time-out; only a rank that waits has a limit."""
    bounds = [(0, 5), (5, 5)]  # all of it belongs to rank 0

    def work(rank: int, groups: Groups) -> list[float]:
        flat, group = torch.full((5,), float(rank + 1)), groups.world_group()
        groups.allow(Patience(limit_s=LIMIT_S))
        if rank == 1:
            time.sleep(4.0)
        pending = group.reduce_scatter_ranges_async(flat, bounds)
        if rank == 0:
            time.sleep(4.0)
        for one in pending:
            one.wait()
        return flat.tolist()

    assert run_ranks(2, work, timeout_s=3.0, grace_s=0.0)[0] == [3.0] * 5


def test_solo_group_is_local() -> None:
    group, output = Group.solo(), torch.zeros(3)
    group.all_to_all(output, torch.arange(3.0), [3], [3])
    group.all_reduce(output)
    group.broadcast(output, 0)
    group.barrier()
    assert group.size == 1 and output.tolist() == [0, 1, 2]


def test_wrong_splits_are_refused_before_they_reach_gloo() -> None:
    with pytest.raises(ValueError, match=r"input splits \[1, 1\] must be 2 numbers .* 3 rows"):
        run_ranks(2, lambda _, g: g.world_group().all_to_all(torch.empty(2), torch.empty(3), [1, 1], [1, 1]))


def test_strangers_and_twins_are_refused() -> None:
    groups = Groups(dist.HashStore(), 0, (0, 1), "gloo", 0, 1.0, CancelToken(), "127.0.0.1")
    for members in ((0, 5), (0, 0), (1,)):
        with pytest.raises(ValueError, match="bag"):
            groups.get(members)


def test_overlapping_bags_prepared_in_any_order_by_any_member() -> None:
    bags = [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2, 3), (3, 1, 0), (0, 1, 2, 3), (2,)]

    def work(rank: int, groups: Groups) -> dict[tuple[int, ...], float]:
        mine = random.Random(rank).sample(bags, len(bags))
        groups.prepare(mine)
        for members in mine:  # connected in another order on every rank
            if rank in members:
                groups.get(members)
        sums = {}
        for members in bags:
            if rank in members:
                group, value = groups.get(members), torch.tensor([10.0**rank])
                assert group is groups.get(members) and group.members[group.rank] == rank
                group.all_reduce(value)
                sums[members] = value.item()
        return sums

    for sums in run_ranks(4, work):
        assert sums == {members: sum(10.0**m for m in members) for members in sums}


def test_two_hundred_rounds_leave_no_threads_and_no_descriptors() -> None:
    store = dist.HashStore()

    def work(rank: int, groups: Groups) -> float:
        value = torch.ones(1)
        groups.world_group().all_reduce(value)
        return value.item()

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for generation in range(200):
        assert run_ranks(2, work, generation=generation, store=store) == [2.0, 2.0]
        if generation == 9:
            before = count()
    after, deadline = count(), time.monotonic() + SOON_S
    while (after[0] > before[0] + 4 or after[1] > before[1] + 4) and time.monotonic() < deadline:
        time.sleep(0.1)  # the last ones may still be ending
        after = count()
    assert after[0] <= before[0] + 4 and after[1] <= before[1] + 4, f"{before} -> {after}"


def test_cancel_ends_a_waiting_collective_at_once() -> None:
    token, took = CancelToken(), []

    def work(rank: int, groups: Groups) -> None:
        group = groups.world_group()
        if rank == 1:
            deadline = time.monotonic() + LIMIT_S
            while not any(one.name for one in all_groups[0].progress.values()) and time.monotonic() < deadline:
                time.sleep(0.01)
            token.set("worker 7 died")
            return
        begin = time.monotonic()
        with pytest.raises(Cancelled, match=r"all_reduce in group \(0, 1\).*worker 7 died"):
            group.all_reduce(torch.ones(3))
        took.append(time.monotonic() - begin)
        assert group.abandoned, "the peer may still write into these tensors"
        with pytest.raises(GroupError, match="broken by all_reduce"):
            group.all_reduce(torch.ones(3))

    store = dist.HashStore()
    all_groups = [
        Groups(store, r, (0, 1), "gloo", 0, LIMIT_S, token if r == 0 else CancelToken(), "127.0.0.1") for r in (0, 1)
    ]
    threads = [threading.Thread(target=work, args=(r, all_groups[r])) for r in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    begin = time.monotonic()
    for groups in all_groups:
        groups.close()
    assert len(took) == 1 and took[0] < SOON_S
    assert time.monotonic() - begin < SOON_S


def test_a_collective_of_an_aborted_group_never_looks_finished() -> None:
    aborted = threading.Event()

    def work(rank: int, groups: Groups) -> None:
        group = groups.world_group()
        if rank == 1:
            assert aborted.wait(LIMIT_S)
            return
        pending = group.all_reduce_async(torch.ones(3))
        group.abort()
        aborted.set()
        with pytest.raises(GroupError, match="aborted"):
            pending.wait()
        with pytest.raises(GroupError, match=r"finish: the group .* is aborted"):
            groups.check("finish")

    run_ranks(2, work)


def test_a_collective_that_begins_while_another_thread_ends_its_group_is_refused_at_once() -> None:
    ended, took = threading.Event(), []

    def work(rank: int, groups: Groups) -> None:
        group = groups.world_group()
        if rank == 1:
            assert ended.wait(LIMIT_S)  # never joins, and keeps its connections until then
            return

        def launch(process_group: dist.ProcessGroup) -> Any:
            group.abort()
            return process_group.allreduce([torch.ones(3)])

        begin = time.monotonic()
        with pytest.raises(GroupError, match="the group is aborted"):
            group._begin("all_reduce", torch.ones(3), launch).wait()
        assert group.abandoned, "the peer may still write into these tensors"
        took.append(time.monotonic() - begin)
        ended.set()

    run_ranks(2, work)
    assert took[0] < SOON_S


def test_a_bag_that_is_connected_while_another_thread_ends_the_generation_is_refused() -> None:
    connected = threading.Event()  # on rank 1, which else may find the connection closed before it is made

    def work(rank: int, groups: Groups) -> None:
        if rank == 0:
            connect = groups._connect

            def close_meanwhile(*bag: Any) -> Group:
                group = connect(*bag)
                assert connected.wait(LIMIT_S)
                groups.abort()
                return group

            groups._connect = close_meanwhile  # type: ignore[method-assign]
            with pytest.raises(GroupError, match="are closed"):
                groups.get((0, 1))
        else:
            groups.get((0, 1))
            connected.set()

    run_ranks(2, work)


def test_a_bag_that_is_left_while_another_thread_ends_the_generation_is_left() -> None:
    def work(rank: int, groups: Groups) -> None:
        groups.get((0, 1)).barrier()
        meet = groups._meet

        def close_meanwhile(*place: Any) -> bool:
            came = meet(*place)
            groups.abort()
            return came

        groups._meet = close_meanwhile  # type: ignore[method-assign]
        groups.leave((0, 1))
        with pytest.raises(GroupError, match="are closed"):
            groups.get((0, 1))

    run_ranks(2, work)


class Ended:
    """A collective that is over."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: object = None) -> bool:
        return True


class Communicator:
    """A process group of NCCL whose collectives end when it is aborted, and not before."""

    def __init__(self, error: str = "") -> None:
        self.error, self.aborted = error, threading.Event()

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.aborted.set()
        if self.error:
            raise RuntimeError(self.error)

    def allreduce(self, tensors: object, options: object) -> Communicator:
        return self

    def is_completed(self) -> bool:
        return self.aborted.is_set()

    def wait(self) -> bool:
        """Only orders the streams."""
        return True


def on_nccl(communicator: Communicator) -> Group:
    return Group(communicator, (0, 1), 0, LIMIT_S)  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [True, False])
def test_an_idle_communicator_is_ended_by_its_group_and_a_wrapped_one_by_its_owner(own: bool) -> None:
    """And not by its last reference, which an error may hold for long."""
    communicator = Communicator()
    store = dist.HashStore() if own else None
    Group(communicator, (0, 1), 0, LIMIT_S, store=store).close()  # type: ignore[arg-type]
    assert communicator.aborted.is_set() is own


@pytest.mark.parametrize("error", ["", "unhandled cuda error"])
def test_a_communicator_with_a_running_collective_is_aborted_when_its_group_ends(error: str) -> None:
    """Else the device waits in it for ever: nothing that could abort it has the communicator any more."""
    communicator = Communicator(error)
    group = on_nccl(communicator)
    pending = group.all_reduce_async(torch.ones(3))
    group.close()
    assert communicator.aborted.is_set()
    with pytest.raises(GroupError, match="closed"):
        pending.wait()
    idle = Communicator()
    on_nccl(idle).close()
    assert not idle.aborted.is_set()


class QueuedAfter(Communicator):
    """Its kernels are queued after those of others: it has ended when these are aborted, too. PyTorch aborts what
    nothing refers to any more."""

    def __init__(self, others: list[threading.Event], ended: list[bool]) -> None:
        super().__init__()
        self.others, self.ended = others, ended

    def abort(self) -> None:
        super().abort()
        self.ended.append(all(one.wait(SOON_S) for one in self.others))

    def __del__(self) -> None:
        if not self.aborted.is_set():
            self.abort()


@pytest.mark.parametrize("how", ["abort", "close", "cancel"])
def test_bags_end_whose_collectives_are_queued_after_one_that_hangs(how: str) -> None:
    """A host that is ahead of its device has queued those of bag (0, 2) after one of (0, 1), whose peer is dead."""
    cancel, ended = CancelToken(), list[bool]()
    hanging = QueuedAfter([], ended)
    groups = Groups(dist.HashStore(), 0, (0, 1, 2), "nccl", 1, LIMIT_S, cancel, device=torch.device("cuda", 0))
    groups._groups = {(0, 2): on_nccl(QueuedAfter([hanging.aborted], ended)), (0, 1): on_nccl(hanging)}
    del hanging
    if how == "cancel":
        cancel.set("generation 2 has begun")
        for thread in [one for one in threading.enumerate() if one.name == ABORTS]:
            thread.join(SOON_S)
    else:
        getattr(groups, how)()
    assert ended == [True, True] and not groups._all()


def test_who_cancels_a_generation_does_not_wait_for_the_device() -> None:
    """A heartbeat does it. A communicator ends when the device has passed the cascades that are queued before its
    kernels: where these take longer than `workers.suspect_s`, a survivor would be replaced as silent."""
    cancel, passed, ended = CancelToken(), threading.Event(), list[bool]()
    groups = Groups(dist.HashStore(), 0, (0, 1), "nccl", 1, LIMIT_S, cancel, device=torch.device("cuda", 0))
    groups._groups = {(0, 1): on_nccl(QueuedAfter([passed], ended))}
    beat = threading.Thread(target=cancel.set, args=("worker 1 died",))
    beat.start()
    beat.join(SOON_S / 6)
    waited, busy = beat.is_alive(), [one for one in threading.enumerate() if one.name == ABORTS]
    passed.set()
    beat.join(SOON_S)
    for thread in busy:
        thread.join(SOON_S)
    assert not waited and ended == [True] and not groups._all()


class Device:
    """A stream of a GPU as events see it: marks are recorded in order, and passed one after the other. Threads have
    streams of their own unless they take over another one's, as autograd's do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed = 0.0  # seconds of the device's clock, which stands still unless the test moves it
        self.streams: dict[int, int] = {}
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Mark(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=self.stream()))

    def stream(self) -> int:
        return self.streams.get(threading.get_ident(), 0)


class Mark:
    """An event; `at` is when the device will come to it."""

    at = math.inf

    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.at <= self._device.passed

    def synchronize(self) -> None:
        assert self.query(), "this would hang"

    def elapsed_time(self, other: Mark) -> float:
        return 1e3 * (other.at - self.at)


def test_on_nccl_the_collective_that_the_stream_waits_in_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has queued two and gone on. A worker that still computes before the first waits in none: it is the one
    that the others wait for."""
    device, clock = Device(monkeypatch), WaitClock()
    group = Group(Communicator(), (0, 1), 0, LIMIT_S, clock=clock)  # type: ignore[arg-type]
    marks = []
    for name in ("all_reduce", "broadcast"):
        pending = PendingCollective(group, Communicator(), name, stream_ordered=True)  # type: ignore[arg-type]
        pending.wait()
        queued = group._queued[-1].wait
        marks += [queued.before, queued.after]
    for mark, at in zip(marks, (2.0, 5.0, 6.0, 9.0), strict=True):
        mark.at = at  # type: ignore[attr-defined]
    named = []
    for device.passed in (1.0, 3.0, 5.5, 7.0, 9.0):
        named.append(group.progress.name)
    assert named == [None, "all_reduce", None, "broadcast", None]
    assert clock.take().seconds == pytest.approx(3.0 + 3.0) and clock.take().seconds == 0.0


def test_nccl_is_not_asked_whether_its_work_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer waits, with the GIL, for a lock that an abort in another thread holds: heartbeats would stop."""

    class Asked(Communicator):
        def is_completed(self) -> bool:
            assert self.aborted.is_set(), "NCCL was asked"
            return True

    Device(monkeypatch)
    communicator: Any = Asked()  # stands for its works, too
    group = on_nccl(communicator)
    waited, left = (PendingCollective(group, communicator, "all_reduce", stream_ordered=True) for _ in range(2))
    waited.wait()
    group._outstanding.add(left)
    group.close()
    assert group.abandoned, "what nobody has waited for may still write"


NCCL_SAYS = """NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.27.5
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Failed to CUDA calloc 6291456 bytes
Exception raised from create at /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:47 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f libc10.so)"""


def test_what_nccl_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason comes last, before a stack of C++ calls."""

    class Short(Communicator):
        def wait(self) -> bool:
            raise RuntimeError(NCCL_SAYS)

    Device(monkeypatch)
    group = on_nccl(Communicator())
    with pytest.raises(GroupError, match=r"failed: NCCL error .* Last error: Failed to CUDA calloc 6291456 bytes$"):
        PendingCollective(group, Short(), "all_to_all", stream_ordered=True).wait()  # type: ignore[arg-type]


@pytest.mark.parametrize(("code", "passed"), [(0, True), (600, False), (201, True)])
def test_the_driver_says_whether_an_event_has_passed(code: int, passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch, which keeps other threads out meanwhile, is asked where the driver does not know, or has failed."""
    asked: list[int] = []

    def query(handle: ctypes.c_void_p) -> int:
        asked.append(handle.value or 0)
        return code

    monkeypatch.setattr("ops.waiting._driver", lambda: SimpleNamespace(cuEventQuery=query))
    event = SimpleNamespace(cuda_event=2**40 + 7, query=lambda: code == 201 or pytest.fail("PyTorch was asked"))
    assert has_passed(event) is passed and asked == [2**40 + 7]  # type: ignore[arg-type]
    monkeypatch.setattr("ops.waiting._driver", lambda: None)
    assert has_passed(SimpleNamespace(query=lambda: True))  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", ["ended", "reached"])
def test_a_watchdog_lives_on_when_the_device_has_failed(asked: str) -> None:
    """Every call says an error of the device from then on, also a look at an event."""

    class Failed:
        ended = False

        def __getattr__(self, name: str) -> bool:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    if asked == "ended":
        Failed.__getattribute__ = Failed.__getattr__  # type: ignore[method-assign, assignment]
    group = on_nccl(Communicator())
    group._queued.append(_QueuedWait(Failed(), "all_reduce", 1.0))  # type: ignore[arg-type]
    assert group.progress.name is None


def test_the_waits_of_a_backward_count_with_the_stream_that_it_was_queued_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd queues them from a thread of its own; an encode beside it has its own stream."""
    device, clock = Device(monkeypatch), WaitClock()

    def waits(stream: int, seconds: float) -> None:
        device.streams[threading.get_ident()] = stream
        booked = clock.waited(lambda: None, on_stream=True)
        assert booked is not None
        booked.before.at, booked.after.at = 0.0, seconds  # type: ignore[attr-defined]

    waits(7, 1.0)
    for stream, seconds in ((7, 2.0), (8, 16.0)):
        thread = threading.Thread(target=waits, args=(stream, seconds))
        thread.start()
        thread.join()
    device.passed = 20.0
    clock.waited(lambda: time.sleep(0.01), on_stream=False)
    assert 3.01 <= clock.take().seconds < 3.5, "both of its stream, and the host's own"
    assert clock.take().seconds == 0.0


def test_waits_of_which_nobody_asks_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    clock = WaitClock(most=3)
    booked = [clock.waited(lambda: None, on_stream=True) for _ in range(8)]
    assert list(clock.take().waits) == booked[-3:]


def test_a_collective_whose_holder_has_dropped_it_still_counts_as_running() -> None:
    """Else its group is freed, and waits in that for an operation that peers may never join."""
    communicator = Communicator()
    group = on_nccl(communicator)
    group.all_reduce_async(torch.ones(3))
    group.close()
    assert communicator.aborted.is_set() and group.abandoned


@pytest.mark.parametrize("closed", ["before it is made", "when it is made"])
def test_a_bag_that_nobody_took_is_given_back(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the error of a rank that waited for it is held: its open connections let the peers wait for ever."""
    go, asked, token, made = threading.Event(), threading.Event(), CancelToken(), []

    def make(*_: Any) -> Communicator:
        asked.set()
        assert go.wait(LIMIT_S)
        backend = Communicator()
        backend.name = lambda: "gloo"  # type: ignore[method-assign]
        made.append(weakref.ref(backend))
        return backend

    monkeypatch.setattr("ops.comm.groups._make_gloo", make)
    store = dist.HashStore()
    store.set("heddle/0/0-1/here/1", "1")
    groups = Groups(store, 0, (0, 1), "gloo", 0, LIMIT_S, token, "127.0.0.1")
    groups.prepare([(0, 1)])
    assert asked.wait(LIMIT_S)
    token.set("worker 1 died")
    with pytest.raises(Cancelled) as held:
        groups.get((0, 1))
    (thread,) = groups._threads
    for step in (groups.close, go.set) if closed == "before it is made" else (go.set, thread.join, groups.close):
        step()
    thread.join(LIMIT_S)
    gc.collect()
    assert held.value and made[0]() is None


def test_a_group_whose_communicator_cannot_be_aborted_is_ended_all_the_same() -> None:
    group = on_nccl(Communicator("unhandled cuda error"))
    pending = group.all_reduce_async(torch.ones(3))
    group.abort()
    assert group.broken == "aborted" and group._process_group is None
    with pytest.raises(GroupError, match="aborted"):
        pending.wait()


def test_a_sum_that_begins_after_another_thread_has_ended_its_group_takes_no_memory_first() -> None:
    """On Gloo the parts of all members come to one place: on a GPU that is as much as the whole gradient."""
    group, flat = on_nccl(Communicator()), torch.zeros(8)
    group.abort()
    assert group.received_elements([(0, 4), (4, 8)]) == 0
    flat.new_empty = lambda *_: pytest.fail("memory was taken")  # type: ignore[method-assign, assignment]
    with pytest.raises(GroupError, match="aborted"):
        group.reduce_scatter_ranges_async(flat, [(0, 4), (4, 8)])


def test_a_wait_may_end_while_another_thread_looks_through_what_is_in_flight() -> None:
    group = on_nccl(Communicator())
    pending = [PendingCollective(group, Ended(), "all_reduce") for _ in range(3)]
    waits: list[threading.Thread] = []

    class Slow(set[PendingCollective]):
        def __iter__(self) -> Iterator[PendingCollective]:
            for one in super().__iter__():
                yield one
                if not waits:
                    waits.append(threading.Thread(target=pending[0].wait))
                    waits[0].start()
                    waits[0].join(0.3)

    group._outstanding = Slow(pending)
    group.close()
    waits[0].join(LIMIT_S)
    assert not group._outstanding


def test_what_has_ended_is_freed_once_by_threads_that_look_at_the_same_time() -> None:
    both = threading.Barrier(2)

    class Seen(Ended):
        def is_completed(self) -> bool:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.3)  # with the other thread, if that may look now
            return True

    remains = _Remains(None, [Seen()])
    held = sys.getrefcount(remains)
    _bury(remains)
    errors: list[BaseException] = []

    def free() -> None:
        try:
            free_ended()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=free) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not errors and sys.getrefcount(remains) == held


def test_time_out_names_collective_and_members_and_progress_shows_it() -> None:
    seen, over, watched = [], threading.Event(), threading.Event()

    def work(rank: int, groups: Groups) -> str:
        group = groups.world_group()
        group.barrier()
        groups.check("nothing has happened")
        if rank == 1:
            assert watched.wait(LIMIT_S)
            group.broadcast(torch.ones(3), source_rank=1)
            assert over.wait(LIMIT_S)
            return ""

        def watch() -> None:
            while not groups.progress[0, 1].name:
                time.sleep(0.01)
            seen.append(groups.progress[0, 1])
            watched.set()

        threading.Thread(target=watch, daemon=True).start()
        group.broadcast(torch.ones(3), source_rank=1)
        groups.allow(Patience(limit_s=1.0))
        with pytest.raises(TimeoutError) as error:
            group.broadcast(torch.ones(3), source_rank=1)
        over.set()
        return str(error.value)

    text = run_ranks(2, work)[0]
    assert "broadcast in group (0, 1) (rank 0)" in text and "within 1 s" in text
    assert seen[0].name == "broadcast" and seen[0].sequence == 2 and seen[0].since > 0


def test_a_limit_that_follows_the_plan_holds_for_the_next_wait_and_is_named() -> None:
    over = threading.Event()

    def work(rank: int, groups: Groups) -> str:
        groups.world_group().barrier()
        groups.allow(Patience(limit_s=0.5))
        if rank == 1:
            groups.allow(Patience(limit_s=LIMIT_S))
            time.sleep(1.0)
            groups.world_group().barrier()
            assert over.wait(LIMIT_S)
            return ""
        groups.allow(Patience(limit_s=LIMIT_S, why="5 x 6 s of step 7"))
        groups.world_group().barrier()  # longer than the limit at the beginning
        groups.allow(Patience(limit_s=0.4, why="5 x 0.08 s of step 8"))
        with pytest.raises(TimeoutError) as error:
            groups.world_group().barrier()
        over.set()
        return str(error.value)

    text = run_ranks(2, work)[0]
    assert "within 0.4 s (5 x 0.08 s of step 8). One of (0, 1) is stuck or dead" in text


def test_hosts_exchange_numbers_in_rank_order_and_leave_few_in_their_store() -> None:
    store, counts = dist.HashStore(), []

    def work(rank: int, groups: Groups) -> list[list[list[int]]]:
        group = groups.get((0, 2, 1))
        found = [group.exchange_numbers([turn, rank][: 1 + rank % 2]) for turn in range(40)]
        group.barrier()
        counts.append(store.num_keys())
        return found

    for rank, found in enumerate(run_ranks(3, work, store=store)):
        assert found == [[[turn], [turn], [turn, 1]] for turn in range(40)], rank
    before = dist.HashStore()
    run_ranks(3, lambda rank, groups: groups.get((0, 2, 1)).barrier(), store=before)
    assert max(counts) <= before.num_keys() + 3, "the last numbers of each member"
    assert Group.solo().exchange_numbers([3, 4]) == [[3, 4]]


@pytest.mark.parametrize("end", ["time", "cancel", "abort"])
def test_a_host_that_does_not_come_to_an_exchange_is_named_and_a_wait_for_it_ends(end: str) -> None:
    over, waits = threading.Event(), threading.Event()

    def work(rank: int, groups: Groups) -> str:
        group = groups.get((2, 0, 1))
        group.exchange_numbers([rank])
        if rank == 2:
            assert waits.wait(LIMIT_S)
            if end == "cancel":
                groups._cancel.set("w2 has died")
            assert over.wait(LIMIT_S)
            return ""
        groups.allow(Patience(limit_s=1.0 if end == "time" else LIMIT_S, why="of this test"))

        def watch() -> None:
            while groups.progress[2, 0, 1].name != "exchange of numbers":
                time.sleep(0.01)
            waits.set()
            if end == "abort":
                groups.abort()

        threading.Thread(target=watch, daemon=True).start()
        groups.clock.take()
        with pytest.raises((TimeoutError, GroupError, Cancelled)) as error:
            group.exchange_numbers([rank])
        if end == "time":
            assert groups.clock.take().seconds >= 0.9, "on a CPU nothing is done meanwhile"
        with pytest.raises((GroupError, Cancelled)):
            group.barrier()
        done[rank] = True
        if all(done.values()):
            over.set()
        return f"{type(error.value).__name__}: {error.value}"

    done = {0: False, 1: False}
    text, other, _ = run_ranks(3, work)
    expected = {
        "time": "TimeoutError: exchange of numbers in group (2, 0, 1) (rank 1): worker 2 did not come within 1 s "
        "(of this test).",
        "cancel": "Cancelled: exchange of numbers in group (2, 0, 1) (rank 1) cancelled: w2 has died",
        "abort": "GroupError: exchange of numbers in group (2, 0, 1) (rank 1): the group is aborted.",
    }
    assert text == expected[end] and other == expected[end].replace("rank 1", "rank 2")


def test_a_wait_of_a_worker_alone_ends_with_its_generation() -> None:
    """One that waited for a commit, in a generation that the death of the feeder had ended, left it after 180 s."""
    token = CancelToken()
    group = Groups(dist.HashStore(), 0, (0,), "gloo", 3, LIMIT_S, token, "127.0.0.1").world_group()
    group.check("waiting for a commit")
    token.set("the feeder died")
    with pytest.raises(Cancelled, match=r"waiting for a commit in group \(0,\) cancelled: the feeder died"):
        group.check("waiting for a commit")


def test_connecting_to_a_missing_member_ends_by_time_out_or_cancel() -> None:
    token = CancelToken()
    groups = Groups(dist.HashStore(), 0, (0, 1), "gloo", 3, 0.3, token, "127.0.0.1")
    with pytest.raises(TimeoutError, match=r"connecting bag \(0, 1\) of generation 3"):
        groups.get((0, 1))
    patient = Groups(dist.HashStore(), 0, (0, 1), "gloo", 4, LIMIT_S, token, "127.0.0.1")
    threading.Timer(0.2, token.set, args=("worker 1 died",)).start()
    begin = time.monotonic()
    with pytest.raises(Cancelled, match="worker 1 died"):
        patient.get((0, 1))
    assert time.monotonic() - begin < SOON_S


LEAVER = """
import threading, time, torch, torch.distributed as dist
from ops.comm.groups import Groups
from ops.waiting import CancelToken
store, token = dist.HashStore(), CancelToken()
both = [Groups(store, rank, (0, 1), "gloo", 0, 60.0, token, "127.0.0.1") for rank in (0, 1)]
both[1].prepare([(0, 1)])
group = both[0].get((0, 1))
both[1].get((0, 1))
pending = group.all_reduce_async(torch.ones(3))  # rank 1 never calls it
lonely = Groups(store, 0, (0, 1), "gloo", 1, 60.0, token, "127.0.0.1")
lonely.prepare([(0, 1)])  # rank 1 never comes
lonely.close()
both[0].close()
both[1].close()
print("bye", flush=True)
"""


def test_a_process_with_a_pending_collective_ends_cleanly_and_at_once() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", LEAVER], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "bye\n"
    assert process.wait(timeout=LIMIT_S) == 0


SURVIVOR = """
import json, sys, threading, time, torch, torch.distributed as dist
from datetime import timedelta
from ops.comm.groups import Groups
from ops.waiting import CancelToken
rank, port, timeout_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
def say(**fields): print(json.dumps({"rank": rank, **fields}), flush=True)
def generation(number, world, token):
    return Groups(store, rank, world, "gloo", number, timeout_s, token, "127.0.0.1")
token = CancelToken()
def listen():
    global token
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "cancel": token.set("a worker died")
        else: inbox.append(command); arrived.set()
inbox, arrived = [], threading.Event()
threading.Thread(target=listen, daemon=True).start()
groups, number = generation(1, (0, 1, 2, 3), token), 1
while True:
    try:
        group = groups.world_group()
        for step in range(10**9):
            value = torch.full((50_000,), float(rank))
            group.all_reduce(value)
            if step == 5: say(event="running", generation=number, total=value[0].item())
    except (RuntimeError, TimeoutError) as error:
        began = time.monotonic()
        groups.close()
        say(event="error", kind=type(error).__name__, close_s=time.monotonic() - began)
    arrived.wait(); arrived.clear()
    command = inbox.pop()
    number, token = command["generation"], CancelToken()
    groups = generation(number, tuple(command["world"]), token)
"""


class Survivors:
    """Four processes that sum for ever; the test is their controller."""

    def __init__(self, timeout_s: float) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", SURVIVOR, str(rank), str(self.store.port), str(timeout_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(4)
        ]

    def hear(self, rank: int) -> dict[str, Any]:
        line = self.processes[rank].stdout.readline()  # type: ignore[union-attr]
        assert line, f"rank {rank} ended"
        return json.loads(line)

    def tell(self, rank: int, **command: Any) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def test_survivors_of_dead_and_frozen_peers_fail_in_time_and_form_again() -> None:
    pool = Survivors(timeout_s=LIMIT_S)
    try:
        assert [pool.hear(rank)["total"] for rank in range(4)] == [6.0] * 4

        pool.processes[1].kill()
        begin = time.monotonic()
        errors = [pool.hear(rank) for rank in (0, 2, 3)]  # no controller: the first error closes its group and cascades
        assert [error["kind"] for error in errors] == ["GroupError"] * 3
        assert time.monotonic() - begin < SOON_S

        for rank in (0, 2, 3):
            pool.tell(rank, do="form", generation=2, world=(0, 2, 3))
        again = [pool.hear(rank) for rank in (0, 2, 3)]
        assert [(one["event"], one["generation"], one["total"]) for one in again] == [("running", 2, 5.0)] * 3

        pool.processes[2].send_signal(signal.SIGSTOP)
        time.sleep(
            1.0
        )  # both wait for it: one cancelled between two sums closes its connections, an error to the other
        begin = time.monotonic()
        for rank in (0, 3):  # what the controller does when heartbeats are missing
            pool.tell(rank, do="cancel")
        errors = [pool.hear(rank) for rank in (0, 3)]
        assert [error["kind"] for error in errors] == ["Cancelled"] * 2
        assert time.monotonic() - begin < SOON_S
        assert all(error["close_s"] < SOON_S for error in errors), "closing must not wait for the frozen peer"

        for rank in (0, 3):
            pool.tell(rank, do="form", generation=3, world=(0, 3))
        again = [pool.hear(rank) for rank in (0, 3)]
        assert [(one["event"], one["generation"], one["total"]) for one in again] == [("running", 3, 3.0)] * 2
    finally:
        pool.close()


def test_a_bag_that_was_left_is_connected_anew_and_the_others_stay() -> None:
    """Members leave at the same place and ask again at their own pace, as often as they like."""

    def work(rank: int, groups: Groups) -> list[float]:
        sums = []
        for turn in range(3):
            for members in ((0, 1, 2), (0, 1)):
                if rank not in members:
                    continue
                time.sleep(0.01 * ((rank + turn) % 3))
                value = torch.tensor([10.0**rank])
                groups.get(members).all_reduce(value)
                sums.append(value.item())
            old = groups.get((0, 1, 2))
            groups.leave((0, 1, 2))
            assert old.broken and groups.get((0, 1, 2)) is not old
        value = torch.tensor([10.0**rank])
        groups.world_group().all_reduce(value)  # a group of its own: leaving a bag of all workers does not touch it
        groups.leave((0, 1, 2))
        groups.world_group().all_reduce(value)
        return [*sums, value.item()]

    found = run_ranks(3, work)
    assert found[0] == found[1] == [111.0, 11.0] * 3 + [333.0] and found[2] == [111.0] * 3 + [333.0]


def test_a_bag_that_is_left_again_and_again_leaves_no_more_in_the_store() -> None:
    store, counts = dist.HashStore(), []

    def work(rank: int, groups: Groups) -> None:
        for _ in range(6):
            group = groups.get((0, 2, 1))
            group.exchange_numbers([rank])
            group.barrier()
            if rank == 0:
                counts.append(store.num_keys())
            group.barrier()
            groups.leave((0, 2, 1))

    run_ranks(3, work, store=store)
    assert counts[1:] == counts[:1] * 5


def test_a_bag_that_is_left_while_its_store_fails_is_closed() -> None:
    """It was no group of its worker any more, and nobody could close it later."""

    def work(rank: int, groups: Groups) -> str:
        group = groups.get((0, 1))
        group.barrier()

        def fail() -> None:
            raise RuntimeError("the store is gone")

        group.forget_numbers = fail  # type: ignore[method-assign]
        groups.leave((0, 1))
        return group.broken

    assert all(run_ranks(2, work))


def test_a_sum_that_was_left_half_done_gives_its_tensors_back_when_all_members_have_left() -> None:
    """It holds two tensors as large as the gradient, which the next generation would lack."""
    length, left = 4242, threading.Event()

    def alive() -> int:
        return sum(type(o) is torch.Tensor and o.shape == (length,) for o in gc.get_objects())

    def work(rank: int, groups: Groups) -> tuple[int, int]:
        group = groups.world_group()
        group.barrier()
        if rank == 1:
            assert left.wait(LIMIT_S)
            return 0, 0
        halves = [(0, length // 2), (length // 2, length)]
        pending = group.reduce_scatter_ranges_async(torch.zeros(length), halves)
        groups.close()
        del pending
        held = alive()
        left.set()
        deadline = time.monotonic() + SOON_S
        while alive() and time.monotonic() < deadline:
            time.sleep(0.05)
            free_ended()
        return held, alive()

    held, after = run_ranks(2, work)[0]
    assert held >= 2 and after == 0


def test_the_count_of_collectives_does_not_fall_when_a_bag_is_left() -> None:
    """Among waiting workers the one with the lowest count is late: leaving a bag must not make anybody late."""

    def work(rank: int, groups: Groups) -> list[int]:
        counts = []

        def count() -> int:
            found = sum(bag.sequence for bag in groups.progress.values())
            assert groups.begun == found, "also without a look at the device"
            return found

        for members in ((0, 1, 2), (0, 1, 2), (0, 1) if rank < 2 else (2,)):
            for _ in range(3):
                groups.get(members).barrier()
                counts.append(count())
            groups.leave(members)
            counts.append(count())
        return counts

    first, second, third = run_ranks(3, work)
    assert first == second == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9]
    assert third == [*first[:8], 6, 6, 6, 6]


def test_who_leaves_a_bag_waits_for_its_members() -> None:
    """Its memory is free only when nobody uses it any more; a member that never comes is named in time."""

    def work(rank: int, groups: Groups) -> tuple[float, float]:
        groups.get((0, 1)).barrier()
        if rank == 1:
            time.sleep(0.4)
        begin = time.monotonic()
        groups.leave((0, 1))
        return begin, time.monotonic()

    (_, left), (began, _) = run_ranks(2, work)
    assert left > began
    over = threading.Event()

    def lonely(rank: int, groups: Groups) -> None:
        groups.get((0, 1)).barrier()
        if rank == 1:
            assert over.wait(LIMIT_S)
            return
        groups.allow(Patience(limit_s=0.5))
        try:
            groups.leave((0, 1))
        finally:
            over.set()

    with pytest.raises(TimeoutError, match=r"leaving bag \(0, 1\) of generation 0: not all members came within 0.5 s"):
        run_ranks(2, lonely)
    with pytest.raises(ValueError, match=r"bag \(0, 1\) cannot be left: it is not connected"):
        Groups(dist.HashStore(), 0, (0, 1), "gloo", 0, 1.0, CancelToken(), "127.0.0.1").leave((0, 1))
