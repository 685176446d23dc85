"""A generation's first collective waits for the slowest to hold its state, however short collectives may wait."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ops.comm.groups import Groups
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


def test_pytorch_never_ends_a_process_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of ProcessGroupNCCL.hpp, in workers as in processes that profile or sample. A monitor or a dump would act
    minutes after the error was handled; a watchdog that meets an error of the device ends the process otherwise. And no
    host waits for what is the device's to wait for."""
    names = ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "RETHROW_CUDA_ERRORS")
    names += ("PROPAGATE_ERROR", "DESYNC_DEBUG", "NAN_CHECK", "USE_COMM_NONBLOCKING", "EXTRA_DUMP_ON_EXEC")
    for name in names:
        monkeypatch.delenv(f"TORCH_NCCL_{name}", raising=False)
    for name in ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "NAN_CHECK"):  # as many clusters have them
        monkeypatch.setenv(f"TORCH_NCCL_{name}", "1")
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        nccl_groups()
        assert dist.get_debug_level() == dist.DebugLevel.INFO, "in detail it ends the process of a broken communicator"
    finally:
        dist.set_debug_level(before)
    assert [os.environ[f"TORCH_NCCL_{name}"] for name in names] == ["0"] * 10


@pytest.mark.parametrize(("of_the_cluster", "found"), [(None, "0"), ("1", "1")])
def test_communicators_take_no_memory_of_a_switch_unless_the_cluster_wants_it(
    of_the_cluster: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL 2.29 fails where it has none to give."""
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    if of_the_cluster is not None:
        monkeypatch.setenv("NCCL_NVLS_ENABLE", of_the_cluster)
    nccl_groups()
    assert os.environ["NCCL_NVLS_ENABLE"] == found


def nccl_groups() -> Groups:
    return Groups(dist.HashStore(), 0, (0,), "nccl", 0, 1.0, CancelToken(), device=torch.device("cuda", 0))


@pytest.mark.parametrize(("ctas", "bag_ctas"), [(0, 0), (4, 0), (0, 8), (4, 16)])
def test_communicators_of_all_and_of_bags_have_a_limit_of_multiprocessors_each(
    ctas: int, bag_ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside a bag of all workers, whose exchanges are of a cascade."""
    made: list[tuple[bool, int | None]] = []  # whether of high priority, and its limit
    if real := getattr(dist, "ProcessGroupNCCL", None):  # of a build for CUDA
        assert hasattr(real.Options().config, "max_ctas") and hasattr(real.Options(), "is_high_priority_stream")

    class Options:
        def __init__(self) -> None:
            self.config, self.is_high_priority_stream = SimpleNamespace(max_ctas=None), False

    class Nccl:
        def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
            made.append((options.is_high_priority_stream, options.config.max_ctas))

        def name(self) -> str:
            return "nccl"

        def eager_connect_single_device(self, device: torch.device) -> None: ...

    Nccl.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    store, place = dist.HashStore(), torch.device("cpu")
    monkeypatch.setattr(dist.HashStore, "clone", lambda store: store, raising=False)

    def worker(rank: int) -> None:
        token = CancelToken()
        groups = Groups(store, rank, (0, 1), "nccl", 4, 20.0, token, device=place, world_ctas=ctas, bag_ctas=bag_ctas)
        groups.get((0, 1))
        groups.world_group()

    thread = threading.Thread(target=worker, args=(1,))
    thread.start()
    worker(0)
    thread.join(60)
    assert sorted(made, key=str) == 2 * [(False, ctas or None)] + 2 * [(True, bag_ctas or None)]
