"""NCCL's rules on the CPU: that what breaks them is seen, and that the project's own collectives keep them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from threading import Barrier, Event, Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ops.comm.groups import Groups
from ops.shards import padding, shard_bounds
from ops.waiting import Cancelled, CancelToken, GroupError
from tests.nccl_rules import AgainstNccl, LazyGroup, nccl_rules
from tests.ops import test_comm
from tests.ops.test_comm import LIMIT_S, SOON_S

run_ranks = partial(test_comm.run_ranks, grace_s=0.2)  # a rank that waits for one that has raised gives up soon
FIRST, SECOND = (0, 1), (0, 1, 2)


@pytest.mark.parametrize("connected", [True, False])
def test_two_communicators_in_two_orders_are_seen_before_they_hang(
    connected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both wait in their first collective for the other; or, once connected, their kernels would on the devices."""

    def work(rank: int, groups: Groups) -> None:
        bags = [groups.get(one) for one in (FIRST, SECOND) if rank in one]
        if connected:
            for bag in bags:
                bag.all_reduce(torch.zeros(2))
        for pending in [bag.all_reduce_async(torch.zeros(2)) for bag in (bags if rank else bags[::-1])]:
            pending.wait()

    with nccl_rules(monkeypatch), pytest.raises(AgainstNccl, match=r"the other way round|wait for each other"):
        run_ranks(3, work)


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        (lambda group, rank: group.all_reduce(torch.zeros(2 + rank)), r"'allreduce', [23], .* and .*'allreduce', [23]"),
        (lambda group, rank: group.broadcast(torch.zeros(4), source_rank=rank), "'broadcast', 4"),
        (
            lambda group, rank: group.all_to_all(
                torch.zeros(2 + rank), torch.zeros(2 + rank), [1, 1 + rank], [1, 1 + rank]
            ),
            None,
        ),
        (
            lambda group, rank: group.all_to_all(torch.zeros(3), torch.zeros(3), [1, 2], [1, 2]),
            r"(8|4) bytes are sent and (8|4) received",
        ),
        (
            lambda group, rank: group.all_reduce(torch.zeros(2)) if rank else group.broadcast(torch.zeros(2), 0),
            "(broadcast and allreduce|allreduce and broadcast)",
        ),
    ],
)
def test_calls_that_do_not_fit_together_are_seen(
    call: Callable[[Any, int], None], seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nccl_rules(monkeypatch):
        if seen is None:  # every pair agrees
            run_ranks(2, lambda rank, groups: call(groups.world_group(), rank))
            return
        with pytest.raises(AgainstNccl, match=seen):
            run_ranks(2, lambda rank, groups: call(groups.world_group(), rank))


def test_a_communicator_is_there_before_its_first_collective_and_costs_memory_until_it_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with nccl_rules(monkeypatch) as rules:

        def work(rank: int, groups: Groups) -> list[int]:
            groups.prepare([SECOND])
            bag, seen = groups.get(SECOND), [rules.open_peers(rank)]
            bag.all_reduce(torch.zeros(1))
            seen.append(rules.open_peers(rank))
            del bag
            groups.leave(SECOND)
            return [*seen, rules.open_peers(rank)]

        assert run_ranks(3, work) == [[2, 2, 0]] * 3
        assert [rules.most_peers(rank) for rank in range(3)] == [2, 2, 2]
        assert rules.made_late == 0


def test_bags_that_are_prepared_connect_in_any_order_while_their_members_work_in_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a collective of one that is not there yet would turn into a circle: 0 waits in (0, 1), 1 in (1, 2), ..."""
    bags, world = [(0, 1), (1, 2), (0, 2), SECOND], Barrier(3)

    def work(rank: int, groups: Groups) -> int:
        mine = [bag for bag in bags if rank in bag]
        groups.prepare(mine[rank:] + mine[:rank])
        before = groups.world_group()
        before.barrier()  # collectives go on beside it
        deadline = time.monotonic() + LIMIT_S
        while rules.open_peers(rank) < 2 + 1 + 1 + 2 and time.monotonic() < deadline:
            time.sleep(0.005)  # nobody asks for a bag, and all are there
        made = rules.open_peers(rank)
        world.wait(LIMIT_S)
        for bag in mine:
            groups.get(bag).all_reduce(torch.zeros(1))
        return made

    with nccl_rules(monkeypatch) as rules:
        assert run_ranks(3, work) == [6, 6, 6]
    assert rules.made_late == 0


def test_a_member_that_stops_while_its_communicator_is_made_holds_up_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may wait for ever; the worker that asked for the bag learns at once that the generation has ended."""
    token, stuck, found = CancelToken(), Event(), []
    entered = Event()

    def connect(self: LazyGroup, device: torch.device) -> None:
        entered.set()
        stuck.wait(LIMIT_S)
        raise RuntimeError("the connection was closed")

    def one(rank: int, store: dist.Store) -> None:
        groups = Groups(store, rank, FIRST, "gloo", 0, LIMIT_S, token, "127.0.0.1", grace_s=0.2)
        try:
            groups.get(FIRST)
        except Exception as error:
            found.append(type(error))
        finally:
            groups.close()

    with nccl_rules(monkeypatch):
        monkeypatch.setattr(LazyGroup, "eager_connect_single_device", connect)
        store = dist.HashStore()
        threads = [Thread(target=one, args=(rank, store)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        assert entered.wait(LIMIT_S)
        token.set("generation 1 has begun")
        for thread in threads:
            thread.join(SOON_S)
        assert found == [Cancelled, Cancelled], "while nothing is connected yet"
        stuck.set()


def test_ranges_of_unequal_length_are_seen_before_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    uneven = [(0, 3), (3, 10)]
    with nccl_rules(monkeypatch) as rules:
        with pytest.raises(AgainstNccl, match=r"all_gather of \[3, 7\] elements takes a copy"):
            run_ranks(2, lambda rank, groups: groups.world_group().all_gather_ranges(torch.zeros(10), uneven))

        def work(rank: int, groups: Groups) -> list[float]:
            flat = torch.arange(10.0)
            for pending in groups.world_group().reduce_scatter_ranges_async(flat, uneven):
                pending.wait()
            return flat[slice(*uneven[rank])].tolist()

        assert run_ranks(2, work, generation=1) == [[0, 2, 4], [6, 8, 10, 12, 14, 16, 18]]
        assert rules.kinds == {"reduce": 4}


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("total", [5, 16 * 3, 1000])
def test_vectors_of_any_length_are_summed_and_gathered_in_place_by_one_collective_each(
    total: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shard_bounds(total, workers)

    def work(rank: int, groups: Groups) -> tuple[list[float], list[float]]:
        group, flat = groups.world_group(), torch.zeros(total + padding(total))
        flat[:total] = torch.arange(float(total)) * (rank + 1)
        even = group.even_ranges(flat, total)
        assert even is not None and [min(hi, total) for _, hi in even] == [hi for _, hi in own]
        for pending in group.reduce_scatter_ranges_async(flat, even):
            pending.wait()
        summed = flat[slice(*own[rank])].tolist()
        group.all_gather_ranges(flat, even)
        return summed, flat.tolist()

    expected = [float(i * sum(range(1, workers + 1))) for i in range(total)]
    with nccl_rules(monkeypatch) as rules:
        for (lo, hi), (summed, whole) in zip(own, run_ranks(workers, work), strict=True):
            assert summed == expected[lo:hi] and whole == expected + [0.0] * padding(total)
    assert rules.kinds == {"reduce_scatter": workers, "all_gather": workers}


def test_an_error_of_a_collective_is_told_by_the_communicator_and_not_by_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(rank: int, groups: Groups) -> tuple[float, str, str]:
        world, bag = groups.world_group(), groups.get(FIRST)
        world.all_reduce(torch.ones(1))
        before, found = bag.failure, torch.ones(1)
        bag.all_reduce(found)  # rank 1 meets the error here, and hears nothing
        return found.item(), before, bag.failure

    with nccl_rules(monkeypatch) as rules:
        rules.fail(1, "allreduce", after=1)
        (well, *told), (wrong, before, after) = run_ranks(2, work)
    assert (well, told) == (2.0, ["", ""]) and wrong != 2.0 and before == ""
    assert after == "an error of its communicator (COMM_ERROR)"


@pytest.mark.parametrize("asked", ["check", "the next collective", "leave"])
def test_who_asks_after_a_failed_collective_is_told(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, groups: Groups) -> None:
        bag = groups.get(FIRST)
        bag.all_reduce(torch.ones(1))
        if rank == 0 or asked == "check":
            groups.check("finish")
        elif asked == "leave":
            groups.leave(FIRST)
        else:
            bag.all_reduce(torch.ones(1))

    with nccl_rules(monkeypatch) as rules:
        rules.fail(1, "allreduce")
        with pytest.raises(GroupError, match=r"COMM_ERROR|met an error before"):
            run_ranks(2, work)
