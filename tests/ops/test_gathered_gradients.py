"""Gradients that are added together: the same bits as one by one, whatever is held, and none of a pass that failed."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.update.flat_vector import slots
from ops.update.gathered_gradients import GatheredGradients
from ops.update.own_gradients import OwnGradients
from ops.update.sync import FlatSync
from tests.ops.placed import placed
from tests.ops.test_sync import FULL, START, SUM_ELEMENTS, TOTAL_STEPS, flat_weights, on_threads, sample_loss

torch.set_num_threads(1)
SIZES = (4, 4, 9, 2, 50, 3, 1)


class Told:
    """A sum of the layout, and which parameters have been added."""

    def __init__(self, small: int = 20, most: int = 100) -> None:
        self.sums = [torch.zeros(size) for size in SIZES]
        self.added: list[int] = []
        self.gathered = GatheredGradients(["p"] * len(SIZES), self.added.append, small, most)

    def backward(self, *given: tuple[int, float], dtype: torch.dtype = torch.float32) -> None:
        """A pass that leaves gradients of one value, in this order, and raises at a NaN."""
        one = torch.zeros(1, requires_grad=True)

        def leave(gradient: Tensor) -> None:
            for index, value in given:
                if value != value:
                    raise FloatingPointError
                gradient = torch.full((SIZES[index],), value, dtype=dtype)
                self.gathered.take(index, gradient, self.sums)

        out = one * 1.0
        out.register_hook(leave)
        out.backward()

    def values(self) -> list[float]:
        return [one.unique().item() for one in self.sums]


@pytest.mark.parametrize("most", [0, 8, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_is_added_before_the_pass_returns(dtype: torch.dtype, most: int) -> None:
    told = Told(most=most)
    told.backward((5, 5.0), (0, 1.0), (3, 3.0), (1, 2.0), dtype=dtype)
    told.backward((1, 2.0), (6, 0.5), dtype=dtype)
    assert told.values() == [1.0, 4.0, 0.0, 3.0, 0.0, 5.0, 0.5]
    assert sorted(told.added[:4]) == [0, 1, 3, 5] and sorted(told.added[4:]) == [1, 6]


def test_a_parameter_may_give_several_gradients_in_one_pass() -> None:
    told = Told()
    told.backward((1, 2.0), (0, 1.0), (1, 4.0), (0, 1.0))
    assert told.values()[:2] == [2.0, 6.0] and sorted(told.added) == [0, 0, 1, 1]


def test_nothing_is_left_of_a_pass_that_failed() -> None:
    told = Told()
    with pytest.raises(FloatingPointError):
        told.backward((0, 1.0), (1, float("nan")))
    told.gathered.drop()
    told.backward((1, 2.0))
    assert told.values()[:2] == [0.0, 2.0] and told.added == [1]


def test_gradients_of_two_dtypes_are_added_apart() -> None:
    told = Told()
    one = torch.zeros(1, requires_grad=True)
    out = one * 1.0

    def leave(gradient: Tensor) -> None:
        told.gathered.take(0, torch.full((4,), 1.0, dtype=torch.bfloat16), told.sums)
        told.gathered.take(1, torch.full((4,), 1.0 + 2**-20), told.sums)

    out.register_hook(leave)
    out.backward()
    assert told.values()[:2] == [1.0, 1.0 + 2**-20]


def test_blocks_are_added_apart_and_each_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is held does not grow with their number, and nothing of one is held when the next one begins."""
    names = ["stem.weight", "blocks.0.a.weight", "blocks.0.b.1.bias", "blocks.1.a.weight", "blocks.1.b.weight"]
    told: list[int] = []
    sizes = [1, 1, 1, 5, 1]
    sums = [torch.zeros(size) for size in sizes]
    gathered = GatheredGradients(names, told.append, small=4)
    one, calls, add = torch.zeros(1, requires_grad=True), [], torch._foreach_add_

    def leave(gradient: Tensor) -> None:
        for index, added in ((4, []), (3, [4]), (2, [4]), (1, [4, 2, 1]), (0, [4, 2, 1, 0])):
            assert gathered.take(index, torch.ones(sizes[index]), sums) == (index != 3)
            assert told == added

    def counted(into: list[Tensor], pieces: list[Tensor]) -> None:
        calls.append(len(into))
        add(into, pieces)

    monkeypatch.setattr(torch, "_foreach_add_", counted)
    out = one * 1.0
    out.register_hook(leave)
    out.backward()
    assert [float(one.sum()) for one in sums] == [1.0, 1.0, 1.0, 0.0, 1.0] and calls == [1, 2, 1]


def trained(dtype: torch.dtype, gathers: bool, watches: bool, size: int) -> list[Tensor]:
    """Weights of every rank after three steps of several passes each, one of which fails."""

    def work(rank: int, group: Group) -> Tensor:
        model = copy.deepcopy(START).to(dtype)
        made = partial(OwnGradients, sum_elements=SUM_ELEMENTS, gathers=gathers)
        sync = FlatSync(model, FULL, TOTAL_STEPS, places=placed(gradients=made))
        sync.form(group, None)
        for step in range(3):
            if step == 1:
                _fail(model, sync)
            sync.begin_step()
            mine = range(rank, 12, size)
            for i in mine:
                if watches and i == mine[-1]:
                    sync.watch_backward()
                sample_loss(model, i, step).backward()
            sync.finish_step(step, 1.0, len(mine), 12, lambda phase: None)
        return torch.from_numpy(flat_weights(model))

    return on_threads(size, work)


def _fail(model: nn.Module, sync: FlatSync) -> None:
    """A pass that ends in the middle of its backward; its step is begun again."""

    def fail(gradient: Tensor) -> None:
        raise MemoryError

    sync.begin_step()
    handle = model.get_parameter("stem.weight").register_hook(fail)
    with pytest.raises(MemoryError):
        sample_loss(model, 0, 0).backward()
    handle.remove()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("watches", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_workers_train_with_the_same_bits(dtype: torch.dtype, watches: bool, size: int) -> None:
    together, alone = (trained(dtype, gathers, watches, size) for gathers in (True, False))
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)


def test_a_device_gathers_and_a_cpu_does_not() -> None:
    for device, dtype in (("cpu", torch.float32), ("meta", torch.float32), ("meta", torch.bfloat16)):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device, dtype)
        parameters = list(model.parameters())
        one = OwnGradients(parameters, slots(list(model.named_parameters())), torch.float32, 8)
        one.begin_step()
        assert (parameters[0].grad is not None) == (device == "cpu")


def test_a_gradient_that_is_let_go_gives_its_memory_back_at_once() -> None:
    """Where another worker has no room for one, `FlatSync` lets its own go before the node's takes memory."""
    model = copy.deepcopy(START)
    made = partial(OwnGradients, sum_elements=SUM_ELEMENTS, gathers=True)
    sync = FlatSync(model, FULL, TOTAL_STEPS, places=placed(gradients=made))
    sync.form(Group.solo(), None)
    sync.begin_step()
    sample_loss(model, 0, 0).backward()
    memory = weakref.ref(sync.gradient().untyped_storage())
    gc.disable()
    try:
        del sync.gradients
        assert memory() is None
    finally:
        gc.enable()
