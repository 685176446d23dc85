"""One worker of a node as a process: adds integer gradients, whose sum is exact in any order, and says what came of it.

    python -m tests.ops.node_rank RANK SIZE PORT CASE MEMORY

Cases: "one" node, nodes of "3+1" workers, one node "unlocked" (nobody takes a lock), one node in which rank 1 "dies" by
SIGKILL in the middle of an addition; the others then form the next generation without it, or that one is "stopped"
there, and ended by those who go on. Memory: "shared", parts of "peers", "host" memory beside devices. Prints the number
of elements of the own range that are not the exact sum, after each step.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.bench.gpu.node_peers import NodePeers
from ops.comm.collectives import Group
from ops.comm.groups import Groups
from ops.memory.node_memory import RangeLock
from ops.shards import shard_bounds
from ops.update.flat_vector import slots
from ops.update.host_sum import HostSum
from ops.update.node_gradients import NodeGradients
from ops.update.node_sum import NodeSum, SharedSum
from ops.update.peer_sum import PeerSum
from ops.waiting import Cancelled, CancelToken, GroupError
from tests.ops.peers import HostCopies

SIZES = (1 << 18, 7, 1 << 19, 13)
ROUNDS, STEPS = 12, 2
NODES = {"3+1": (0, 0, 0, 1)}  # else one


class Unlocked(RangeLock):
    """Everybody has it. Of no memory."""

    def __init__(self) -> None:
        self._descriptor = -1

    def try_acquire(self, lo: int, hi: int) -> bool:
        return True

    def release(self, lo: int, hi: int) -> None:
        return None


def gradient(rank: int, step: int, turn: int, size: int) -> Tensor:
    """Integers: fp32 adds them exactly, in whatever order."""
    return (torch.arange(size) % 97 + rank + 3 * turn + 5 * step).float()


def passes(rank: int) -> int:
    """Uneven, as cascades are."""
    return ROUNDS + rank


def expected(workers: list[int], step: int, size: int) -> Tensor:
    return torch.stack([gradient(r, step, t, size) for r in workers for t in range(passes(r))]).sum(0)


def run_step(
    rank: int,
    parameters: list[nn.Parameter],
    gradients: NodeGradients,
    step: int,
    before: Callable[[int], None] = lambda turn: None,
) -> None:
    gradients.begin_step()
    for turn in range(passes(rank)):
        before(turn)
        for index, parameter in enumerate(parameters):
            parameter.grad = gradient(rank, step, turn, parameter.numel())
            gradients.received(index)
    gradients.finish()


def wrong(gradients: NodeGradients, lo: int, hi: int, workers: list[int], step: int) -> int:
    sums = torch.cat([expected(workers, step, size) for size in SIZES])
    return int((gradients.part(lo, hi) != sums[lo:hi]).sum())


def main(rank: int, size: int, port: int, case: str, memory: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=250))
    parameters = [nn.Parameter(torch.zeros(n)) for n in SIZES]
    layout = slots([(str(i), p) for i, p in enumerate(parameters)])
    peers = NodePeers()
    sums: dict[str, Callable[[], NodeSum]] = {
        "shared": lambda: SharedSum(layout[-1].hi, torch.float32),
        "host": lambda: HostSum(layout[-1].hi, torch.float32, HostCopies()),
        "peers": lambda: PeerSum(layout[-1].hi, torch.float32, torch.float32, peers, stage=1 << 16),
    }
    gradients = NodeGradients(parameters, layout, [sums[memory]()])

    patience = 10.0 if case == "stopped" else 250.0  # also to connect: some processes import faster than others

    def group_of(generation: int, world: tuple[int, ...]) -> Group:
        nodes = [NODES.get(case, (0,) * size)[worker] for worker in world]
        groups = Groups(store, rank, world, "gloo", generation, patience, CancelToken(), "127.0.0.1", nodes)
        return groups.world_group()

    def train(world: tuple[int, ...], group: Group, dies: Callable[[int], None] = lambda turn: None) -> None:
        bounds = shard_bounds(layout[-1].hi, len(world))
        lo, hi = bounds[group.rank]
        gradients.form(group, bounds)
        if case == "unlocked":
            assert isinstance(gradients.sum, SharedSum)
            gradients.sum._lock = Unlocked()
        for step in range(STEPS):
            run_step(rank, parameters, gradients, step, dies)
            print(wrong(gradients, lo, hi, list(world), step), flush=True)
            gradients.drop()  # nobody updates here

    world = tuple(range(size))
    if case not in ("dies", "stopped"):
        train(world, group_of(1, world))
        return

    def half_an_addition(turn: int) -> None:
        if rank != 1 or turn != 3:
            return
        slot, how = layout[2], signal.SIGKILL if case == "dies" else signal.SIGSTOP
        if isinstance(gradients.sum, SharedSum):
            assert gradients.sum._lock is not None
            gradients.sum._lock.acquire(slot.lo * 4, slot.hi * 4, lambda: None)
            half = (slot.lo + slot.hi) // 2
            gradients.flat[slot.lo : half].add_(1000.0)
            os.kill(os.getpid(), how)

        def half_a_push(staged: Tensor, address: int) -> None:
            staged[len(staged) // 2 :] = 1000.0  # then it is added, and the rest never comes
            peers.before_push = lambda staged, address: os.kill(os.getpid(), how)

        peers.before_push = half_a_push

    try:
        train(world, group_of(1, world), half_an_addition)
    except (GroupError, Cancelled, TimeoutError):
        print("broken", flush=True)
    survivors = tuple(worker for worker in world if worker != 1)
    train(survivors, group_of(2, survivors))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
    os._exit(0)  # threads of groups that others have broken may not be joined as Python ends: now and then an abort
