"""The loss of packed sequences: parts add up, whatever the degree and the precision."""

from __future__ import annotations

import pytest
import torch

from ops.flow.train_pass import packed_loss
from ops.packed.packing import Layout, Sequence

torch.set_num_threads(1)


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
