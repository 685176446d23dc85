"""Objectives: levels that belong to samples, what is mixed and predicted, and DDIM's steps, against Diffusers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, DDIMScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling

from ops.config import Diffusion, FlowConfig, PictureNoise, TokenShift
from ops.flow.objective import (
    CutDensity,
    DiffusionObjective,
    FlowObjective,
    ddim_steps,
    density,
    draw_expert,
    draw_first_sigma,
    draw_frame_sigmas,
    draw_picture_sigma,
    draw_sigma,
    generator,
    is_first_frame_given,
    level_at,
    objective_of,
    place_of,
    shift,
    signal_shares,
)

SHAPE = (2, 3, 4, 4)
FP32 = {"atol": 1e-5, "rtol": 1e-5}  # of products that are rounded in another order


def scheduler(snr_shift: float) -> CogVideoXDDIMScheduler:
    return CogVideoXDDIMScheduler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=snr_shift,
        timestep_spacing="trailing",
        clip_sample=False,
    )


def test_the_flow_reaches_data_and_noise() -> None:
    flow, clean, noise = FlowObjective(FlowConfig()), torch.randn(SHAPE), torch.randn(SHAPE)
    assert torch.equal(flow.noisy(0.0, clean, noise), clean)
    assert torch.equal(flow.noisy(1.0, clean, noise), noise)
    recovered = flow.noisy(0.3, clean, noise) - 0.3 * flow.target(0.3, clean, noise)
    torch.testing.assert_close(recovered, clean, atol=1e-6, rtol=1e-5)
    assert flow.times(torch.tensor([0.25])).tolist() == [250.0]


def test_the_noise_of_first_frames_is_below_that_of_their_clips_and_cut() -> None:
    flow = FlowObjective(FlowConfig(first_frame=0.1, first_frame_noise=0.25))
    drawn = [flow.draw_first(0, step, "clip", 0.8) for step in range(2000)]
    assert np.mean([level == 0.25 for level in drawn]) == pytest.approx(1 - 0.25 / 0.8, abs=0.04)
    below = [level for level in drawn if level < 0.25]
    assert np.mean(below) == pytest.approx(0.125, abs=0.01) and min(below) < 0.01
    assert all(flow.draw_first(0, step, "clip", 0.1) < 0.1 for step in range(50))
    assert drawn[7] == flow.draw_first(0, 7, "clip", 0.8) != flow.draw_first(0, 7, "other", 0.8)
    assert FlowObjective(FlowConfig(first_frame=0.1)).draw_first(0, 1, "clip", 0.8) == 0.0


PERCENTS = np.arange(1, 100) / 100
DENSITIES = {
    "uniform": FlowConfig(weighting_scheme="uniform", flow_shift=1.0),
    "logit_normal": FlowConfig(logit_mean=0.3, logit_std=0.8, flow_shift=3.0),
    "mode": FlowConfig(weighting_scheme="mode", mode_scale=1.1, flow_shift=2.0),
}


@pytest.mark.parametrize("scheme", DENSITIES)
def test_a_level_of_each_frame_has_the_density_of_one_for_all(scheme: str) -> None:
    flow = replace(DENSITIES[scheme], frame_levels="independent")
    drawn = np.array([draw_frame_sigmas(flow, 0, step, "clip", 1, 5) for step in range(1500)])
    one = [draw_sigma(flow, 0, step, "clip", 1) for step in range(7500)]
    assert np.abs(np.quantile(drawn, PERCENTS) - np.quantile(one, PERCENTS)).max() < 0.04
    assert np.abs(np.corrcoef(drawn.T) - np.eye(5)).max() < 0.1
    assert draw_frame_sigmas(flow, 0, 7, "clip", 1, 5) == drawn[7].tolist()
    assert draw_frame_sigmas(flow, 0, 7, "other", 1, 5) != drawn[7].tolist()


def rising_times(numbers: np.random.Generator, frames: int, times: int) -> list[int]:
    """FoPP of AR-Diffusion by its own counts of sequences: a frame and its time evenly, then frame by frame each time
    as likely as there are non-decreasing sequences through it."""
    ending = np.ones((frames, times))  # sequences of the frames up to this one, which has this time
    for frame in range(1, frames):
        ending[frame] = np.cumsum(ending[frame - 1])
    starting = ending[::-1, ::-1]
    found, chosen = [0] * frames, int(numbers.integers(frames))
    found[chosen] = int(numbers.integers(times))
    for frame in range(chosen - 1, -1, -1):
        weights = ending[frame, : found[frame + 1] + 1]
        found[frame] = int(numbers.choice(len(weights), p=weights / weights.sum()))
    for frame in range(chosen + 1, frames):
        weights = starting[frame, found[frame - 1] :]
        found[frame] = found[frame - 1] + int(numbers.choice(len(weights), p=weights / weights.sum()))
    return found


def test_rising_levels_are_those_of_ar_diffusion() -> None:
    """Each frame's levels, and how they go together."""
    flow = replace(DENSITIES["uniform"], frame_levels="rising")
    drawn = np.array([draw_frame_sigmas(flow, 0, step, "clip", 1, 4) for step in range(4000)])
    numbers, times = np.random.default_rng(0), 400
    theirs = (np.array([rising_times(numbers, 4, times) for _ in range(4000)]) + 0.5) / times
    assert (np.diff(drawn, axis=1) >= 0).all()
    assert np.abs(np.quantile(drawn, PERCENTS, axis=0) - np.quantile(theirs, PERCENTS, axis=0)).max() < 0.05
    assert np.abs(np.corrcoef(drawn.T) - np.corrcoef(theirs.T)).max() < 0.05


@pytest.mark.parametrize("scheme", DENSITIES)
def test_a_picture_has_a_level_of_the_density_where_levels_rise(scheme: str) -> None:
    flow = replace(DENSITIES[scheme], frame_levels="rising")
    drawn = [draw_frame_sigmas(flow, 0, step, "clip", 1, 1)[0] for step in range(4000)]
    one = [draw_sigma(flow, 0, step, "clip", 1) for step in range(4000)]
    assert np.abs(np.quantile(drawn, PERCENTS) - np.quantile(one, PERCENTS)).max() < 0.05


def test_levels_of_noise_on_pictures_are_exp_of_normal_numbers() -> None:
    drawn = np.array([draw_picture_sigma(PictureNoise(), 0, step, "clip") for step in range(4000)])
    assert np.log(drawn).mean() == pytest.approx(-3, abs=0.03) and np.log(drawn).std() == pytest.approx(0.5, abs=0.02)
    assert drawn[7] == draw_picture_sigma(PictureNoise(), 0, 7, "clip") != draw_picture_sigma(PictureNoise(), 0, 7, "a")
    assert draw_picture_sigma(PictureNoise(mean=-1, std=0), 0, 0, "clip") == pytest.approx(np.exp(-1))


def test_noise_for_first_frames_that_are_never_given_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.flow\.first_frame_noise is 0\.2, and no first frame is given"):
        FlowConfig(first_frame_noise=0.2)


@pytest.mark.parametrize("snr_shift", [1.0, 3.0])
@pytest.mark.parametrize("time", [0, 500, 999])
def test_diffusion_is_mixed_as_diffusers_does(time: int, snr_shift: float) -> None:
    diffusion = Diffusion(snr_shift=snr_shift)
    velocity, clean, noise = DiffusionObjective(diffusion), torch.randn(SHAPE), torch.randn(SHAPE)
    theirs, times = scheduler(snr_shift), torch.tensor([time])
    expected = theirs.add_noise(clean, noise, times)
    torch.testing.assert_close(velocity.noisy(time, clean, noise), expected, **FP32)
    expected = theirs.get_velocity(clean, noise, times)
    torch.testing.assert_close(velocity.target(time, clean, noise), expected, **FP32)
    assert signal_shares(diffusion)[999] == 0.0
    assert velocity.times(torch.tensor([float(time)])).tolist() == [time]


@pytest.mark.parametrize("count", [1, 3, 50])
def test_ddim_takes_the_steps_of_diffusers(count: int) -> None:
    theirs, x = scheduler(3.0), torch.randn(SHAPE, dtype=torch.float64)
    theirs.set_timesteps(count)
    steps, ours = ddim_steps(count, Diffusion(snr_shift=3.0)), x.clone()
    assert [step.time for step in steps] == theirs.timesteps.tolist()
    for step in steps:
        prediction = torch.randn(SHAPE, dtype=torch.float64)
        x = theirs.step(prediction, step.time, x, return_dict=False)[0]
        ours = step.keep * ours + step.move * prediction
    torch.testing.assert_close(ours, x, atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match="1001 sampling steps"):
        ddim_steps(1001, Diffusion())


def test_ddim_takes_as_many_steps_as_it_is_told_at_falling_times() -> None:
    """Diffusers makes 62 of 61 steps, the last at the time -1, by which the clip is noise again; so of others."""
    for count in range(1, 1001):
        times = [step.time for step in ddim_steps(count, Diffusion())]
        assert len(times) == count and times == sorted(set(times), reverse=True) and times[-1] >= 0


@pytest.mark.parametrize("count", [1, 3, 50])
def test_predicted_noise_is_mixed_and_taken_away_as_diffusers_does(count: int) -> None:
    diffusion = Diffusion(predicts="noise")
    objective, clean, noise = DiffusionObjective(diffusion), torch.randn(SHAPE), torch.randn(SHAPE)
    theirs = DDIMScheduler(
        beta_schedule="linear", beta_start=1e-4, beta_end=0.02, timestep_spacing="trailing", clip_sample=False
    )
    for time in (0, 500, 999):
        expected = theirs.add_noise(clean, noise, torch.tensor([time]))
        torch.testing.assert_close(objective.noisy(time, clean, noise), expected, atol=1e-5, rtol=0)
        assert objective.target(time, clean, noise) is noise
    theirs.set_timesteps(count)
    x = ours = torch.randn(SHAPE, dtype=torch.float64)
    steps = ddim_steps(count, diffusion)
    assert [step.time for step in steps] == theirs.timesteps.tolist()
    for step in steps:
        prediction = torch.randn(SHAPE, dtype=torch.float64)
        x = theirs.step(prediction, step.time, x, return_dict=False)[0]
        ours = step.keep * ours + step.move * prediction
    # their shares are products in fp32; the last one, 4e-5, divides x
    torch.testing.assert_close(ours, x, atol=1e-4 * float(x.abs().max()), rtol=0)


def test_times_of_diffusion_are_drawn_evenly_and_by_the_sample_alone() -> None:
    objective = objective_of(Diffusion(), FlowConfig())
    drawn = [objective.draw(0, 0, str(key), 10, (0.0, 1.0)) for key in range(4000)]
    assert all(0 <= time < 1000 and time == int(time) for time in drawn)
    shares = torch.histc(torch.tensor(drawn), bins=10, min=0, max=1000) / 4000
    assert (shares - 0.1).abs().max() < 0.02
    assert drawn[7] == objective.draw(0, 0, "7", 99, (0.0, 1.0)) != objective.draw(1, 0, "7", 10, (0.0, 1.0))
    assert isinstance(objective_of(None, FlowConfig()), FlowObjective)


# Noise levels ---------------------------------------------------------------------------------------------------------


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


def test_every_other_draw_is_the_same_in_every_release() -> None:
    given = FlowConfig(first_frame=0.5, first_frame_noise=0.9)
    assert [is_first_frame_given(given, 0, step, "key") for step in range(6)] == [True, True, False, False, True, False]
    assert draw_first_sigma(given, 0, 0, "key", 0.8) == pytest.approx(0.4501688830319133, abs=1e-12)
    levels = {
        "independent": [0.633456862366335, 0.37357726711264455],
        "rising": [0.6346529313774619, 0.658952663132829],
    }
    for kind, expected in levels.items():
        assert draw_frame_sigmas(FlowConfig(frame_levels=kind), 0, 0, "key", 1, 2) == pytest.approx(expected, abs=1e-12)
    assert draw_picture_sigma(PictureNoise(), 0, 0, "key") == pytest.approx(0.047469926650842924, abs=1e-12)
    experts = [(0.875, 1.0), (0.0, 0.875)]
    drawn = [draw_expert(FlowConfig(flow_shift=5.0), 0, step, "s0.0", 1, experts) for step in range(8)]
    assert drawn == [0, 1, 0, 0, 0, 0, 1, 0]


def test_what_is_drawn_for_a_clip_beside_its_level_does_not_depend_on_the_level() -> None:
    """All are uniform numbers of one clip in one step: of one stream they would go together."""
    flow = FlowConfig(weighting_scheme="uniform", flow_shift=1.0, first_frame=0.5, first_frame_noise=1.0)
    experts, steps = [(0.5, 1.0), (0.0, 0.5)], range(2000)
    drawn = np.array(
        [
            [
                draw_sigma(flow, 0, step, "clip", 1),
                is_first_frame_given(flow, 0, step, "clip"),
                draw_first_sigma(flow, 0, step, "clip", 1.0),
                draw_frame_sigmas(flow, 0, step, "clip", 1, 1)[0],
                draw_expert(flow, 0, step, "clip", 1, experts),
                draw_picture_sigma(PictureNoise(), 0, step, "clip"),
            ]
            for step in steps
        ]
    )
    assert np.abs(np.corrcoef(drawn.T) - np.eye(6)).max() < 0.1


def test_other_seeds_draw_other_levels_frames_and_noise() -> None:
    flow = FlowConfig(first_frame=0.5, first_frame_noise=1.0)

    def drawn(seed: int) -> list[list[object]]:
        steps = range(16)
        return [
            [is_first_frame_given(flow, seed, step, "a") for step in steps],
            [draw_first_sigma(flow, seed, step, "a", 1.0) for step in steps],
            [draw_frame_sigmas(flow, seed, step, "a", 1, 3) for step in steps],
            [draw_picture_sigma(PictureNoise(), seed, step, "a") for step in steps],
            [draw_expert(flow, seed, step, "a", 1, [(0.5, 1.0), (0.0, 0.5)]) for step in steps],
        ]

    assert all(one != other for one, other in zip(drawn(0), drawn(1), strict=True))


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


def test_shift_keeps_the_ends_and_moves_the_middle_to_noise() -> None:
    assert (shift(0.0, 5.0), shift(1.0, 5.0), shift(0.5, 1.0)) == (0.0, 1.0, 0.5)
    assert shift(0.5, 3.0) == 0.75


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


# Levels that are cut --------------------------------------------------------------------------------------------------

DRAWS = 1500
KS = 1.95 / math.sqrt(DRAWS)  # distance from its distribution that 1 of 1000 samples of DRAWS exceeds
CUTS = [(0.0, 1.0), (0.5, 0.9), (0.875, 1.0), (0.0, 0.3)]


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Distance of two empirical distributions (Kolmogorov, Smirnov), of which `theirs` is the larger sample."""
    both = np.sort(np.concatenate([ours, theirs]))
    shares = [np.searchsorted(np.sort(one), both, side="right") / len(one) for one in (ours, theirs)]
    return float(np.abs(shares[0] - shares[1]).max())


@lru_cache
def whole_density(flow: FlowConfig, tokens: int, count: int = 100_000) -> np.ndarray:
    """Levels without a cut, by Diffusers' density and the published shift."""
    name = "none" if flow.weighting_scheme == "uniform" else flow.weighting_scheme
    numbers = torch.Generator().manual_seed(1)
    unshifted = compute_density_for_timestep_sampling(
        name, count, flow.logit_mean, flow.logit_std, flow.mode_scale, generator=numbers
    ).numpy()
    s = flow.shift_at(tokens)
    return s * unshifted / (1 + (s - 1) * unshifted)


def cut_at(flow: FlowConfig, low: float, high: float) -> FlowConfig:
    return replace(flow, min_timestep=1000 * low, max_timestep=1000 * high)


@pytest.mark.parametrize("scheme", DENSITIES)
@pytest.mark.parametrize(("low", "high"), CUTS)
def test_cut_levels_have_the_form_of_the_whole_density(scheme: str, low: float, high: float) -> None:
    """As if all draws outside had been refused: with the constant shift and with one by tokens."""
    for flow in (DENSITIES[scheme], replace(DENSITIES[scheme], token_shift=TokenShift())):
        whole = whole_density(flow, 2000)
        inside = whole[(whole >= low) & (whole <= high)]
        drawn = np.array([draw_sigma(cut_at(flow, low, high), 0, step, "clip", 2000) for step in range(DRAWS)])
        assert low <= drawn.min() and drawn.max() <= high
        assert distance(drawn, inside) < KS * (1 + DRAWS / len(inside)) ** 0.5


def test_times_are_those_of_the_transformer() -> None:
    """min_timestep 250 of 1000 and 2 of 8 are the same level."""
    eight = FlowConfig(num_train_timesteps=8, min_timestep=2, max_timestep=4)
    assert eight.levels == (0.25, 0.5) == cut_at(FlowConfig(), 0.25, 0.5).levels
    assert draw_sigma(eight, 0, 3, "a", 1) == draw_sigma(cut_at(FlowConfig(), 0.25, 0.5), 0, 3, "a", 1)
    assert FlowConfig(min_timestep=250).levels == (0.25, 1.0) and FlowConfig().levels == (0.0, 1.0)


@pytest.mark.parametrize("frame_levels", ["independent", "rising"])
def test_levels_of_frames_are_cut_alike(frame_levels: str) -> None:
    flow = replace(DENSITIES["logit_normal"], frame_levels=frame_levels)
    cut = cut_at(flow, 0.5, 0.9)
    drawn = np.array([draw_frame_sigmas(cut, 0, step, "clip", 1, 3) for step in range(DRAWS)])
    assert drawn.min() >= 0.5 and drawn.max() <= 0.9
    places = np.array(
        [[CutDensity.of(cut, 3.0).level_at(place) for place in row] for row in np.linspace(0, 1, 30).reshape(3, 10)]
    )
    assert (np.diff(places.ravel()) > 0).all()
    if frame_levels == "rising":
        assert (np.diff(drawn, axis=1) >= 0).all()
        one = np.array([draw_frame_sigmas(cut, 0, step, "clip", 1, 1)[0] for step in range(DRAWS)])
    else:
        one = drawn.ravel()
    whole = whole_density(flow, 1)
    assert distance(one, whole[(whole >= 0.5) & (whole <= 0.9)]) < KS * 1.05
    assert draw_frame_sigmas(cut_at(flow, 0.0, 1.0), 0, 5, "a", 1, 3) == draw_frame_sigmas(flow, 0, 5, "a", 1, 3)


def test_experts_share_what_is_left_of_the_density() -> None:
    """Which expert an item falls to, and the levels of its clips within it, make up the density that is cut."""
    flow, experts = cut_at(FlowConfig(flow_shift=5.0), 0.6, 0.95), [(0.875, 1.0), (0.0, 0.875)]
    drawn = []
    for step in range(DRAWS):
        expert = draw_expert(flow, 0, step, "item", 1, experts)
        low, high = experts[expert]
        drawn.append(draw_sigma(flow, 0, step, "clip", 1, experts[expert]))
        assert low <= drawn[-1] <= high and 0.6 <= drawn[-1] <= 0.95
    whole = whole_density(flow, 1)
    assert distance(np.array(drawn), whole[(whole >= 0.6) & (whole <= 0.95)]) < KS * 1.05
    at_boundary = cut_at(flow, 0.6, 0.875)
    assert {draw_expert(at_boundary, 0, step, "item", 1, experts) for step in range(500)} == {1}


def test_a_narrow_cut_far_out_is_drawn_at_once() -> None:
    """None of 10,000 draws would lie there."""
    flow = cut_at(FlowConfig(flow_shift=1.0), 0.995, 0.999)
    drawn = [draw_sigma(flow, 0, step, "clip", 1) for step in range(500)]
    assert min(drawn) >= 0.995 and max(drawn) < 0.999 and len(set(drawn)) == 500


@pytest.mark.parametrize("scheme", DENSITIES)
def test_a_place_is_that_of_its_level(scheme: str) -> None:
    for sigma in (0.01, 0.3, 0.5, 0.77, 0.99):
        assert level_at(DENSITIES[scheme], place_of(DENSITIES[scheme], sigma)) == pytest.approx(sigma, abs=1e-9)


def test_levels_without_a_cut_are_those_of_every_release() -> None:
    whole = cut_at(FlowConfig(), 0.0, 1.0)
    assert draw_sigma(whole, 0, 0, "key", 1) == draw_sigma(FlowConfig(), 0, 0, "key", 1)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"min_timestep": -1.0}, "train.flow.min_timestep is -1.0; it must be at least 0"),
        ({"max_timestep": 1001.0}, "train.flow.max_timestep is 1001.0; it must be at most 1,000"),
        ({"min_timestep": 500.0, "max_timestep": 500.0}, "is 500, and no time lies between it and 500"),
        ({"min_timestep": 1000.0}, "is 1000, and no time lies between it and 1000"),
    ],
)
def test_a_cut_that_leaves_nothing_is_refused(settings: dict[str, float], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        FlowConfig(**settings)


def test_a_cut_where_the_density_has_nothing_is_one_sentence() -> None:
    flow = cut_at(FlowConfig(logit_std=0.0, flow_shift=1.0), 0.6, 0.9)
    with pytest.raises(ValueError, match="min_timestep 600 and max_timestep 900 leave noise levels that its density"):
        draw_sigma(flow, 0, 0, "a", 1)
    assert draw_sigma(replace(flow, min_timestep=400), 0, 0, "a", 1) == 0.5
