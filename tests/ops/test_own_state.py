"""State in memory of a node trains bit for bit as state of a worker's own, and a whole version of it is there whenever
a worker dies."""

from __future__ import annotations

import copy
import itertools
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ops.comm.collectives import Group
from ops.config import OptimizerConfig
from ops.memory.lending import Lender, borrow
from ops.shards import ShardState, cut, shard_bounds
from ops.update.flat_vector import initial_shard, trainable
from ops.update.own_state import ShardBanks
from ops.update.state_memory import BankOrder, StateMemory
from ops.update.sync import FlatSync
from tests.ops.exported import own_shard
from tests.ops.placed import placed
from tests.ops.test_sync import (
    FULL,
    PLAIN,
    PRODIGY,
    SAMPLES,
    START,
    SUM_ELEMENTS,
    TOTAL_STEPS,
    deal,
    flat_weights,
    on_threads,
)
from tests.ops.test_sync import sample_loss as loss_of

ROOT = Path(__file__).parents[2]
STEPS = 3


class Home:
    """Stands for the keeper of a node: says which bank has the version that is safe, and which takes the next."""

    def __init__(self, total: int) -> None:
        self.memory = StateMemory.reserve(total)
        self.memory.order = BankOrder(generation=0, step=-1, held=1, next=0)

    def begin(self, generation: int, shards: Sequence[ShardState]) -> None:
        """The state to go on from is in its bank."""
        order = self.memory.order
        self.memory.order = BankOrder(generation=generation, step=order.step, held=order.held, next=order.next)
        for shard in shards:
            for name, array in self.memory.arrays(order.held, shard.lo, shard.hi, tuple(shard.arrays)).items():
                array[:] = shard.arrays[name]

    def commit(self, step: int) -> None:
        order = self.memory.order
        self.memory.order = BankOrder(generation=order.generation, step=step, held=order.next, next=order.held)

    def held(self, like: ShardState, lo: int = 0, hi: int | None = None) -> ShardState:
        """The version that is safe."""
        hi = self.memory.total if hi is None else hi
        arrays = self.memory.arrays(self.memory.order.held, lo, hi, tuple(like.arrays))
        return replace(like, lo=lo, hi=hi, total=self.memory.total, arrays=arrays)


def trained(
    home: Home | None, sizes: Sequence[int], every: int = 1, infinite: int = -1, config: OptimizerConfig = FULL
) -> list[np.ndarray]:
    """Two steps in every generation, of these numbers of workers; a version for others after `every` steps and at a
    generation's end. Weights and state at the end of each generation."""
    models = [copy.deepcopy(START).float() for _ in range(max(sizes))]
    syncs = [
        FlatSync(model, config, TOTAL_STEPS, places=placed(state="host", sum_elements=SUM_ELEMENTS)) for model in models
    ]
    total = syncs[0].layout[-1].hi
    shards = [initial_shard(trainable(models[0]), 0, total)]
    found, first = [], 0
    for generation, size in enumerate(sizes):
        if home is not None:
            home.begin(generation, shards)

        def work(rank: int, group: Group, shards: list[ShardState] = shards, first: int = first) -> ShardState:
            sync, bounds = syncs[rank], shard_bounds(total, group.size)
            if home is None:
                sync.form(group, shards)
            else:
                banks = ShardBanks(home.memory, home.memory.order.generation)
                sync.form(group, [home.held(shards[0], *bounds[rank])], banks)
            for step in range(first, first + 2):
                sync.begin_step()
                mine = deal(step, group.size)[rank]
                for index in mine:
                    loss = loss_of(models[rank], index, step)
                    (loss * math.inf if step == infinite and index == 4 else loss).backward()
                last = step == first + 1
                export = (step + 1) % every == 0 or last
                result = sync.finish_step(step, 1.0, len(mine), SAMPLES, lambda phase: None, export=export)
                assert result.applied == (step != infinite)
                group.barrier()
                if export and home is not None and rank == 0:
                    home.commit(step)
                group.barrier()
            assert result.export is not None
            result.export.wait()
            made = copy.deepcopy(result.export.shard)
            sync.leave()
            return made

        shards, first = on_threads(size, work, generation), first + 2
        if home is not None:
            kept = home.held(shards[0])
            for name, array in cut(shards, 0, total).arrays.items():
                np.testing.assert_array_equal(kept.arrays[name], array, err_msg=name)
        found += [flat_weights(model) for model in models[:size]] + list(cut(shards, 0, total).arrays.values())
    return found


@pytest.mark.parametrize(
    ("sizes", "every", "infinite"),
    [((1,), 1, -1), ((3, 2, 4, 1), 1, -1), ((2, 3), 2, -1), ((2, 2), 3, 1), ((2, 1), 1, 0), ((2, 1), 1, 1)],
    ids=["one worker", "3 -> 2 -> 4 -> 1", "every second step", "infinite inside", "infinite first", "infinite last"],
)
def test_state_in_memory_of_the_node_gives_the_same_bits(sizes: tuple[int, ...], every: int, infinite: int) -> None:
    """What is safe after the last step is what the workers have, wherever it lies and whatever the step did."""
    home = Home(sum(p.numel() for _, p in trainable(START)))
    for one, other in zip(trained(home, sizes, every, infinite), trained(None, sizes, every, infinite), strict=True):
        np.testing.assert_array_equal(one, other)


def test_muons_momentum_in_memory_of_the_node_has_the_same_bits() -> None:
    """It is written before the weights are."""
    home, muon = Home(sum(p.numel() for _, p in trainable(START))), replace(FULL, kind="muon")
    for one, other in zip(trained(home, (3, 2), config=muon), trained(None, (3, 2), config=muon), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_prodigy_knows_in_memory_of_the_node_has_the_same_bits() -> None:
    """Its moments are written before all agree on d, its weights after."""
    home = Home(sum(p.numel() for _, p in trainable(START)))
    for one, other in zip(trained(home, (3, 2), config=PRODIGY), trained(None, (3, 2), config=PRODIGY), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_average_that_is_switched_on_later_begins_with_the_weights() -> None:
    model = copy.deepcopy(START).float()
    total = sum(p.numel() for _, p in trainable(model))
    home, first = Home(total), initial_shard(trainable(model), 0, total)
    home.begin(1, [first])
    assert "ema" not in first.arrays
    for config, average in ((PLAIN, False), (FULL, True)):
        sync = FlatSync(model, config, TOTAL_STEPS, places=placed(state="host"))
        sync.form(Group.solo(), [home.held(first)], ShardBanks(home.memory, 1))
        assert ("ema" in sync.state.arrays) == average
    np.testing.assert_array_equal(own_shard(sync).arrays["ema"], first.arrays["master"])


def test_a_worker_that_has_left_has_nothing_of_its_nodes_memory() -> None:
    """Another generation writes there; nothing of this one may."""
    model = copy.deepcopy(START).float()
    total = sum(p.numel() for _, p in trainable(model))
    home, first = Home(total), initial_shard(trainable(model), 0, total)
    home.begin(1, [first])
    sync = FlatSync(model, PLAIN, TOTAL_STEPS, places=placed(state="host"))
    sync.form(Group.solo(), [home.held(first)], ShardBanks(home.memory, 1))
    assert sync.state.in_banks
    for _ in range(2):
        sync.leave()
        assert sync.state.arrays == {} and not sync.state.in_banks


# -- processes that are killed -----------------------------------------------------------------------------------------


PIECES = 3  # of an update


class Wide(nn.Module):
    """An update of several pieces, so that it is interrupted in the middle of a version."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(PIECES << 20, generator=torch.Generator().manual_seed(0)))

    def forward(self, step: int) -> torch.Tensor:
        return (self.weight * torch.cos(self.weight + step)).sum()


def worker(number: int, generation: int, dies_in: int) -> None:
    """A process that trains on and says which versions are whole; it kills itself in its `dies_in`-th piece of an
    update, before and after which pieces are written."""
    torch.set_num_threads(1)
    memory = StateMemory(borrow(number))
    banks, first = ShardBanks(memory, generation), memory.order.step + 1
    arrays = memory.arrays(banks.current, 0, memory.total)
    held = ShardState(updates=first, lo=0, hi=memory.total, total=memory.total, arrays=arrays)
    sync = FlatSync(Wide(), FULL, TOTAL_STEPS, places=placed(state="host"))
    sync.form(Group.solo(), [held], banks)
    bring, pieces = sync.state.bring, itertools.count(1)

    def dies(own: slice) -> dict[str, torch.Tensor]:
        found = bring(own)
        if next(pieces) == dies_in:
            found["exp_avg"][: len(found["exp_avg"]) // 2] = 1e9
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    sync.state.bring = dies  # type: ignore[method-assign]
    for step in range(first, STEPS):
        sync.begin_step()
        sync._module(step).backward()
        sync.finish_step(step, 1.0, 1.0, 1.0, lambda phase: None, export=True)
        print(step, flush=True)


@pytest.mark.faults
def test_whenever_a_worker_is_killed_the_version_before_is_whole_and_the_next_goes_on_from_it() -> None:
    """In two updates, each in another piece, with others before it written. Nobody counts on what it has left."""
    plain = FlatSync(Wide(), FULL, TOTAL_STEPS)
    plain.form(Group.solo(), None)
    first = own_shard(plain)
    versions = {-1: first.arrays}
    for step in range(STEPS):
        plain.begin_step()
        plain._module(step).backward()
        plain.finish_step(step, 1.0, 1.0, 1.0, lambda phase: None)
        versions[step] = own_shard(plain).arrays
    home = Home(first.total)
    home.begin(0, [first])
    lender = Lender(home.memory.memory)
    dies_in = [2, PIECES + 3, 0]
    for generation, piece in enumerate(dies_in, 1):
        home.begin(generation, [])
        call = [sys.executable, "-m", "tests.ops.test_own_state", str(lender.number), str(generation), str(piece)]
        process = subprocess.Popen(call, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout is not None
        for line in process.stdout:
            home.commit(int(line))
        assert process.wait(60) == (-signal.SIGKILL if piece else 0)
        order = home.memory.order
        for name, array in home.memory.arrays(order.held, 0, first.total).items():
            np.testing.assert_array_equal(array, versions[order.step][name], err_msg=f"{name} after {order.step}")
        if piece:
            torn = home.memory.arrays(order.next, 0, first.total)
            assert (torn["exp_avg"] == 1e9).any(), "it died before it had written anything"
    assert order.step == STEPS - 1
    lender.close()


if __name__ == "__main__":
    worker(*map(int, sys.argv[1:]))
