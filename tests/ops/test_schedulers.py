"""Clips that Diffusers' own schedulers denoise, beside a flow whose end is known."""

from __future__ import annotations

import pytest
import torch

from ops.flow.schedulers import ScheduledClip, Scheduler

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
