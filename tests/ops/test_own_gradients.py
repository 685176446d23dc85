"""The gradient sum in buckets: the same bits whenever it starts, in flight while others compute, no hang at a death."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ops.comm.collectives import Group
from ops.comm.groups import Groups
from ops.shards import Slot, shard_bounds
from ops.update.own_gradients import OwnGradients, cut_buckets
from ops.update.sync import FlatSync
from ops.waiting import Cancelled, CancelToken, PendingCollective
from tests.ops.placed import placed
from tests.ops.test_sync import (
    FULL,
    LIMIT_S,
    SAMPLES,
    START,
    SUM_ELEMENTS,
    TOTAL_STEPS,
    flat_weights,
    on_threads,
    sample_loss,
)

torch.set_num_threads(1)


def layout(*sizes: int) -> list[Slot]:
    ends = np.cumsum(sizes)
    return [Slot(name=f"p{i}", shape=(n,), lo=int(e) - n, hi=int(e)) for i, (n, e) in enumerate(zip(sizes, ends))]


@pytest.mark.parametrize(
    ("sizes", "elements"), [((5,), 3), ((4, 4, 4, 4), 8), ((1, 100, 1, 1, 50, 2), 20), ((3,) * 9, 1)]
)
def test_buckets_cover_the_vector_once_from_its_end(sizes: tuple[int, ...], elements: int) -> None:
    buckets = cut_buckets(layout(*sizes), elements)
    assert buckets[0].hi == sum(sizes) and buckets[-1].lo == 0
    assert all(a.lo == b.hi and a.first == b.last for a, b in pairwise(buckets))
    assert all(b.hi - b.lo >= elements for b in buckets[:-1])


def trained(dtype: torch.dtype, how: str, size: int = 3) -> list[np.ndarray]:
    """Weights of every rank after four steps; rank 0 has no sample in some of them."""

    def work(rank: int, group: Group) -> np.ndarray:
        model = copy.deepcopy(START).to(dtype)
        sync = FlatSync(model, FULL, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS))
        sync.form(group, None)
        for step in range(4):
            sync.begin_step()
            given = [i for i in range(SAMPLES) if i % size == rank]
            mine = [] if rank == 0 and step % 2 else given
            for i in mine:
                if how == "inside" and i == mine[-1]:
                    sync.watch_backward()
                sample_loss(model, i, step).backward()
            if how != "at the end":
                sync.start_sum()
                assert sync.gradients.started > 2
            bad = len(given) - len(mine)
            sync.finish_step(step, 1.0, len(mine), SAMPLES, lambda phase: None, bad_weight=bad)
        return flat_weights(model)

    return on_threads(size, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_early_start_changes_no_bit(dtype: torch.dtype) -> None:
    expected = trained(dtype, "at the end")
    for how in ("behind", "inside"):
        for weights, same in zip(trained(dtype, how), expected):
            np.testing.assert_array_equal(weights, same)


class Gate(torch.autograd.Function):
    """Lets backward pass when this has returned."""

    @staticmethod
    def forward(context: Any, x: Tensor, pass_through: Callable[[], None]) -> Tensor:
        context.pass_through = pass_through
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        context.pass_through()
        return gradient, None


class Gated(nn.Module):
    """Two layers with a gate between them: backward of the first waits."""

    def __init__(self, pass_through: Callable[[], None]) -> None:
        super().__init__()
        self.first, self.second, self.pass_through = nn.Linear(8, 8), nn.Linear(8, 8), pass_through

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Gate.apply(self.first(x), self.pass_through))


def test_complete_buckets_are_summed_while_a_slow_worker_is_still_in_its_last_backward() -> None:
    summed = threading.Event()

    def work(rank: int, group: Group) -> Tensor:
        torch.manual_seed(0)
        second: list[PendingCollective] = []  # the sum of that layer, taken before a finished one is let go

        def pass_through() -> None:
            if rank == 0:
                assert summed.wait(LIMIT_S), "the bucket after this layer was not summed while it waited"
            else:
                second.extend(pending for pending, _ in sync.gradients._pending)

        model = Gated(pass_through)
        sync = FlatSync(model, FULL, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS))
        sync.form(group, None)
        sync.begin_step()
        sync.watch_backward()
        model(torch.ones(1, 8)).sum().backward()
        if rank == 1:
            assert second
            deadline = time.monotonic() + LIMIT_S / 2
            while not all(one.done for one in second) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert all(one.done for one in second)
            summed.set()
        sync.finish_step(0, 1.0, 1, 2, lambda phase: None)
        return sync.gradient()

    on_threads(2, work)


class Held(Group):
    """Counts what its sums hold at a time beside the gradient."""

    held = most = 0

    def reduce_scatter_ranges_async(self, flat: Tensor, bounds: Any) -> list[Any]:
        self.held += self.received_elements(bounds)
        self.most = max(self.most, self.held)
        found = super().reduce_scatter_ranges_async(flat, bounds)
        for pending in found:
            finish, taken = pending._finish, self.received_elements(bounds)

            def freed(finish: Any = finish, taken: int = taken) -> None:
                finish()
                self.held -= taken

            pending._finish = freed
        return found


@pytest.mark.parametrize("late", ["start", "in the last backward"])
def test_parts_that_wait_to_be_added_take_bounded_memory(late: str) -> None:
    """Rank 0 adds nothing and comes first, as one without a cascade does; all at once would take a whole gradient."""
    slots, size = layout(*[50] * 40), 2
    total = slots[-1].hi
    waiting = threading.Event()

    def work(rank: int, group: Group) -> tuple[Tensor, int]:
        group.__class__ = Held
        assert isinstance(group, Held)
        parameters = [nn.Parameter(torch.zeros(slot.shape)) for slot in slots]
        one = OwnGradients(parameters, slots, torch.float32, 50, ahead_bytes=4 * 300)
        one.form(group, shard_bounds(total, size))
        one.begin_step()
        one.flat.copy_(torch.arange(float(total)) * (rank + 1))
        if rank == 0:
            one.start()
            started = one.started
            waiting.set()
            assert 1000 // 50 < started < 40, "of ranges of the other it takes nothing, and starts them all"
        else:
            assert waiting.wait(LIMIT_S)
            if late != "start":
                one.watch()
                for index in reversed(range(40)):
                    one.received(index)
        one.finish()
        assert group.held == 0
        lo, hi = shard_bounds(total, size)[rank]
        return one.part(lo, hi), group.most

    found = on_threads(size, work)
    assert torch.equal(torch.cat([part for part, _ in found]), 3 * torch.arange(float(total)))
    assert all(0 < most <= 300 + size * 50 for _, most in found)


def test_a_gradient_behind_the_start_of_its_bucket_is_an_error() -> None:
    def work(rank: int, group: Group) -> None:
        model = copy.deepcopy(START).float()
        sync = FlatSync(model, FULL, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS))
        sync.form(group, None)
        sync.begin_step()
        sync.start_sum()
        with pytest.raises(RuntimeError, match="received a gradient after the sum of its bucket"):
            sample_loss(model, 0, 0).backward()

    on_threads(2, work)


def test_a_member_that_dies_in_the_middle_of_the_sum_leaves_a_usable_worker() -> None:
    """Rank 1 never starts. Rank 0 learns this, and trains alone in the next generation like one never disturbed."""
    token, models = CancelToken(), [copy.deepcopy(START).float() for _ in range(2)]
    store, sync = dist.HashStore(), FlatSync(models[0], FULL, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS))
    formed, raised = threading.Event(), []

    def rank_0() -> None:
        groups = Groups(store, 0, (0, 1), "gloo", 0, LIMIT_S, token, "127.0.0.1")
        sync.form(groups.world_group(), None)
        sync.begin_step()
        sync.watch_backward()
        sample_loss(models[0], 0, 0).backward()
        formed.set()
        try:
            sync.finish_step(0, 1.0, 1, 1, lambda phase: None)
        except Cancelled as error:
            raised.append(error)
        groups.close()

    def rank_1() -> None:
        groups = Groups(store, 1, (0, 1), "gloo", 0, LIMIT_S, token, "127.0.0.1")
        FlatSync(models[1], FULL, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS)).form(
            groups.world_group(), None
        )
        assert formed.wait(LIMIT_S)
        token.set("generation 1 has begun")
        groups.close()

    threads = [threading.Thread(target=one) for one in (rank_0, rank_1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a worker hangs"
    assert raised
    calm = copy.deepcopy(START).float()
    for model, one in (
        (models[0], sync),
        (calm, FlatSync(calm, FULL, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS))),
    ):
        one.form(Group.solo(), None)
        one.begin_step()
        sample_loss(model, 1, 0).backward()
        one.start_sum()
        one.finish_step(0, 1.0, 1, 1, lambda phase: None)
    np.testing.assert_array_equal(flat_weights(models[0]), flat_weights(calm))


def test_after_a_broken_collective_no_memory_is_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is planned to its limit has no room for both."""
    model = copy.deepcopy(START)
    sync = FlatSync(model, FULL, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS))
    sync.form(Group.solo(), None)
    sync.begin_step()
    sample_loss(model, 0, 0).backward()
    result = sync.finish_step(0, 1.0, 1.0, 1.0, phase=lambda name: None, export=True)
    assert result.export is not None
    result.export.wait()
    shard, weights = result.export.shard.copy(), [p.detach().clone() for p in model.parameters()]
    broken = Group.solo()
    sync.form(broken, [shard])
    broken.abandoned = True
    memory = [sync.parameters._padded, sync.gradients._memory]  # type: ignore[attr-defined]
    earlier = [StorageWeakRef(tensor.untyped_storage()) for tensor in memory]
    del memory
    there, zeros = [], torch.zeros

    def noted(*sizes: Any, **more: Any) -> Tensor:
        there.append(sum(not one.expired() for one in earlier))
        return zeros(*sizes, **more)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", noted)
        sync.form(Group.solo(), [shard])
    assert there == [1, 0], "first the gradient, then the parameters"
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    sync.begin_step()
    sample_loss(model, 0, 0).backward()
    sync.finish_step(1, 1.0, 1.0, 1.0, phase=lambda name: None)
    assert not all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize("starts", ["with the state", "with the parameters"])
@pytest.mark.parametrize("on_device", [True, False])
def test_on_a_gpu_nothing_moves_after_a_broken_collective(on_device: bool, starts: str) -> None:
    """Its abort has ended all that wrote there, and blocks by CUDA graphs run as written for good once weights have
    moved. On Gloo a collective that nobody waited for may still write into the memory that it holds."""
    model = copy.deepcopy(START)
    sync = FlatSync(model, FULL, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS))
    broken = Group.solo()
    sync.form(broken, None)
    sync.begin_step()
    result = sync.finish_step(0, 1.0, 1.0, 1.0, phase=lambda name: None, export=True)
    assert result.export is not None
    result.export.wait()
    shards = [result.export.shard.copy()] if starts == "with the state" else None
    weights = flat_weights(model)
    broken.abandoned, broken._on_device = True, on_device
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    held = [parameter.detach() for parameter in trained]
    gradient = sync.gradients.part(0, sync.total)
    sync.form(Group.solo(), shards)
    assert all((now.data_ptr() == one.data_ptr()) is on_device for now, one in zip(trained, held, strict=True))
    assert (sync.gradients.part(0, sync.total).data_ptr() == gradient.data_ptr()) is on_device
    np.testing.assert_array_equal(flat_weights(model), weights)
    sync.begin_step()
    sample_loss(model, 0, 0).backward()
    sync.finish_step(1, 1.0, 1.0, 1.0, phase=lambda name: None)
    assert not np.array_equal(flat_weights(model), weights)
