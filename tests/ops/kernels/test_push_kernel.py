"""The push of a gradient into the accumulators of a node's GPUs: exact, each piece where it belongs."""

import pytest
import torch
from torch import Tensor

from ops.kernels.base import backend
from ops.kernels.push.function import ALIGN, Push

OWNERS, BLOCKS = 4, 5


def integers(rank: int, device: str, dtype: torch.dtype) -> Tensor:
    """Whole numbers that bf16 holds, and whose sum fp32 holds, in any order."""
    return ((torch.arange(OWNERS * BLOCKS * ALIGN, device=device) * (rank + 3)) % 127 - 60).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("programs", [1, 3, 16])
def test_four_owners_get_the_exact_sum_of_all_pushes(device: str, dtype: torch.dtype, programs: int) -> None:
    """Accumulators lie apart, and what lies around them stays what it was."""
    memory = torch.full((OWNERS, (BLOCKS + 2) * ALIGN), -1.0, device=device)
    accumulators = [row[ALIGN:-ALIGN].zero_() for row in memory]
    for rank in range(OWNERS):
        push = Push(accumulators, rank, programs)
        for _ in range(rank + 1):  # uneven passes
            push(integers(rank, device, dtype))
    wanted = torch.stack([(rank + 1) * integers(rank, device, torch.float32) for rank in range(OWNERS)]).sum(0)
    assert torch.equal(torch.cat(accumulators), wanted)
    assert (memory[:, :ALIGN] == -1).all() and (memory[:, -ALIGN:] == -1).all()


def test_the_library_path_is_the_same_sum(device: str) -> None:
    found = []
    for choice in ("triton", "library"):
        accumulators = [torch.zeros(BLOCKS * ALIGN, device=device) for _ in range(OWNERS)]
        with backend.forced(choice):
            Push(accumulators, 2)(integers(1, device, torch.bfloat16))
        found.append(torch.cat(accumulators))
    assert torch.equal(*found)


def test_what_does_not_fit_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="contiguous fp32 of one length"):
        Push([torch.zeros(ALIGN, device=device), torch.zeros(2 * ALIGN, device=device)], 0)
    with pytest.raises(ValueError, match=f"a piece of {ALIGN + 8} elements must be a multiple of {ALIGN}; pad it"):
        Push([torch.zeros(ALIGN + 8, device=device)], 0)
    with pytest.raises(ValueError, match=rf"\(7,\) must be contiguous, \[1 pieces of {ALIGN}\]"):
        Push([torch.zeros(ALIGN, device=device)], 0)(torch.zeros(7, device=device))
