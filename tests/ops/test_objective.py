"""Objectives: what is mixed, what is predicted, and DDIM's steps, against Diffusers' schedulers."""

from __future__ import annotations

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, DDIMScheduler

from ops.config import Diffusion, FlowConfig
from ops.objective import DiffusionObjective, FlowObjective, ddim_steps, objective_of, signal_shares

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
