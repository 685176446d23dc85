"""Clips that Diffusers' own schedulers denoise, beside a flow whose end is known."""

from __future__ import annotations

import pytest
import torch

from ops.flow.schedulers import ScheduledClip, Scheduler

DIFFUSION = {"prediction_type": "v_prediction", "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 12.0}


@pytest.mark.parametrize("steps", [1, 2, 20, 300])
@pytest.mark.parametrize("name", ["UniPCMultistepScheduler", "DPMSolverMultistepScheduler"])
def test_a_straight_flow_ends_at_the_clean_clip(name: str, steps: int) -> None:
    """The first ones of 300 steps have one time."""
    clean, noise = torch.randn(2, 4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    clip, latent = ScheduledClip(Scheduler(name=name, settings=FLOW), steps, seed=0), noise
    assert len(clip.times) == steps and (steps < 300 or clip.times[0] == clip.times[1])
    for index in range(steps):
        latent = clip.step(index, latent, noise - clean)
    torch.testing.assert_close(latent, clean, atol=5e-3, rtol=0)


@pytest.mark.parametrize("steps", [60, 61])
@pytest.mark.parametrize("name", ["CogVideoXDDIMScheduler", "CogVideoXDPMScheduler", "DDIMScheduler"])
def test_a_clip_takes_as_many_steps_as_it_is_told_and_ends_clean(name: str, steps: int) -> None:
    """Diffusers' own 61 steps are 62, by rounding, of which the last is at the time -1."""
    settings = {**DIFFUSION, "clip_sample": False, "set_alpha_to_one": True}
    clip = ScheduledClip(Scheduler(name=name, settings=settings), steps, seed=0)
    assert len(clip.times) == steps and clip.times[-1] >= 0
    shares = clip._theirs.alphas_cumprod  # type: ignore[attr-defined]
    clean, latent = torch.randn(2, 4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    for index, time in enumerate(clip.times):
        share = shares[int(time)]
        noise = (latent - share.sqrt() * clean) / (1 - share).sqrt()
        latent = clip.step(index, latent, share.sqrt() * noise - (1 - share).sqrt() * clean)
    torch.testing.assert_close(latent, clean, atol=0.2, rtol=0)  # 60 steps end at the time 0, with 3 % of noise
