"""The loss of packed sequences: parts add up, whatever the degree and the precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.config import FlowConfig
from ops.flow.noise import NoiseKey, rows
from ops.flow.objective import FlowObjective, draw_first_sigma, draw_frame_sigmas, draw_sigma
from ops.flow.train_pass import PassClip, PassSettings, held_out_pass, packed_loss, train_pass
from ops.packed.packing import Layout, Sequence

torch.set_num_threads(1)

SEED, STEP, WIDTH = 7, 3, 4


@pytest.mark.parametrize("degree", [1, 3])
def test_loss_parts_of_ranks_add_up_to_the_weighted_mean(degree: int) -> None:
    sequences = [Sequence((2, 3, 4), 1), Sequence((1, 1, 2), 1)]
    predictions, targets = ([torch.randn(s.tokens, 5, dtype=torch.float64) for s in sequences] for _ in range(2))
    weights = torch.tensor([0.25, 0.5], dtype=torch.float64)
    layouts = [Layout(sequences, degree, rank) for rank in range(degree)]
    parts = [packed_loss(layout.local(predictions), layout.local(targets), layout, weights) for layout in layouts]
    expected = sum(w * (p - t).square().mean() for w, p, t in zip(weights, predictions, targets))
    torch.testing.assert_close(sum(parts), expected, atol=1e-12, rtol=1e-12)


def test_loss_without_rows_is_a_zero_that_backward_accepts() -> None:
    layout = Layout([Sequence((1, 1, 1), 1)], 2, 1)
    prediction = torch.zeros(0, 4, requires_grad=True)
    loss = packed_loss(prediction, torch.zeros(0, 4), layout, torch.ones(1))
    loss.backward()
    assert loss == 0 and prediction.grad.shape == (0, 4)


def test_half_precision_is_summed_in_fp32() -> None:
    layout = Layout([Sequence((8, 16, 16), 1)])
    prediction = torch.full((2048, 16), 0.1, dtype=torch.bfloat16)
    loss = packed_loss(prediction, torch.zeros(2048, 16), layout, torch.ones(1))
    torch.testing.assert_close(loss, prediction[0, 0].float().square(), atol=1e-6, rtol=1e-4)


class Asked(nn.Module):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor, times: Tensor, text: Tensor, layout: Layout, *given: Any) -> Tensor:
        self.tokens, self.times = tokens, times
        return self.scale * tokens


@pytest.mark.parametrize("levels", ["one", "independent", "rising"])
@pytest.mark.parametrize("clean", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_noise_and_levels_of_a_pass_are_those_of_seed_step_and_sample(levels: Any, clean: int, rank: int) -> None:
    """On the second rank of a bag, too, whose rows begin in the middle of a clip."""
    by_frame = levels != "one"
    flow = FlowConfig(frame_levels=levels, first_frame=0.5, first_frame_noise=0.4)
    sequences = [Sequence((t, 1, 3), 1, clean_frames=clean, frame_times=by_frame) for t in (3, 2)]
    layout, generator = Layout(sequences, 2, rank), torch.Generator().manual_seed(0)
    whole = [torch.randn(one.tokens, WIDTH, generator=generator) for one in sequences]
    keys = ("0/0/4", "0/1/4")
    clips = [
        PassClip(rows=x[layout.chunk(i)], text=torch.zeros(1, 2), key=key, weight=0.5)
        for i, (x, key) in enumerate(zip(whole, keys))
    ]
    settings = PassSettings(
        objective=FlowObjective(flow), seed=SEED, step=STEP, latent_width=WIDTH, dtype=torch.float32, autocast=False
    )
    train_pass(asked := Asked(), clips, layout, Group.solo(), settings)
    noisy, means = [], []
    for x, key, one in zip(whole, keys, sequences, strict=True):
        frames, t = (SEED, STEP, key, one.tokens), one.grid[0]
        drawn = draw_frame_sigmas(flow, *frames, t) if by_frame else [draw_sigma(flow, *frames)] * t
        others = drawn[clean:]
        of_frames = [draw_first_sigma(flow, SEED, STEP, key, min(others))] * clean + others
        level = torch.tensor(of_frames).repeat_interleave(3)[:, None]
        noisy.append((1 - level) * x + level * rows(NoiseKey.of(SEED, STEP, key), slice(0, one.tokens), WIDTH))
        means.append(sum(others) / len(others))
    torch.testing.assert_close(asked.tokens, layout.local(noisy))
    told = held_out_pass(asked, clips, layout, Group.solo(), settings)
    assert [one.level for one in told] == pytest.approx(means), "of frames with a loss"
