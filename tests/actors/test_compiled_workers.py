"""Workers whose transformers are compiled take the steps of workers that run them as written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from actors.plan.types import Cascade, Item
from actors.worker.work_done import WorkDone
from ops.models.base.transformer import PackedTransformer
from ops.packed.compiled_blocks import CompiledBlocks
from tests.actors.exactness import (
    Host,
    close_hosts,
    items_of,
    make_hosts,
    one_worker,
    random_cascades,
    run_step,
    train_config,
)

FP32 = 1e-5  # relative difference of the whole gradient
Kinds = Sequence[tuple[tuple[int, int, int], int]]
"""Shapes of clips, and how many of each."""
ONE_AND_SEVERAL: Kinds = [((5, 32, 48), 2), ((9, 32, 32), 1)]
OTHERS: Kinds = [((1, 32, 32), 3), ((5, 48, 32), 1), ((9, 32, 32), 2)]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    close_hosts()
    torch._dynamo.reset()


def items(kinds: Kinds) -> list[Item]:
    return [
        Item(id=f"i{n}", batch=batch, frames=f, height=h, width=w, text_tokens=12)
        for n, ((f, h, w), batch) in enumerate(kinds)
    ]


def compiled_hosts(world: int) -> list[Host]:
    hosts = make_hosts(world, torch.float32, train_config())
    for host in hosts:
        compile_blocks(host)
    return hosts


def compile_blocks(host: Host) -> None:
    """Code is traced and not made, which takes a compiler."""
    dit = host.executor.modules.dit
    assert isinstance(dit, PackedTransformer)
    dit.compiled = CompiledBlocks(dit.block_parts, "aot_eager")


def gradient(hosts: Sequence[Host], given: Sequence[Item], cascades: Sequence[Cascade]) -> torch.Tensor:
    for host in hosts:
        host.executor.sync.begin_step()
    run_step(hosts, given, cascades, finish=False)
    return torch.stack([host.executor.sync.gradient() for host in hosts]).sum(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A worker that ran cascades as written, and then the same and others by compiled code."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]  # its gradient by compiled code, and one as written, of each kinds
    graphs: list[int]  # pieces of code after each kinds
    first_here: list[set[bool]]  # of DiT cascades: twice as written, then twice by compiled code


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    """Compiled once for the file: it takes ten seconds of a core."""
    torch._dynamo.reset()
    counters.clear()
    ours, theirs = (make_hosts(1, torch.float32, train_config()) for _ in range(2))
    given, first_here, by_one = items(ONE_AND_SEVERAL), [], []
    for compiles in (False, False, True, False):
        if compiles:
            compile_blocks(ours[0])
        ours[0].executor.work = WorkDone()
        by_one.append(gradient(ours, given, one_worker(given)))
        first_here.append({span.first_here for span in ours[0].executor.work.spans if span.module == "dit"})
    graphs, pairs = [counters["stats"]["unique_graphs"]], [(one, by_one[0]) for one in by_one[2:]]
    others = items(OTHERS)
    found, expected = (gradient(hosts, others, one_worker(others)) for hosts in (ours, theirs))
    graphs.append(counters["stats"]["unique_graphs"])
    return Compiled(pairs=[*pairs, (found, expected)], graphs=graphs, first_here=first_here)


@pytest.mark.long
def test_a_worker_compiles_in_its_first_cascades_and_computes_the_same(compiled: Compiled) -> None:
    """Its calls are made in other threads than that which loaded the model, and its gradients lie in one vector."""
    for found, expected in compiled.pairs:
        assert (found - expected).norm() < FP32 * expected.norm()
    assert compiled.graphs[0] > 0 and compiled.graphs[0] == compiled.graphs[1]


def test_seconds_in_which_code_was_made_are_not_those_of_a_cascade(compiled: Compiled) -> None:
    """Plans learn nothing from them, also where the worker has run the shape before."""
    assert compiled.first_here == [{True}, {False}, {True}, {False}]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
def test_any_legal_plan_of_compiled_workers_gives_the_gradient_of_one_as_written(seed: int) -> None:
    rng = np.random.default_rng(seed)
    given = items_of(rng, 4)
    found = gradient(compiled_hosts(3), given, random_cascades(rng, given, 3))
    expected = gradient(make_hosts(1, torch.float32, train_config()), given, one_worker(given))
    assert (found - expected).norm() < FP32 * expected.norm()
