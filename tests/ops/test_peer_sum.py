"""Gradients in the memory of a node's GPUs, with host memory in the GPUs' place: parts, pieces, refusals, fences.

`tests.ops.test_sync` trains with it, `tests.actors.test_exactness` compares any plan, `tests.ops.test_node_gradients`
kills and stops real processes in the middle of a push.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from app.bench.gpu.node_peers import NodePeers
from ops.comm.collectives import Group
from ops.config import OptimizerConfig
from ops.kernels.push.reference import ALIGN
from ops.shards import EDGE, Slot, held_elements, shard_bounds
from ops.typed import ConfigError
from ops.update.flat_vector import slots
from ops.update.gradient_places import GradientMemory
from ops.update.host_sum import HostSum
from ops.update.node_gradients import NodeGradients
from ops.update.node_routes import routes
from ops.update.node_sum import NodeSum
from ops.update.peer_sum import PeerSum
from ops.update.sync import FlatSync
from tests.ops.conftest import RunRanks
from tests.ops.peers import STAGE, HostCopies, peer_sum
from tests.ops.peers import in_host as gradients_in_host
from tests.ops.placed import placed

SIZES = (1, STAGE + 3, 7, 5 * ALIGN, 2 * STAGE, 13)


def parameters_of(sizes: tuple[int, ...] = SIZES) -> tuple[list[nn.Parameter], tuple[Slot, ...]]:
    parameters = [nn.Parameter(torch.zeros(n)) for n in sizes]
    return parameters, slots([(str(i), p) for i, p in enumerate(parameters)])


def gradient(rank: int, index: int, size: int) -> Tensor:
    """Whole numbers: their sum is exact in any order."""
    return (torch.arange(size) % 31 + 7 * rank + index).float()


def made(peers: NodePeers, sizes: tuple[int, ...] = SIZES, *others: NodeSum) -> NodeGradients:
    parameters, layout = parameters_of(sizes)
    total = layout[-1].hi
    return NodeGradients(parameters, layout, [PeerSum(total, torch.float32, torch.float32, peers, STAGE), *others])


def step(gradients: NodeGradients, rank: int) -> None:
    gradients.begin_step()
    for index, parameter in enumerate(gradients._parameters):
        parameter.grad = gradient(rank, index, parameter.numel())
        gradients.received(index)
    gradients.finish()


def wanted(ranks: int, sizes: tuple[int, ...] = SIZES) -> Tensor:
    return torch.cat([sum(gradient(r, i, n) for r in range(ranks)) for i, n in enumerate(sizes)])  # type: ignore[arg-type]


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=6), workers=st.integers(1, 5))
def test_a_part_of_any_parameter_is_added_where_it_belongs(sizes: list[int], workers: int) -> None:
    """One worker alone is home to everything, but its targets are cut as those of several are."""
    _, layout = parameters_of(tuple(sizes))
    total = layout[-1].hi
    one = PeerSum(total, torch.float32, torch.float32, NodePeers(), STAGE)
    bounds = shard_bounds(total, workers)
    one.reserve(0, bounds, [tuple(range(1, workers))])
    starts = list(one._held.values())
    one._targets = sorted((*piece, one.memory.data_ptr() + 4 * at) for piece, at in zip(one._held, starts))
    for index, slot in enumerate(layout):
        one.add(slot, gradient(0, index, slot.hi - slot.lo))
    found = torch.cat([one.part(lo, hi) for lo, hi in bounds])
    assert torch.equal(found, wanted(1, tuple(sizes)))


def test_every_worker_holds_the_sum_of_its_ranges_and_no_more_memory_than_planned(run_ranks: RunRanks) -> None:
    nodes = (0, 0, 0, 1)
    total = sum(SIZES)

    def work(group: Group) -> tuple[Tensor, int]:
        group.nodes = nodes
        gradients, bounds = made(NodePeers()), shard_bounds(total, group.size)
        gradients.form(group, bounds)
        for _ in range(2):  # nothing of the first step is left in the second
            step(gradients, group.rank)
            found = gradients.part(*bounds[group.rank]).clone()
            gradients.drop()
        held = gradients.flat.numel()
        gradients.leave()
        group.barrier()
        gradients.sum.release()
        return found, held

    found = run_ranks(4, work)
    assert torch.equal(torch.cat([part for part, _ in found]), wanted(4))
    assert EDGE == ALIGN, "what a plan counts with"
    largest = max(hi - lo for lo, hi in shard_bounds(total, 4))
    for node, here in ((0, 3), (1, 1)):
        most = max(held for (_, held), at in zip(found, nodes) if at == node)
        ranges = 1 + max(len(sends) for sends, at in zip(routes(nodes), nodes) if at == node)
        assert (
            held_elements(total, largest, 4, here)
            <= most
            <= held_elements(total, largest, 4, here) + (ranges + 1) * ALIGN
        )


@pytest.mark.parametrize("fault", ["one cannot borrow", "one adds nowhere", "one cannot allocate"])
def test_where_one_gpu_cannot_reach_another_all_use_host_memory_or_none(
    run_ranks: RunRanks, fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(elements: int, dtype: torch.dtype) -> Tensor:
        raise MemoryError("CUDA_ERROR_OUT_OF_MEMORY")

    def peers_of(rank: int) -> NodePeers:
        peers = NodePeers()
        if rank == 1 and fault == "one cannot borrow":
            peers.why_not = "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"
        if rank == 1 and fault == "one adds nowhere":
            peers.deaf = True
        if rank == 1 and fault == "one cannot allocate":
            monkeypatch.setattr(peers, "allocate", no_room)
        return peers

    total = sum(SIZES)

    def either(group: Group) -> tuple[str, Tensor]:
        gradients = made(peers_of(group.rank), SIZES, HostSum(total, torch.float32, HostCopies()))
        bounds = shard_bounds(total, group.size)
        gradients.form(group, bounds)
        step(gradients, group.rank)
        found = gradients.place, gradients.part(*bounds[group.rank]).clone()
        gradients.leave()
        return found

    with caplog.at_level(logging.INFO, "ops.update.node_gradients"):
        found = run_ranks(3, either)
    assert {place for place, _ in found} == {"host memory of the node"}
    assert torch.equal(torch.cat([part for _, part in found]), wanted(3))
    text = "gradients of 3 workers add up in host memory of the node: the memory of the node's GPUs cannot be used ("
    assert sum(record.getMessage().startswith(text) for record in caplog.records) == 3

    def only(group: Group) -> None:
        wanted: type[Exception] = MemoryError if fault == "one cannot allocate" else ConfigError
        with pytest.raises(wanted, match=r"GPUs cannot be used .*Set it to auto or host"):
            made(peers_of(group.rank)).form(group, shard_bounds(total, group.size))

    run_ranks(3, only)


def test_generations_leave_no_memory_behind(run_ranks: RunRanks) -> None:
    """Workers come and go; whoever leaves gives back, and what a part took goes when the next one is formed."""
    peers = [NodePeers() for _ in range(3)]
    made_by = [made(one) for one in peers]
    total = sum(SIZES)

    def form(group: Group) -> None:
        made_by[group.rank].form(group, shard_bounds(total, group.size))
        assert len(peers[group.rank].mapped) == group.size, "one part of its own, and one borrowed of each fellow"

    for size in (3, 2, 3, 1):
        run_ranks(size, form) if size > 1 else form(Group.solo())
        for one in made_by:
            one.leave()
        assert all(len(one.mapped) <= 1 for one in peers)


def test_who_changes_to_another_place_gives_back_what_its_gradient_took(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with less room comes in the second generation, and its place is taken by all."""
    peers: list[NodePeers] = []

    def in_parts(parameters: Sequence[nn.Parameter], layout: Sequence[Slot], dtype: torch.dtype) -> NodeGradients:
        peers.append(NodePeers())
        return NodeGradients(parameters, layout, [peer_sum(layout[-1].hi, dtype, parameters, peers[-1])])

    def worker(memory: GradientMemory) -> FlatSync:
        return FlatSync(nn.Linear(8, 64), OptimizerConfig(), 1, places=placed(gradients=memory))

    def form(*syncs: FlatSync) -> Callable[[Group], str]:
        def formed(group: Group) -> str:
            syncs[group.rank].form(group, None)
            return syncs[group.rank].gradients.place

        return formed

    places = {"node": in_parts, "host": gradients_in_host}
    monkeypatch.setattr("ops.update.sync_places.gradients_in", lambda memory, *more, **named: places[memory])
    first, second, later = worker("node"), worker("node"), worker("host")
    assert set(run_ranks(2, form(first, second))) == {"the memory of the node's GPUs"}
    assert all(one.mapped for one in peers)
    second.leave()  # it ends, and nobody has memory of another
    assert set(run_ranks(2, form(first, later))) == {"host memory of the node"}
    assert not peers[0].mapped
    for sync in (first, later):
        sync.leave()


def test_backward_may_reuse_a_gradient_as_soon_as_it_was_received() -> None:
    gradients = made(NodePeers())
    gradients.form(Group.solo(), [(0, sum(SIZES))])
    gradients.begin_step()
    parameter = gradients._parameters[3]
    values = torch.full_like(parameter, 3.0)
    parameter.grad = values
    gradients.received(3)
    values.zero_()
    gradients.finish()
    slot = gradients._layout[3]
    assert (gradients.part(slot.lo, slot.hi) == 3.0).all()


class SlowCopies(HostCopies):
    """Copies that arrive when they are waited for, not before."""

    def to_host(self, gradient: Tensor) -> tuple[Tensor, Callable[[], None]]:
        copy, values = torch.zeros_like(gradient), gradient.clone()

        def arrive() -> None:
            copy.copy_(values)

        return copy, arrive


def in_host(copies: HostCopies, **limits: int) -> NodeGradients:
    parameters, layout = parameters_of()
    return NodeGradients(parameters, layout, [HostSum(layout[-1].hi, torch.float32, copies, **limits)])


def test_host_memory_waits_for_copies_and_is_pinned_where_it_is_read(run_ranks: RunRanks) -> None:
    total = sum(SIZES)

    def work(group: Group) -> Tensor:
        copies = SlowCopies()
        gradients, bounds = in_host(copies), shard_bounds(total, group.size)
        gradients.form(group, bounds)
        step(gradients, group.rank)
        assert copies.pinned == [gradients.part(*bounds[group.rank]).data_ptr()]
        found = gradients.part(*bounds[group.rank]).clone()
        gradients.leave()
        assert not copies.pinned
        return found

    assert torch.equal(torch.cat(run_ranks(3, work)), wanted(3))


def test_an_addition_that_fails_beside_the_worker_fails_the_step() -> None:
    class Broken(HostCopies):
        def to_host(self, gradient: Tensor) -> tuple[Tensor, Callable[[], None]]:
            def lost() -> None:
                raise RuntimeError("the copy was lost")

            return gradient.clone(), lost

    gradients = in_host(Broken())
    gradients.form(Group.solo(), [(0, sum(SIZES))])
    with pytest.raises(RuntimeError, match="the copy was lost"):
        step(gradients, 0)
    gradients.leave()
    gradients._sums = in_host(HostCopies())._sums
    gradients._sum = gradients._sums[0]
    gradients.form(Group.solo(), [(0, sum(SIZES))])
    step(gradients, 0)
    assert torch.equal(gradients.part(0, sum(SIZES)), wanted(1))


def test_copies_do_not_pile_up() -> None:
    gradients = in_host(SlowCopies(), ahead_bytes=40_000)
    gradients.form(Group.solo(), [(0, sum(SIZES))])
    gradients.begin_step()
    for index in itertools.islice(itertools.cycle(range(len(SIZES))), 60):
        gradients._parameters[index].grad = gradient(0, index, SIZES[index])
        gradients.received(index)
        assert isinstance(gradients.sum, HostSum)
        assert gradients.sum._ahead <= 40_000 + 8 * max(SIZES)
    gradients.finish()
    assert torch.equal(gradients.part(0, sum(SIZES)), 10 * wanted(1))
    gradients.leave()


def test_copies_that_are_not_added_yet_count_with_what_pytorch_pins_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, (index, size) = threading.Event(), (1, STAGE + 3)

    class Held(HostCopies):
        def to_host(self, gradient: Tensor) -> tuple[Tensor, Callable[[], None]]:
            return gradient.clone(), lambda: None if arrived.wait(60) else pytest.fail("nobody let it arrive")

    gradients = in_host(Held())
    gradients.form(Group.solo(), [(0, sum(SIZES))])
    gradients.begin_step()
    gradients._parameters[index].grad = gradient(0, index, size)
    gradients.received(index)
    assert isinstance(gradients.sum, HostSum)
    assert gradients.sum._ahead == 2 * 4 * STAGE
    arrived.set()
    gradients.finish()
    assert gradients.sum._ahead == 0
    gradients.leave()
