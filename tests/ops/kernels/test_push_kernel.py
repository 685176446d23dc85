"""The push of a gradient into memory by its address: exact, and nothing beside it."""

import pytest
import torch
from torch import Tensor

from app.bench.gpu.node_peers import NodePeers
from ops.kernels.base import backend
from ops.kernels.push.op import push
from ops.kernels.push.reference import ALIGN
from ops.shards import shard_bounds
from ops.update.flat_vector import slots
from ops.update.peer_sum import PeerSum

RANKS, BLOCKS = 4, 5


def integers(rank: int, device: str, dtype: torch.dtype) -> Tensor:
    """Whole numbers that bf16 holds, and whose sum fp32 holds, in any order."""
    return ((torch.arange(BLOCKS * ALIGN, device=device) * (rank + 3)) % 127 - 60).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("programs", [1, 3, 16])
def test_memory_gets_the_exact_sum_of_all_pushes(device: str, dtype: torch.dtype, programs: int) -> None:
    """What lies around it stays what it was; its address need not be one that an allocator gives."""
    memory = torch.full(((BLOCKS + 2) * ALIGN + 4,), -1.0, device=device)
    target = memory[ALIGN + 4 : -ALIGN].zero_()
    for rank in range(RANKS):
        for _ in range(rank + 1):  # uneven passes
            push(integers(rank, device, dtype), target.data_ptr(), programs)
    wanted = torch.stack([(rank + 1) * integers(rank, device, torch.float32) for rank in range(RANKS)]).sum(0)
    assert torch.equal(target, wanted)
    assert (memory[: ALIGN + 4] == -1).all() and (memory[-ALIGN:] == -1).all()


def test_the_library_path_is_the_same_sum(device: str) -> None:
    """The library's is the CPU's alone."""
    found = []
    for choice, where in (("triton", device), ("library", "cpu")):
        target = torch.zeros(BLOCKS * ALIGN, device=where)
        with backend.forced(choice):
            push(integers(1, where, torch.bfloat16), target.data_ptr())
        found.append(target.cpu())
    assert torch.equal(*found)


def test_what_does_not_fit_is_refused(device: str) -> None:
    memory = torch.zeros(2 * ALIGN, device=device)
    with pytest.raises(
        ValueError, match=rf"shape \({ALIGN + 8},\) .* multiple of {ALIGN}\], for a multiple of 16; pad"
    ):
        push(torch.zeros(ALIGN + 8, device=device), memory.data_ptr())
    with pytest.raises(ValueError, match="for a multiple of 16"):
        push(torch.zeros(ALIGN, device=device), memory.data_ptr() + 4)
    with pytest.raises(ValueError, match="must be contiguous"):
        push(torch.zeros(2 * ALIGN, device=device)[::2], memory.data_ptr())


def test_parts_of_a_node_add_up_by_the_kernel(device: str) -> None:
    """Four GPUs' worth of `PeerSum`, whose pushes are the kernel's: pieces, leads and tails land where they belong."""
    sizes, stage = (3, 700, 2 * ALIGN, 1500, 1), 1000
    parameters = [torch.nn.Parameter(torch.zeros(n, device=device)) for n in sizes]
    layout = slots([(str(index), parameter) for index, parameter in enumerate(parameters)])
    total = layout[-1].hi
    bounds = shard_bounds(total, RANKS)

    class Here(NodePeers):
        def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(elements, dtype=dtype, device=self.device)

        def push(self, staged: Tensor, address: int, turn: int) -> None:
            push(staged, address, 2)

    sums = [
        PeerSum(total, torch.float32, torch.bfloat16, Here(device=torch.device(device)), stage) for _ in range(RANKS)
    ]
    for rank, one in enumerate(sums):
        one.reserve(rank, bounds, [()] * RANKS)
    targets = [(*bounds[rank], one.memory.data_ptr()) for rank, one in enumerate(sums)]
    for rank, one in enumerate(sums):
        one._targets = targets
        for slot in layout:
            one.add(slot, integers(rank, device, torch.bfloat16)[: slot.hi - slot.lo])
    found = torch.cat([one.part(*bounds[rank]) for rank, one in enumerate(sums)])
    everyone = torch.stack([integers(rank, device, torch.float32) for rank in range(RANKS)]).sum(0)
    assert torch.equal(found, torch.cat([everyone[:n] for n in sizes]))
