"""Muon beside PyTorch's own, and where its matrices lie. That it trains as one plain process does: test_sync."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from actors.config import TrainConfig
from app.bench.gpu.counting import STAND_IN, DispatchCounter, as_on_a_gpu
from app.bench.gpu.models import WAN_14B
from ops.comm.collectives import Group
from ops.config import OptimizerConfig
from ops.models.load import build_dit, dit_skeleton
from ops.shards import shard_bounds
from ops.update.flat_vector import slots, trainable
from ops.update.muon import (
    Matrix,
    MatrixUpdates,
    batches_of,
    matrices_of,
    on_a_device,
    orthogonal,
    pieces_of,
    rates_in,
)
from ops.update.optimizer import TrainedRange, lying_in
from ops.update.sync import FlatSync
from tests.families.registry import ONE_EACH, VARIANTS
from tests.nccl_rules import nccl_rules
from tests.ops.placed import placed
from tests.ops.test_sync import (
    FLAT_ONLY,
    SAMPLES,
    START,
    TOTAL_STEPS,
    assert_same_training,
    flat_weights,
    on_threads,
    reference,
    run_flat,
    sample_loss,
    singular_values_near_one,
)

MUON = OptimizerConfig(kind="muon", learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.0, ema_decay=0.0)


@pytest.mark.parametrize("shape", [(9, 9), (5, 13), (13, 5), (1, 7), (7, 1)])
def test_singular_vectors_stay_and_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(orthogonal(matrix), singular_values_near_one(matrix), rtol=0, atol=1e-12)
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert values.max() < 1.21 and values.median() > 0.68


def test_a_matrix_without_a_gradient_stays_zero() -> None:
    assert not orthogonal(torch.zeros(4, 3)).any()


@pytest.mark.parametrize("shape", [(9, 9), (5, 13), (13, 5)])
def test_several_at_once_are_each_as_alone(shape: tuple[int, int]) -> None:
    matrices = torch.randn((6, *shape), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrices[2] = 0.0
    torch.testing.assert_close(orthogonal(matrices), torch.stack([*map(orthogonal, matrices)]), rtol=0, atol=1e-12)


SHAPES = [(4, 6), (6, 4), (4, 6), (3, 3), (4, 6), (6, 4), (4, 6), (4, 6)]  # with ten other elements before each


def matrices_of_shapes() -> list[Matrix]:
    ends = [*itertools.accumulate(10 + rows * columns for rows, columns in SHAPES)]
    return [
        Matrix(lo=end - rows * columns, hi=end, rows=rows, columns=columns)
        for end, (rows, columns) in zip(ends, SHAPES, strict=True)
    ]


def turned(workers: int, at_once: int) -> torch.Tensor:
    """A flat gradient whose matrices this number of workers have made orthogonal."""
    matrices = matrices_of_shapes()
    total = matrices[-1].hi + 5
    flat, bounds = torch.randn(total, generator=torch.Generator().manual_seed(1)), shard_bounds(total, workers)

    def work(rank: int, group: Group) -> torch.Tensor:
        lo, hi = bounds[rank]
        own = flat[lo:hi].clone()
        updates = MatrixUpdates(matrices, own.dtype, own.device, lambda matrix: at_once)
        updates.form(group, bounds)
        updates.run(lambda first, last: own[first - lo : last - lo], [(0, total)])
        return own

    return torch.cat(on_threads(workers, work))


@pytest.mark.parametrize("at_once", [2, 3, 64])
def test_a_matrix_has_the_same_bits_whoever_has_the_others_of_its_batch(at_once: int) -> None:
    """Cut ones, too, which come when whole ones have been computed."""
    whole = turned(1, at_once)
    for workers in (2, 3, 4, 7):
        assert torch.equal(turned(workers, at_once), whole)
    torch.testing.assert_close(whole, turned(1, 1), rtol=0, atol=1e-5)


def test_a_batch_and_the_places_in_it_follow_from_the_model_alone() -> None:
    matrices = matrices_of_shapes()
    found = batches_of(matrices, lambda matrix: 2)
    assert [(found[one][0].size, found[one][1]) for one in matrices] == [
        (2, 0),
        (2, 0),
        (2, 1),
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 1),
        (1, 0),
    ]
    assert len({found[one][0].number for one in matrices}) == 5
    large, small = (Matrix(lo=0, hi=side**2, rows=side, columns=side) for side in (1536, 512))
    assert (on_a_device(large), on_a_device(small)) == (1, 64)


@pytest.mark.parametrize(("home", "waits"), [(STAND_IN, 0), (torch.device("cpu"), 10)], ids=["device", "host"])
def test_factors_of_a_large_model_are_few_launches_and_few_waits(home: torch.device, waits: int) -> None:
    """Those of eight blocks of a 14B model: 22 launches for each of six batches. Before, 22 for each of 160 matrices,
    and two waits where the gradient lies in host memory."""
    model = dit_skeleton(replace(WAN_14B, num_layers=8, lora_rank=32))
    layout = slots(trainable(model))
    matrices = matrices_of(model, layout)
    gradient = torch.zeros(layout[-1].hi, device=home)
    updates = MatrixUpdates(matrices, gradient.dtype, STAND_IN)
    with as_on_a_gpu(), DispatchCounter() as counter:
        updates.run(lambda lo, hi: gradient[lo:hi], [(0, layout[-1].hi)])
    assert len(matrices) == 160 and counter.kernels < 200 and counter.waits <= waits


def test_it_trains_as_pytorchs_own_within_its_bf16() -> None:
    model, other = copy.deepcopy(START).float(), copy.deepcopy(START).float()
    sync = FlatSync(model, MUON, TOTAL_STEPS)
    sync.form(Group.solo(), None)
    matrices = [other.stem.weight, other.left.weight]
    rest = [p for p in other.parameters() if p.requires_grad and not any(p is matrix for matrix in matrices)]
    given = {"lr": MUON.learning_rate, "weight_decay": MUON.weight_decay}
    theirs = (
        torch.optim.Muon(matrices, momentum=0.95, adjust_lr_fn="match_rms_adamw", **given),
        torch.optim.AdamW(rest, betas=MUON.betas, eps=MUON.adam_eps, **given),
    )
    for step in range(6):
        sync.begin_step()
        other.zero_grad()
        for index in range(SAMPLES):  # of one alone gradients have one singular value, beside rounding
            sample_loss(model, index, step).backward()
            sample_loss(other, index, step).backward()
        sync.finish_step(step, 1.0, 1.0, 1.0, lambda phase: None)
        for optimizer in theirs:
            optimizer.step()
    moved = np.abs(flat_weights(model) - flat_weights(START)).max()
    assert moved > 2e-2
    np.testing.assert_allclose(flat_weights(model), flat_weights(other), rtol=0, atol=0.02 * moved)


def test_by_nccls_rules_matrices_that_ranges_cut_travel_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(FLAT_ONLY["Muon, 3 -> 4 -> 2 -> 1 workers"], sizes=(4, 2), bad={})
    with nccl_rules(monkeypatch) as rules:
        found = run_flat(case)
    assert_same_training(found, reference(case), case, 1e-3)
    assert rules.kinds["alltoall_base"] == 2 * case.steps * sum(case.sizes)


def test_the_part_of_an_expert_that_saw_nothing_stays_as_it_is() -> None:
    model = copy.deepcopy(START).float()
    sync = FlatSync(model, MUON, TOTAL_STEPS, parts=("stem", "left", "right"))
    sync.form(Group.solo(), None)
    sync.state.arrays["exp_avg"].fill_(0.1)  # which alone would move it
    sync.begin_step()
    sample_loss(model, 0, 0).backward()
    sync.finish_step(0, 1.0, 1.0, 1.0, lambda phase: None, part_weights=[1.0, 0.0, 1.0])
    first = dict(copy.deepcopy(START).float().named_parameters())
    moved = {name: not torch.equal(now, first[name]) for name, now in trainable(model)}
    assert moved == {name: not name.startswith("left") for name in moved}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Matrix], int]:
    """Matrices with other elements between them, and how many elements there are."""
    matrices, at, side = [], 0, st.integers(1, 12)
    for between, rows, columns in draw(st.lists(st.tuples(st.integers(0, 40), side, side), min_size=1)):
        at += between
        matrices.append(Matrix(lo=at, hi=at + rows * columns, rows=rows, columns=columns))
        at += rows * columns
    return matrices, at + draw(st.integers(0, 40))


class _EmptyOps(TorchDispatchMode):
    """Counts the ops that change nothing, of tensors without an element."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # PyTorch's
        self.found += not func.is_view and isinstance(args[0], torch.Tensor) and not args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_piece_of_the_state_handles_the_matrices_that_lie_in_it_alone(dtype: torch.dtype) -> None:
    """Pieces of 13 elements each, of matrices that one bucket has together."""
    model = copy.deepcopy(START).to(dtype)
    sync = FlatSync(model, MUON, TOTAL_STEPS, places=placed(state="host"), update_elements=13)
    sync.form(Group.solo(), None)
    sync.begin_step()
    sample_loss(model, 0, 0).backward()
    with _EmptyOps() as empty:
        sync.finish_step(0, 1.0, 1.0, 1.0, lambda phase: None)
    assert empty.found == 0
    assert not np.array_equal(flat_weights(model), flat_weights(START))


@given(layouts(), st.data())
def test_what_lies_in_a_piece_is_what_overlaps_it(layout: tuple[list[Matrix], int], data: st.DataObject) -> None:
    matrices, total = layout
    trained = [
        TrainedRange(lo=lo, hi=hi, factor=1.0, updates=1, rate=rate) for lo, hi, rate in rates_in(matrices, 0, total)
    ]
    first = data.draw(st.integers(0, total))
    last = data.draw(st.integers(first + 1, total + 1))
    plain = [one for one in trained if max(one.lo, first) < min(one.hi, last)]
    assert [*lying_in(trained, first, last)] == plain


@pytest.mark.parametrize("name", ONE_EACH)
def test_of_every_family_linear_layers_of_blocks_are_its_matrices(name: str) -> None:
    model = build_dit(VARIANTS[name], seed=0)
    layout = slots(trainable(model))
    los = {matrix.lo for matrix in matrices_of(model, layout)}
    for slot in layout:
        module, _, kind = slot.name.rpartition(".")
        is_linear = isinstance(model.get_submodule(module), nn.Linear) and kind == "weight"
        in_a_block = any(slot.name.startswith(block) for block in _blocks(model))
        assert (slot.lo in los) == (is_linear and in_a_block), slot.name


def _blocks(model: nn.Module) -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    return [f"{names[id(block)]}." for block in model.all_blocks()]


def test_of_lora_both_factors_are_matrices() -> None:
    model = build_dit(replace(VARIANTS["wan"], lora_rank=4), seed=0)
    layout = slots(trainable(model))
    assert [(matrix.lo, matrix.hi) for matrix in matrices_of(model, layout)] == [(slot.lo, slot.hi) for slot in layout]


def test_of_two_experts_both_have_their_matrices() -> None:
    config = replace(VARIANTS["wan"], expert="both", boundary=0.7)
    los = {}
    for name, one in (("pair", config), ("alone", config.experts[0])):
        model = dit_skeleton(one)
        layout = slots(trainable(model))
        names = {slot.lo: slot.name for slot in layout}
        los[name] = [names[matrix.lo] for matrix in matrices_of(model, layout)]
    assert los["pair"] == [f"{expert}.{name}" for expert in ("high", "low") for name in los["alone"]]


def test_without_a_matrix_in_blocks_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"none is trained here\. Set it to adamw"):
        FlatSync(nn.Linear(3, 3), MUON, TOTAL_STEPS)


def test_deepspeed_which_cuts_matrices_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train.optimizer.kind muon needs whole\. Set kind to adamw, or"):
        TrainConfig(sync="deepspeed", optimizer=MUON)


@given(layouts(), st.data())
def test_every_element_has_the_rate_of_its_matrix(layout: tuple[list[Matrix], int], data: st.DataObject) -> None:
    matrices, total = layout
    lo = data.draw(st.integers(0, total))
    hi = data.draw(st.integers(lo, total))
    plain = np.zeros(total)
    for matrix in matrices:
        plain[matrix.lo : matrix.hi] = 0.2 * max(matrix.rows, matrix.columns) ** 0.5
    found = np.full(total, np.nan)
    pieces = list(rates_in(matrices, lo, hi))
    for begin, end, rate in pieces:
        assert begin < end
        found[begin:end] = rate
    np.testing.assert_allclose(found[lo:hi], plain[lo:hi])
    assert [begin for begin, _, _ in pieces[1:]] == [end for _, end, _ in pieces[:-1]]
    assert sum(end - begin for begin, end, _ in pieces) == hi - lo
    assert all(one[2] != other[2] for one, other in itertools.pairwise(pieces)), "launches are few"


@given(layouts(), st.integers(1, 9))
def test_pieces_of_a_matrix_are_all_of_it_and_go_to_who_has_most(layout: tuple[list[Matrix], int], size: int) -> None:
    matrices, total = layout
    bounds = shard_bounds(total, size)
    for matrix in matrices:
        pieces = pieces_of(matrix, bounds)
        assert pieces[0].lo == matrix.lo and pieces[-1].hi == matrix.hi
        assert all(one.hi == other.lo for one, other in itertools.pairwise(pieces))
        assert all(bounds[one.rank][0] <= one.lo < one.hi <= bounds[one.rank][1] for one in pieces)
        (owner,) = {one.owner for one in pieces}
        assert max(len(one) for one in pieces) == next(len(one) for one in pieces if one.rank == owner)
