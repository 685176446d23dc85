"""What is computed in host memory beside a GPU takes a share of the node's cores, and changes no bit of an update."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import ops.update.optimizer as optimizer_module
from ops.comm.collectives import Group
from ops.config import OptimizerConfig
from ops.cores import computing_with, host_threads, usable_cores
from ops.shards import Slot
from ops.update.host_sum import HostSum
from ops.update.optimizer import adamw_
from ops.update.sync import FlatSync
from tests.ops.peers import HostCopies

torch.set_num_threads(1)


@pytest.mark.parametrize(
    "files, most",
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "150000 100000\n"}, 1),
        ({"cpu.max": "20000 100000\n"}, 1),  # a fifth of a core is one all the same
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu.max": "garbage"}, None),
        ({}, None),
    ],
)
def test_cores_are_those_of_the_affinity_within_the_quota(
    tmp_path: Path, files: dict[str, str], most: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == (most or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    "workers, cores, threads", [(8, 64, 8), (8, 112, 14), (1, 112, 16), (8, 4, 1), (3, 32, 10), (4, 1, 1)]
)
def test_workers_of_a_node_share_its_cores(workers: int, cores: int, threads: int) -> None:
    assert host_threads(workers, cores) == threads


def test_unless_given_they_leave_half_of_the_cores_to_others() -> None:
    assert host_threads(1) == max(1, min(16, usable_cores() // 2))


def test_threads_are_as_before_afterwards_also_after_an_error() -> None:
    with computing_with(3):
        assert torch.get_num_threads() == 3
        with computing_with(2):  # never fewer than there are
            assert torch.get_num_threads() == 3
    with pytest.raises(KeyError), computing_with(3):
        raise KeyError
    assert torch.get_num_threads() == 1


def updated(host_cores: int | None) -> FlatSync:
    """After two steps of one worker; large enough that more threads share an operation."""
    torch.manual_seed(0)
    module = nn.Linear(300, 700)
    sync = FlatSync(module, OptimizerConfig(learning_rate=1e-2), total_steps=4, host_cores=host_cores)
    sync.form(Group.solo(), None)
    for step in range(2):
        sync.begin_step()
        module(torch.randn(5, 300)).square().sum().backward()
        sync.finish_step(step, 1.0, 1.0, 1.0, phase=lambda name: None)
    return sync


def test_an_update_takes_its_share_of_the_cores_and_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def watched(*args: object, **kwargs: object) -> None:
        seen.append(torch.get_num_threads())
        adamw_(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(optimizer_module, "adamw_", watched)
    alone = updated(None)
    assert set(seen) == {1}  # the process's own number
    seen.clear()
    shared = updated(2)
    assert set(seen) == {2} and torch.get_num_threads() == 1
    for name, array in alone.state.arrays.items():
        assert torch.equal(array, shared.state.arrays[name]), name


def test_gradients_are_added_in_host_memory_by_that_share(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Watched(HostSum):
        def _add(self, slot: object, gradient: torch.Tensor) -> None:
            seen.append(torch.get_num_threads())
            super()._add(slot, gradient)  # type: ignore[arg-type]

    gradients = Watched(6, torch.float32, HostCopies(), host_cores=3)
    gradients.form(Group.solo(), [(0, 6)], [()])
    gradients.add(Slot(name="w", lo=0, hi=6, shape=(2, 3)), torch.ones(2, 3))
    gradients.flush()
    assert seen == [3] and gradients.part(0, 6).tolist() == [1.0] * 6 and torch.get_num_threads() == 1
    gradients.leave()
