"""Units of any shape, dealt over a bag: every rank that asks has all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.comm import Group
from ops.units import share_units
from tests.ops.conftest import RunRanks

SHAPES = ((2, 3), (0, 3), (1, 2, 1, 4), (5,), (0, 3))


@pytest.mark.parametrize("only", [None, 0])
@pytest.mark.parametrize("size", [2, 3])
def test_units_of_any_shape_are_shared_also_empty_ones(size: int, only: int | None, run_ranks: RunRanks) -> None:
    """A caption may be no text at all: [0, width]."""
    units = [torch.arange(torch.Size(shape).numel()).float().view(shape) + u for u, shape in enumerate(SHAPES)]

    def work(group: Group) -> dict[int, Tensor]:
        mine = {u: unit for u, unit in enumerate(units) if u % group.size == group.rank}
        return share_units(mine, len(units), group, torch.device("cpu"), only)

    for rank, found in enumerate(run_ranks(size, work)):
        whole = only in (None, rank)
        assert sorted(found) == [u for u in range(len(units)) if whole or u % size == rank]
        assert all(torch.equal(found[u], units[u]) for u in found)
