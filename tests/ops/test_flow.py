"""Flow matching: draws belong to samples, densities and schedules are Diffusers' and the paper's, losses add up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ltx.pipeline_ltx import calculate_shift
from diffusers.training_utils import compute_density_for_timestep_sampling

from ops.config import FlowConfig, TokenShift
from ops.flow import density, draw_sigma, flow_loss, generator, shift, sigma_schedule
from ops.packing import Layout, Sequence

torch.set_num_threads(1)
SHAPE = (4, 3, 5, 6)


def test_a_draw_depends_on_seed_step_and_key_alone() -> None:
    first = draw_sigma(FlowConfig(), 7, 3, "shard-1/000042", 64)
    np.random.seed(1)
    torch.manual_seed(1)
    draw_sigma(FlowConfig(), 7, 3, "another", 64)
    assert draw_sigma(FlowConfig(), 7, 3, "shard-1/000042", 64) == first
    for other in ((8, 3, "shard-1/000042"), (7, 4, "shard-1/000042"), (7, 3, "shard-1/000043")):
        assert draw_sigma(FlowConfig(), *other, 64) != first


def test_a_draw_is_the_same_in_every_release() -> None:
    """Resumed runs and mixed pools rely on it; a change of the generator must be a decision."""
    assert draw_sigma(FlowConfig(), 0, 0, "key", 1) == pytest.approx(0.905581921671894, abs=1e-12)


@pytest.mark.parametrize("scheme", ["uniform", "logit_normal", "mode"])
def test_density_is_that_of_diffusers(scheme: str) -> None:
    config = FlowConfig(weighting_scheme=scheme, logit_mean=0.3, logit_std=0.8, mode_scale=1.1)
    numbers = generator(0, 0, "key")
    ours = np.sort([density(config, numbers) for _ in range(4000)])
    name = "none" if scheme == "uniform" else scheme
    theirs = np.sort(
        compute_density_for_timestep_sampling(
            name, 4000, 0.3, 0.8, 1.1, generator=torch.Generator().manual_seed(0)
        ).numpy()
    )
    assert np.abs(ours - theirs).max() < 0.1 and np.abs(ours - theirs).mean() < 0.02  # the same quantiles
    assert ours[0] >= 0 and ours[-1] <= 1


def test_schedule_is_that_of_diffusers() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=[1 - index / 8 for index in range(8)])
    torch.testing.assert_close(torch.tensor(sigma_schedule(8, 3.0)), scheduler.sigmas, atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match="0 sampling steps"):
        sigma_schedule(0, 3.0)


def test_shift_keeps_the_ends_and_moves_the_middle_to_noise() -> None:
    assert (shift(0.0, 5.0), shift(1.0, 5.0), shift(0.5, 1.0)) == (0.0, 1.0, 0.5)
    assert shift(0.5, 3.0) == 0.75


@pytest.mark.parametrize("degree", [1, 3])
def test_loss_parts_of_ranks_add_up_to_the_weighted_mean(degree: int) -> None:
    sequences = [Sequence((2, 3, 4), 1), Sequence((1, 1, 2), 1)]
    predictions, targets = ([torch.randn(s.tokens, 5, dtype=torch.float64) for s in sequences] for _ in range(2))
    weights = torch.tensor([0.25, 0.5], dtype=torch.float64)
    layouts = [Layout(sequences, degree, rank) for rank in range(degree)]
    parts = [flow_loss(layout.local(predictions), layout.local(targets), layout, weights) for layout in layouts]
    expected = sum(w * (p - t).square().mean() for w, p, t in zip(weights, predictions, targets))
    torch.testing.assert_close(sum(parts), expected, atol=1e-12, rtol=1e-12)


def test_loss_without_rows_is_a_zero_that_backward_accepts() -> None:
    layout = Layout([Sequence((1, 1, 1), 1)], 2, 1)
    prediction = torch.zeros(0, 4, requires_grad=True)
    loss = flow_loss(prediction, torch.zeros(0, 4), layout, torch.ones(1))
    loss.backward()
    assert loss == 0 and prediction.grad.shape == (0, 4)


def test_half_precision_is_summed_in_fp32() -> None:
    layout = Layout([Sequence((8, 16, 16), 1)])
    prediction = torch.full((2048, 16), 0.1, dtype=torch.bfloat16)
    loss = flow_loss(prediction, torch.zeros(2048, 16), layout, torch.ones(1))
    torch.testing.assert_close(loss, prediction[0, 0].float().square(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("tokens", [16, 256, 1000, 4096, 20000])
def test_a_shift_by_tokens_is_that_of_the_pipelines(tokens: int) -> None:
    """LTXPipeline gives its scheduler mu of the number of tokens, on a line from 0.95 to 2.05."""
    line = TokenShift(base_tokens=1024, max_tokens=4096, base=0.95, max=2.05)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    mu = calculate_shift(tokens, 1024, 4096, 0.95, 2.05)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / 6, 6), mu=mu)
    np.testing.assert_allclose(scheduler.sigmas.numpy(), sigma_schedule(6, line.at(tokens)), atol=1e-6)


def test_a_drawn_sigma_moves_with_the_tokens_of_its_clip() -> None:
    config = FlowConfig(token_shift=TokenShift())
    plain = draw_sigma(FlowConfig(flow_shift=1.0), 0, 0, "a", 4096)
    assert draw_sigma(config, 0, 0, "a", 4096) == pytest.approx(shift(plain, math.exp(1.15)))
    assert draw_sigma(config, 0, 0, "a", 256) == pytest.approx(shift(plain, math.exp(0.5)))
    with pytest.raises(ValueError, match="max_tokens 4 must be more than base_tokens 256"):
        TokenShift(max_tokens=4)


def test_two_experts_share_the_density_of_one_transformer() -> None:
    """The level of a key lies in the expert's interval, and is that of one transformer where that lies there."""
    config = FlowConfig(flow_shift=5.0)
    levels = {
        part: [draw_sigma(config, 0, 0, str(key), 1, part) for key in range(400)]
        for part in ((0.0, 1.0), (0.875, 1.0), (0.0, 0.875))
    }
    whole, high, low = levels.values()
    assert min(high) >= 0.875 > max(low)
    assert all(one in (h, l) for one, h, l in zip(whole, high, low))
    above = np.array([one for one in whole if one >= 0.875])
    assert np.mean(high) == pytest.approx(above.mean(), abs=0.01)


def test_noise_levels_that_never_come_are_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"none of 10000 noise levels .* lay in \[0.9, 1\)"):
        draw_sigma(FlowConfig(logit_mean=-20.0, logit_std=0.0), 0, 0, "a", 1, (0.9, 1.0))
