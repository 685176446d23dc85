"""Gradients that a node's workers add into shared memory: exact, also between nodes, and nothing of a dead worker's.

`tests.ops.test_sync` compares whole runs with plain AdamW, `tests.actors.test_exactness` any plan.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ops.comm.collectives import Group
from ops.comm.groups import Groups
from ops.memory.node_memory import NodeMemory, RangeLock
from ops.update.flat_vector import slots
from ops.update.gradient_places import gradients_in
from ops.update.node_gradients import NodeGradients
from ops.update.node_routes import peers, routes
from ops.update.node_sum import SharedSum
from ops.waiting import Cancelled, CancelToken
from tests.ops.node_rank import STEPS

ROOT = Path(__file__).parents[2]
WORKERS = 4


def run_ranks(case: str, memory: str = "shared") -> list[tuple[int, list[str]]]:
    """Exit status and lines of each process of tests/ops/node_rank.py."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ops.node_rank", str(rank), str(WORKERS), str(store.port), case, memory],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(WORKERS)
    ]
    try:
        outputs = [process.communicate(timeout=280)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [pytest.param("one", marks=pytest.mark.long), "3+1"])
def test_integer_gradients_of_four_processes_are_bit_exact(case: str) -> None:
    assert run_ranks(case) == [(0, ["0"] * STEPS)] * WORKERS


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("memory", ["peers", "host"])
@pytest.mark.parametrize("case", ["one", "3+1"])
def test_integer_gradients_in_parts_and_beside_devices_are_bit_exact(case: str, memory: str) -> None:
    assert run_ranks(case, memory) == [(0, ["0"] * STEPS)] * WORKERS


@pytest.mark.long
@pytest.mark.timeout(900)
def test_without_locks_additions_are_lost() -> None:
    """The test above can fail. How many are lost is chance: four processes on two cores lose some within a few runs."""
    for _ in range(5):
        found = run_ranks("unlocked")
        assert all(status == 0 for status, _ in found)
        if any(int(count) for _, counts in found for count in counts):
            return
    pytest.fail("no addition was lost without locks")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("memory", ["shared", "peers", "host"])
def test_a_half_done_addition_of_a_killed_process_is_in_no_later_sum(memory: str) -> None:
    found = run_ranks("dies", memory)
    assert found.pop(1) == (-signal.SIGKILL, [])
    assert found == [(0, ["broken"] + ["0"] * STEPS)] * (WORKERS - 1)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_worker_that_was_stopped_in_a_push_is_ended_before_the_memory_goes() -> None:
    found = run_ranks("stopped", "peers")
    assert found.pop(1) == (-signal.SIGKILL, [])
    assert found == [(0, ["broken"] + ["0"] * STEPS)] * (WORKERS - 1)


def made(size: int = 8, **limits: int) -> tuple[list[nn.Parameter], NodeGradients]:
    parameters = [nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(size))]
    layout = slots([(str(i), p) for i, p in enumerate(parameters)])
    return parameters, NodeGradients(parameters, layout, [SharedSum(layout[-1].hi, torch.float32, **limits)])


def receive(parameters: Sequence[nn.Parameter], gradients: NodeGradients, index: int, value: float) -> None:
    parameters[index].grad = torch.full_like(parameters[index], value)
    gradients.received(index)


def shared(gradients: NodeGradients) -> SharedSum:
    assert isinstance(gradients.sum, SharedSum)
    return gradients.sum


def lock_of_another(gradients: NodeGradients) -> RangeLock:
    """As another worker of the node would hold one."""
    lock = shared(gradients)._lock
    assert lock is not None
    memory = NodeMemory(os.dup(lock._descriptor), 64)
    return RangeLock(memory)


def test_a_locked_range_is_added_later_and_nobody_waits_for_it() -> None:
    parameters, gradients = made()
    gradients.form(Group.solo(), [(0, 16)])
    gradients.begin_step()
    other = lock_of_another(gradients)
    assert other.try_acquire(0, 32)
    receive(parameters, gradients, 0, 2.0)
    receive(parameters, gradients, 1, 3.0)
    assert gradients.flat.tolist() == [0.0] * 8 + [3.0] * 8
    other.release(0, 32)
    receive(parameters, gradients, 1, 1.0)
    assert gradients.flat.tolist() == [2.0] * 8 + [4.0] * 8


def test_a_lock_that_a_stopped_worker_holds_delays_the_end_until_the_generation_ends() -> None:
    store, cancel = dist.HashStore(), CancelToken()
    parameters, gradients = made()
    group = Groups(store, 0, (0,), "gloo", 1, 30.0, cancel, "127.0.0.1").world_group()
    group._cancel = cancel  # a group of one has a token of its own
    gradients.form(group, [(0, 16)])
    gradients.begin_step()
    other = lock_of_another(gradients)
    assert other.try_acquire(0, 4)
    receive(parameters, gradients, 0, 2.0)
    threading.Timer(0.1, cancel.set, ["worker 1 is replaced"]).start()
    with pytest.raises(Cancelled, match=r"adding a gradient in the node's memory .* worker 1 is replaced"):
        gradients.finish()


def test_waiting_gradients_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, gradients = made(waiting_bytes=40)
    gradients.form(Group.solo(), [(0, 16)])
    gradients.begin_step()
    other = lock_of_another(gradients)
    assert other.try_acquire(0, 32)
    receive(parameters, gradients, 0, 1.0)  # 32 bytes wait
    waited: list[bool] = []

    def free() -> None:
        """The lock becomes free when somebody waits for it."""
        if not waited:
            other.release(0, 32)
        waited.append(True)

    monkeypatch.setattr(shared(gradients), "_check", free)
    receive(parameters, gradients, 0, 1.0)  # 64 would: returns when the lock is free
    assert waited and gradients.flat[:8].tolist() == [1.0] * 8 and len(shared(gradients)._waiting) == 1


@given(nodes=st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_each_rank_hears_once_from_every_other_node_and_a_node_shares_the_work(nodes: list[int]) -> None:
    sends = routes(nodes)
    for rank, home in enumerate(nodes):
        heard = [nodes[other] for other in range(len(nodes)) if rank in sends[other]]
        assert sorted(heard) == sorted(set(nodes) - {home})
    for node in set(nodes):
        shares = [len(sends[rank]) for rank, home in enumerate(nodes) if home == node]
        assert max(shares) - min(shares) <= 1


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_ranks_of_nodes_of_one_size_meet_one_rank_of_each_other_node(sizes: list[int]) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    sends, found = routes(nodes), peers(nodes)
    for rank in range(len(nodes)):
        talks = {other for other in range(len(nodes)) if other in sends[rank] or rank in sends[other]}
        assert found[rank] == len(talks) and rank not in talks
    assert peers([node for node in range(len(sizes)) for _ in range(sizes[0])]) == [len(sizes) - 1] * (
        sizes[0] * len(sizes)
    )


def test_a_node_without_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.memory.node_memory.node_room", lambda: 10)
    _, gradients = made()
    with pytest.raises(MemoryError, match=r"no room for .* of shared memory \(gradients\)"):
        gradients.form(Group.solo(), [(0, 16)])


def test_workers_that_cannot_share_in_this_way_are_told_what_to_set() -> None:
    parameters = [nn.Parameter(torch.zeros(2, device="meta"))]
    with pytest.raises(ValueError, match=r"worker is on meta\. Set train\.memory\.gradients: own"):
        gradients_in("node")(parameters, slots([("p", parameters[0])]), torch.float32)
    parameters = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match=r"host is for workers on GPUs, and this worker is on cpu\. Set .*: node"):
        gradients_in("host")(parameters, slots([("p", parameters[0])]), torch.float32)
