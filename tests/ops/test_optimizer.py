"""Schedule, clipping, AdamW on ranges and the arithmetic of ranges, each against a plain reference."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.config import OptimizerConfig
from ops.shards import ShardState, cut, missing, shard_bounds
from ops.update.optimizer import adamw_, clip_factor, ema_decay_at, gradient_scale, lr_at

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-13}


def rates(steps: list[int], total: int = 110, **settings: object) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, **settings)  # type: ignore[arg-type]
    return [lr_at(config, step, total) for step in steps]


def test_warm_up_is_linear_and_ends_at_the_learning_rate() -> None:
    assert rates([0, 1, 4, 9, 10, 99], lr_warmup_steps=10) == pytest.approx([0.1, 0.2, 0.5, 1.0, 1.0, 1.0])


def test_cosine_and_linear_decay_reach_the_minimum_at_the_end_and_stay() -> None:
    steps = [10, 35, 60, 85, 110, 500]
    cosine = rates(steps, lr_warmup_steps=10, lr_scheduler="cosine", lr_min_ratio=0.2)
    assert cosine == pytest.approx([1.0, 0.2 + 0.8 * 0.8535534, 0.6, 0.2 + 0.8 * 0.1464466, 0.2, 0.2])
    linear = rates(steps, lr_warmup_steps=10, lr_scheduler="linear", lr_min_ratio=0.2)
    assert linear == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


@pytest.mark.parametrize(
    "scheduler, halfway", [("linear", [0.8, 0.6, 0.4]), ("cosine", [0.2 + 0.8 * 0.8535534, 0.6, 0.2 + 0.8 * 0.1464466])]
)
def test_a_decay_of_the_last_steps_leaves_the_rate_constant_before_them(scheduler: str, halfway: list[float]) -> None:
    found = rates(
        [5, 10, 69, 70, 80, 90, 100, 110, 500],
        lr_warmup_steps=10,
        lr_scheduler=scheduler,
        lr_decay_steps=40,
        lr_min_ratio=0.2,
    )
    assert found == pytest.approx([0.6, 1.0, 1.0, 1.0, *halfway, 0.2, 0.2])


def test_warm_up_longer_than_the_run_does_not_divide_by_zero() -> None:
    assert rates([0, 5], total=5, lr_warmup_steps=10, lr_scheduler="cosine") == pytest.approx([0.1, 0.6])


def test_ema_decay_warms_up_to_its_value() -> None:
    config = OptimizerConfig(ema_decay=0.9)
    assert [ema_decay_at(config, n) for n in (1, 5, 100)] == pytest.approx([2 / 11, 6 / 15, 0.9])


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_clip_factor_is_that_of_torch(scale: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(50))
    weight.grad = torch.randn(50, generator=torch.Generator().manual_seed(0)) * scale
    before = weight.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_([weight], 1.0).item()
    torch.testing.assert_close(before * clip_factor(norm, 1.0), weight.grad)
    assert clip_factor(norm, 0.0) == 1.0


def test_a_gradient_is_scaled_to_the_mean_of_its_good_samples_and_each_part_clipped_alone() -> None:
    """Two of four samples are good, one of them of the second part; nothing trains the third."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(30, generator=generator, dtype=torch.float64) * size for size in (0.05, 4.0, 1.0)]
    sums = [part.square().sum().item() for part in parts]
    found = gradient_scale(sums, [0.5, 0.25, 0.0], planned_weight=1.0, max_norm=1.0)
    means = [parts[0] / 0.5, parts[1] / 0.25]
    assert found.norm == pytest.approx(torch.linalg.vector_norm(torch.cat(means)).item())
    for part, mean, factor in zip(parts[:2], means, found.factors[:2], strict=True):
        clipped = torch.nn.Parameter(torch.zeros_like(mean))
        clipped.grad = mean.clone()
        torch.nn.utils.clip_grad_norm_([clipped], 1.0)
        assert factor is not None
        torch.testing.assert_close(part * factor, clipped.grad, rtol=1e-5, atol=0.0)
    assert found.factors[2] is None


def test_a_step_without_a_good_sample_has_no_norm() -> None:
    found = gradient_scale([0.0, 0.0], [0.0, 0.0], planned_weight=1.0, max_norm=1.0)
    assert math.isnan(found.norm) and found.factors == (None, None)


@pytest.mark.parametrize("square", [math.inf, math.nan])
def test_a_part_that_is_not_finite_makes_the_norm_not_finite(square: float) -> None:
    assert not math.isfinite(gradient_scale([1.0, square], [1.0, 1.0], planned_weight=1.0, max_norm=1.0).norm)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_updating_range_by_range_equals_torch_adamw_on_the_whole(dtype: torch.dtype, factor: float) -> None:
    config = OptimizerConfig(learning_rate=0.01, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(1000, dtype=dtype, generator=generator))
    optimizer = torch.optim.AdamW(
        [whole], lr=0.01, betas=config.betas, eps=config.adam_eps, weight_decay=0.1, foreach=False
    )
    master = whole.detach().clone()
    exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
    for update in range(1, 6):
        gradient = torch.randn(1000, dtype=dtype, generator=generator)
        whole.grad = gradient * factor
        optimizer.step()
        for lo, hi in ((0, 300), (300, 301), (301, 1000)):
            adamw_(
                config,
                master=master[lo:hi],
                grad=gradient[lo:hi],
                exp_avg=exp_avg[lo:hi],
                exp_avg_sq=exp_avg_sq[lo:hi],
                updates=update,
                lr=0.01,
                factor=factor,
            )
    torch.testing.assert_close(master, whole.detach(), rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(exp_avg_sq, optimizer.state[whole]["exp_avg_sq"], rtol=0, atol=TOLERANCE[dtype])


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_bounds_tile_the_vector_in_order_and_begin_on_cache_lines(total: int, size: int) -> None:
    bounds = shard_bounds(total, size)
    assert len(bounds) == size and bounds[0][0] == 0 and bounds[-1][1] == total
    assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))
    assert all(lo % 16 == 0 or lo == total for lo, _ in bounds)


ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted).map(tuple), max_size=8)


@settings(max_examples=300, deadline=None)
@given(ranges, st.integers(0, 60), st.integers(0, 60))
def test_missing_is_what_no_range_covers(found: list[tuple[int, int]], one: int, other: int) -> None:
    lo, hi = min(one, other), max(one, other)
    covered = {element for a, b in found for element in range(a, b)}
    gaps = missing(found, lo, hi)
    assert [e for a, b in gaps for e in range(a, b)] == [e for e in range(lo, hi) if e not in covered]
    assert all(a < b for a, b in gaps)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.integers(1, 6), st.integers(1, 6))
def test_cutting_again_for_another_number_of_workers_loses_nothing(total: int, before: int, after: int) -> None:
    whole = np.arange(total, dtype=np.float32)
    shards = [
        ShardState(updates=3, lo=lo, hi=hi, total=total, arrays={"master": whole[lo:hi]})
        for lo, hi in shard_bounds(total, before)
    ]
    parts = [cut(shards, lo, hi) for lo, hi in shard_bounds(total, after)]
    np.testing.assert_array_equal(np.concatenate([part.arrays["master"] for part in parts]), whole)
    assert {part.updates for part in parts} == {3}


def test_cut_refuses_gaps_and_shards_of_different_states() -> None:
    def shard(step: int, lo: int, hi: int) -> ShardState:
        return ShardState(updates=step, lo=lo, hi=hi, total=10, arrays={"master": np.zeros(hi - lo, np.float32)})

    with pytest.raises(ValueError, match=r"\[\(4, 6\)\] is in none of the 2 shards"):
        cut([shard(1, 0, 4), shard(1, 6, 10)], 0, 10)
    with pytest.raises(ValueError, match="different states"):
        cut([shard(1, 0, 4), shard(2, 4, 10)], 0, 10)
    with pytest.raises(ValueError, match="no shards"):
        cut([], 0, 10)
    with pytest.raises(ValueError, match="has shape"):
        ShardState(updates=1, lo=0, hi=5, total=10, arrays={"master": np.zeros(4, np.float32)})
