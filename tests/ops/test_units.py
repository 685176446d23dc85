"""Units of any shape, dealt over a bag: every rank that asks has all of them, as they were made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.comm.collectives import Group
from ops.comm.groups import Groups
from ops.comm.units import share_units
from tests.nccl_rules import nccl_rules
from tests.ops.conftest import RunRanks
from tests.ops.test_comm import run_ranks as run_on_groups

SHAPES = ((2, 3), (0, 3), (1, 2, 1, 4), (5,), (0, 3))
CPU = torch.device("cpu")


def made(dtype: torch.dtype) -> list[Tensor]:
    return [(torch.arange(torch.Size(s).numel()).float().view(s) + u).to(dtype) for u, s in enumerate(SHAPES)]


def shared(units: list[Tensor], only: int | None = None) -> Callable[[Group], dict[int, Tensor]]:
    def work(group: Group) -> dict[int, Tensor]:
        mine = {u: unit for u, unit in enumerate(units) if u % group.size == group.rank}
        return share_units(mine, len(units), group, CPU, only)

    return work


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("only", [None, 0, 1])
@pytest.mark.parametrize("size", [2, 3])
def test_units_of_any_shape_are_shared_also_empty_ones(
    size: int, only: int | None, dtype: torch.dtype, run_ranks: RunRanks
) -> None:
    """A caption may be no text at all: [0, width]."""
    units = made(dtype)
    for rank, found in enumerate(run_ranks(size, shared(units, only))):
        whole = only in (None, rank)
        assert sorted(found) == [u for u in range(len(units)) if whole or u % size == rank]
        assert all(torch.equal(found[u], units[u]) and found[u].dtype == dtype for u in found)


def test_units_of_several_dtypes_come_in_fp32(run_ranks: RunRanks) -> None:
    units = [*made(torch.bfloat16)[:3], *made(torch.float32)[3:]]
    for found in run_ranks(2, shared(units)):
        assert all(torch.equal(found[u], unit.float()) for u, unit in enumerate(units))


def test_units_that_are_all_empty_are_shared(run_ranks: RunRanks) -> None:
    found = run_ranks(2, shared([torch.zeros(0, 3), torch.zeros(0, 2), torch.zeros(0, 1)]))
    assert [tuple(unit.shape) for unit in found[1].values()] == [(0, 3), (0, 1), (0, 2)]


@pytest.mark.parametrize("only", [None, 1])
def test_a_unit_is_sent_once_in_the_bytes_that_it_has(
    only: int | None, run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[tuple[str, int]] = []
    begin = Group._begin

    def counted(group: Group, name: str, tensor: Tensor, *rest: Any) -> Any:
        if name != "all_reduce" and group.rank == 1:
            moved.append((name, tensor.nbytes))
        return begin(group, name, tensor, *rest)

    monkeypatch.setattr(Group, "_begin", counted)
    units = made(torch.bfloat16)
    run_ranks(3, shared(units, only))
    total = sum(unit.nbytes for unit in units)
    own = sum(units[u].nbytes for u in (1, 4))
    assert sum(size for _, size in moved) == (total if only is None else total - own)


@pytest.mark.parametrize("only", [None, 2])
def test_sharing_keeps_the_rules_of_nccl(only: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of one length, gathered in place: those of three ranks differ here, and one is empty."""
    units = made(torch.bfloat16)
    found: list[dict[int, Tensor]] = [{}] * 3

    def work(rank: int, groups: Groups) -> None:
        found[rank] = shared(units, only)(groups.world_group())

    with nccl_rules(monkeypatch):
        run_on_groups(3, work)
    for rank in (0, 1, 2) if only is None else (2,):
        assert all(torch.equal(found[rank][u], unit) for u, unit in enumerate(units))
