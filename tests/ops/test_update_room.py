"""What a GPU's gradients and updates pin on their way is counted before a run: at least what is there at once, and not
much more."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.config import OptimizerConfig
from ops.update.flat_vector import slots
from ops.update.host_sum import HostSum
from ops.update.sync import FlatSync
from ops.update_room import pinned_gib
from tests.ops.peers import HostCopies
from tests.ops.placed import placed


class Counted(HostCopies):
    """Knows what is pinned at once, rounded as PyTorch does; copies take their time."""

    now = most = 0

    def _count(self, tensor: Tensor) -> Tensor:
        size = 1 << (tensor.nbytes - 1).bit_length()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self._gone, size)
        return tensor

    def _gone(self, size: int) -> None:
        self.now -= size

    def to_host(self, gradient: Tensor) -> tuple[Tensor, Callable[[], None]]:
        return self._count(gradient.clone()), lambda: time.sleep(0.01)

    def room(self, like: Tensor) -> Tensor:
        return self._count(torch.full_like(like, torch.nan))


def counted(total: int, largest: int, **where: int) -> float:
    """Bytes, of fp32 parameters."""
    return 2**30 * pinned_gib(
        total, largest, 4, **{"host_gradients": False, "host_state": False, "host_parameters": False, **where}
    )


def test_gradients_that_are_not_added_yet() -> None:
    parameter, copies = nn.Parameter(torch.zeros(1500)), Counted()
    total = HostSum(40 * 1500, torch.float32, copies, ahead_bytes=20_000)
    total.form(Group.solo(), [(0, 40 * 1500)], [])
    (slot,) = slots([("it", parameter)])
    for _ in range(40):
        total.add(slot, torch.ones(1500))
    total.flush()
    total.leave()
    told = counted(40 * 1500, 1500, host_gradients=True, ahead_bytes=20_000)
    assert told - 8192 <= copies.most <= told
    assert counted(1500, 1500, host_gradients=True) == 2 * 6000, "no more than there is"


def test_buckets_of_an_update_in_host_memory() -> None:
    """Four of those in which a CPU updates."""
    copies, model = Counted(), nn.Linear(2048, 2048, bias=False).bfloat16()
    places = placed(state="host")
    sync = FlatSync(model, OptimizerConfig(), 10, places=places, copies=copies)
    sync.form(Group.solo(), None)
    sync.begin_step()
    model(torch.ones(1, 2048, dtype=torch.bfloat16)).sum().backward()
    sync.finish_step(0, 1.0, 1.0, 1.0, phase=lambda name: None)
    where = {"host_gradients": False, "host_state": True, "host_parameters": False}
    told = 2**30 * pinned_gib(1 << 22, 1 << 22, 2, **where, bucket=1 << 20)
    assert told == 3 * (4 << 20) + 2 * (2 << 20)
    assert told - (4 << 20) <= copies.most <= told


def test_what_does_not_go_over_the_host_pins_nothing() -> None:
    assert counted(1 << 30, 1 << 20) == 0
    both = counted(1 << 30, 1 << 20, host_gradients=True, host_state=True)
    assert both == (1 << 30) + 2 * (4 << 20) + 2 * (128 << 20)
    assert both - counted(1 << 30, 1 << 20, host_gradients=True, host_state=True, host_parameters=True) == 2 * 128 << 20
